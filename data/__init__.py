"""Problems: where they come from, in which order they are trained on, and their prompts as token ids.

Here: the names after --data, the split into train and test, epochs, prompt lengths. Each task is a file of its own
that says what one problem is: sort.py, countdown.py, gsm8k.py, jsonl.py. tokenizer.py turns text into ids.

A problem is a dict: `prompt` (text, or a list of {"role", "content"}) and any further columns, which all reach the
reward functions. `train[i]` is the i-th problem of the run for every i >= 0, a function of (seed, i) and nothing else:
a resumed run, and a run with another number of ranks, reads the same problems without any state to save. `test` is a
plain list.

Try it:  python -c "import data; train, test = data.load_data('sort'); print(train[0], len(test))"
"""

import difflib
import hashlib
import json
import random

from data import countdown, gsm8k, jsonl, sort

HELD_OUT = 256  # test problems of a generated task


def load_data(spec, seed=0, few_shot=0):
    """-> (train, test) for what stands after --data:

    sort, sort:LENGTH              lists of LENGTH digits (4), generated, endless
    countdown                      generated, endless
    gsm8k, gsm8k:DIRECTORY         downloaded once, or train.jsonl and test.jsonl of DIRECTORY
    FILE.jsonl, FILE.jsonl:TEST.jsonl   a user's own; without TEST.jsonl, test is empty

    Finite train sets are repeated for ever, each epoch in an order of its own. few_shot: worked examples before each
    question of gsm8k.
    """
    name, _, option = spec.partition(":")
    if name == "sort":
        if option and not (option.isdigit() and int(option) >= 2):
            raise ValueError(f"--data {spec}: the length of the lists must be a whole number from 2 on, not {option!r}")
        length = int(option or 4)
        return generated(lambda rng: sort.draw(rng, length), sort.identity, seed)
    if name == "countdown":
        if option:
            raise ValueError(f"--data {spec}: countdown takes nothing after the colon")
        return generated(countdown.draw, countdown.identity, seed)
    if name == "gsm8k":
        train, test = (
            [gsm8k.problem(row, where, few_shot) for where, row in jsonl.rows(path, ("question", "answer"))]
            for path in gsm8k.files(option or None)
        )
        return Epochs(train, seed), test
    if name.endswith(".jsonl"):
        return Epochs(jsonl.problems(name), seed), jsonl.problems(option) if option else []
    names = ("sort", "countdown", "gsm8k")
    close = difflib.get_close_matches(name, names, n=1)
    raise ValueError(
        f"--data {spec}: unknown; known are sort[:LENGTH], countdown, gsm8k[:DIRECTORY] and FILE.jsonl[:TEST.jsonl]"
        + (f"; did you mean {close[0]}?" if close else "")
    )


class Epochs:
    """`problems` for ever: index i is in epoch i // len(self), whose order is a function of (seed, epoch)."""

    def __init__(self, problems, seed):
        self.problems, self.seed = problems, seed
        self.epoch, self.order = None, None  # the last order asked for, so that it is not shuffled anew for every index

    def __len__(self):
        return len(self.problems)

    def __getitem__(self, i):
        epoch, place = divmod(i, len(self.problems))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, list(range(len(self.problems)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
        return self.problems[self.order[place]]


class Stream:
    """Problem i is get(i), for ever."""

    def __init__(self, get):
        self.get = get

    def __getitem__(self, i):
        return self.get(i)


def generated(draw, identity, seed):
    """(endless train, list of test) from draw(rng) -> problem. Train and test can have no problem in common, at any
    seed and index, because a hash of the problem itself says which side it is on: one in eight is held out."""

    def held_out(problem):
        return hashlib.sha256(json.dumps(identity(problem)).encode()).digest()[0] % 8 == 0

    def train(i):
        rng = random.Random(f"{seed}/{i}")
        while held_out(problem := draw(rng)):
            pass
        return problem

    rng, test = random.Random("test"), {}  # the same test set at every seed, so that runs compare
    for _ in range(40 * HELD_OUT):  # enough for all of them, unless there are fewer (12 held-out lists of two digits)
        if len(test) < HELD_OUT and held_out(problem := draw(rng)):
            test[json.dumps(identity(problem))] = problem
    return Stream(train), list(test.values())


def fit_prompts(problems, tokenizer, max_prompt_length, *, truncate=False, **template_kwargs):
    """-> (problems with a column `prompt_ids`, number of problems dropped), for train and test alike.

    Prompts longer than max_prompt_length tokens are dropped or, with truncate, lose their first tokens: the header
    of the answer to come, at the end, stays. A generated stream is encoded as it is read, where there is nothing to
    drop: a prompt that is too long is an error when it is read. ValueError when nothing is left.
    """
    if max_prompt_length < 1:
        raise ValueError(f"max_prompt_length must be at least 1, not {max_prompt_length}")

    def fit(problem):
        ids = tokenizer.encode_prompt(problem["prompt"], **template_kwargs)
        if len(ids) > max_prompt_length and not truncate:
            return None, len(ids)
        return {**problem, "prompt_ids": ids[-max_prompt_length:]}, len(ids)

    if isinstance(problems, Stream):

        def get(i):
            fitted, length = fit(problems[i])
            if fitted is None:
                raise ValueError(f"problem {i}: {length} prompt tokens, above max_prompt_length {max_prompt_length}")
            return fitted

        return Stream(get), 0
    if isinstance(problems, Epochs):
        rows = problems.problems
        kept, dropped = fit_prompts(rows, tokenizer, max_prompt_length, truncate=truncate, **template_kwargs)
        return Epochs(kept, problems.seed), dropped
    fits = [fit(problem) for problem in problems]
    kept = [fitted for fitted, _ in fits if fitted is not None]
    if fits and not kept:
        shortest = min(length for _, length in fits)
        raise ValueError(
            f"all {len(fits)} prompts are longer than max_prompt_length {max_prompt_length}; "
            f"the shortest has {shortest} tokens"
        )
    return kept, len(fits) - len(kept)
