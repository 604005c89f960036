"""Countdown: make a target from three or four numbers, each used once, with + - * / (TinyZero's task).

Here: how one problem is drawn and asked, and when two problems are the same. Not here: splitting the problems into
train and test (data/__init__.py), judging an answer (rewards.py: countdown).

Columns: prompt (a system and a user message), nums (list of int), target (int). Every problem is solvable: it is made
by combining its numbers, two at a time, with divisions that leave no remainder.

Try it:  python -c "import data; print(data.load_data('countdown')[0][0])"
"""

SYSTEM_PROMPT = """\
Work the task out first, then answer, each tag on a line of its own, in exactly this form:
<reasoning>
your working, step by step
</reasoning>
<answer>
one arithmetic expression, nothing else
</answer>"""


def question(nums, target):
    numbers = ", ".join(map(str, nums))
    return (
        f"Write an expression that equals {target}. Use each of the numbers {numbers} exactly once; "
        "you may use +, -, *, / and parentheses."
    )


def draw(rng):
    """A problem from random.Random `rng`: 3 or 4 numbers of 1..99, a target of 1..999."""
    while True:
        nums = [rng.randrange(1, 100) for _ in range(rng.choice((3, 4)))]
        target = combine(rng, list(nums))
        if 1 <= target <= 999 and target not in nums:
            break
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question(nums, target)},
    ]
    return {"prompt": messages, "nums": nums, "target": target}


def combine(rng, values):
    """Replaces two random values by the result of a random operation until one is left."""
    while len(values) > 1:
        a = values.pop(rng.randrange(len(values)))
        b = values.pop(rng.randrange(len(values)))
        results = [a + b, a - b, a * b]
        if b and a % b == 0:
            results.append(a // b)
        values.append(rng.choice(results))
    return values[0]


def identity(problem):
    return [sorted(problem["nums"]), problem["target"]]  # the same numbers in another order are the same problem
