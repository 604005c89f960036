"""Sort a list of digits, the toy task of Stanford CS336's lecture 17: small enough to be learned from random weights.

Here: how one list is drawn, how it is written, and when two problems are the same. Not here: splitting the lists into
train and test (data/__init__.py), judging an answer (rewards.py: sort_distance, sort_inclusion_ordering, sort_exact).

Columns: prompt (str, "312="), numbers (list of int). The right completion is "123".

Try it:  python -c "import data; print(data.load_data('sort:8')[0][0])"
"""


def write(numbers):
    """How a list looks, as the model reads it and as its answer is expected; no other place knows."""
    return "".join(map(str, numbers))


def draw(rng, length):
    """A problem of `length` digits, repeats allowed, from random.Random `rng`."""
    numbers = [rng.randrange(10) for _ in range(length)]
    return {"prompt": f"{write(numbers)}=", "numbers": numbers}


def identity(problem):
    return problem["numbers"]
