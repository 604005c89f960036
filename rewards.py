"""Rewards: completions -> numbers. The built-in reward functions, loading one's own, and calling them all.

What lives here: functions that look at text (or token ids) and return one number a completion, in TRL's convention
    fn(prompts=..., completions=..., completion_ids=..., **columns) -> list of B floats, or None for "not applicable"
so that functions people already have run unchanged. `completions` are strings, or lists of {"role", "content"} for chat
data; every further column of the data arrives as a list of B values; `trainer_state`, `log_metric(name, value)` and
`log_extra(column, values)` arrive too. Async functions run concurrently. A function without `**kwargs` gets only what
it names. What does not live here: the weighted sum, groups and advantages (loss.py's); weights are only carried.

To add one: write a function ending in `_reward` below, and `--rewards` knows it; or keep it in a file of your own:
    torchrun train.py --rewards correctness:1.0,xmlcount:0.5,my_rewards.py:my_fn:0.5
To see what there is:
    python rewards.py

B completions, K reward functions. Every built-in takes linear time on any text: a model in training writes any text.
"""
import ast
import asyncio
import functools
import importlib.util
import inspect
import math
import numbers as number_types
import operator
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, wait
from contextlib import contextmanager
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Callable, NamedTuple

import torch


def texts(messages):
    """Plain strings from completions or prompts: strings as they are, of a chat the last message's content."""
    return [m if isinstance(m, str) else m[-1]["content"] for m in messages]


def extract_answer(text):
    """What stands after the last `<answer>` up to the next `</answer>`, stripped; without tags the whole text."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def gold_answer(answer):
    """The `answer` column as text: what follows `####` where a whole GSM8K solution stands in it."""
    return str(answer).rpartition("####")[2].strip()


# ---- GSM8K: the five rewards of the well-known tutorials, with the values they were published with ------------------


def correctness_reward(completions, answer, **kwargs):
    """2.0 if the extracted answer equals the `answer` column, character for character."""
    return [None if gold is None else 2.0 if extract_answer(text) == gold_answer(gold) else 0.0
            for text, gold in zip(texts(completions), answer)]


def int_reward(completions, **kwargs):
    """0.5 if the extracted answer is all digits (`str.isdigit`)."""
    return [0.5 if extract_answer(text).isdigit() else 0.0 for text in texts(completions)]


def strict_format_reward(completions, **kwargs):
    """0.5 if the completion is the four tags on lines of their own, text between, a newline at the end.

    Published without DOTALL, so that reasoning of two lines never counted; here it does (see strict_format_published).
    As published, one more newline at the end is allowed: a regex's `$` matches before it.
    """
    return [0.5 if _strict_format(text) else 0.0 for text in texts(completions)]


def _strict_format(text):
    # Searching for the first middle leaves the most room for the answer, so one search decides. The regex
    # <reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$ means the same and is quadratic.
    opening, middle, closing = "<reasoning>\n", "\n</reasoning>\n<answer>\n", "\n</answer>\n"
    text = text[:-1] if text.endswith("\n\n") else text
    at = text.find(middle, len(opening))
    return text.startswith(opening) and text.endswith(closing) and 0 <= at <= len(text) - len(closing + middle)


def soft_format_reward(completions, **kwargs):
    """0.5 if the completion begins with the two pairs of tags in order, only white space between them.

    Published without DOTALL; here reasoning and answer may have several lines (see soft_format_published).
    """
    def matches(text):
        middle = _MIDDLE.search(text, len("<reasoning>"))
        return text.startswith("<reasoning>") and middle and "</answer>" in text[middle.end():]

    return [0.5 if matches(text) else 0.0 for text in texts(completions)]


_MIDDLE = re.compile(r"</reasoning>\s*<answer>")


def strict_format_published_reward(completions, **kwargs):
    """strict_format as first published: reasoning and answer of one line each."""
    pattern = re.compile(r"<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>\n$")
    return [0.5 if pattern.match(text) else 0.0 for text in texts(completions)]


def soft_format_published_reward(completions, **kwargs):
    """soft_format as first published: no newline inside a pair, so strict and soft never pay together."""
    def matches(text):
        first_line = text.partition("\n")[0]
        middles = [m for m in _MIDDLE.finditer(text, len("<reasoning>")) if m.start() < len(first_line)]
        # All middles but the last lie wholly in the first line, and of those the first has the most room after it.
        return text.startswith("<reasoning>") and any(
            "</answer>" in text[m.end():].partition("\n")[0] for m in middles[:1] + middles[-1:])

    return [0.5 if matches(text) else 0.0 for text in texts(completions)]


def think_format_reward(completions, **kwargs):
    """1.0 if the completion begins with `<think>`, closed later and not opened again (TRL's)."""
    return [1.0 if text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text else 0.0
            for text in texts(completions)]


def xmlcount_reward(completions, **kwargs):
    """Up to 0.5: 0.125 for each of the four tags that occurs once, less 0.001 a character after the last.

    As published, also in its oddity: without a closing tag the whole text counts as trailing, so that a long unfinished
    answer scores below zero.
    """
    def count(text):
        value = 0.125 * ((text.count("<reasoning>\n") == 1) + (text.count("\n</reasoning>\n") == 1))
        if text.count("\n<answer>\n") == 1:
            value += 0.125 - 0.001 * len(text.split("\n</answer>\n")[-1])
        if text.count("\n</answer>") == 1:
            value += 0.125 - 0.001 * (len(text.split("\n</answer>")[-1]) - 1)
        return value

    return [count(text) for text in texts(completions)]


def gsm8k_number_reward(completions, answer, **kwargs):
    """1.0 if the extracted answer is the `answer` column's number: `$9{,}500.` and `9500 eggs` are 9,500."""
    golds = [None if gold is None else parse_number(gold_answer(gold)) for gold in answer]
    for raw, gold in zip(answer, golds):
        if raw is not None and gold is None:
            raise ValueError(f"the answer column holds {_short(raw)}, which is not a number")
    return [None if gold is None else 1.0 if parse_number(extract_answer(text)) == gold else 0.0
            for text, gold in zip(texts(completions), golds)]


_NUMBER = re.compile(r"([-+]?)\s*([0-9]*\.?[0-9]+)(?:\s*/\s*([0-9]+))?")


def parse_number(text):
    r"""A Fraction, or None if the text is not one number with at most a unit after it.

    Removed: `\boxed{}` and all around it, currency signs, commas before three digits (also LaTeX's `{,}`), bold marks,
    a unit or `%` (any text without digits), a final period. So `25%` is 25; `1/2` is a half; `2,5` is no number.
    """
    text = text.replace("{,}", ",").replace("\u2212", "-")             # U+2212 is the minus sign of typeset text
    _, boxed, inside = text.rpartition(r"\boxed{")
    text = inside.partition("}")[0] if boxed else text
    text = re.sub(r"\\[,!]|\\?\$|[€£¥]", "", text).strip().lstrip("*")
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    number = _NUMBER.match(text)
    if not number or len(number[0]) > 100 or any(c.isdigit() or c == "\n" for c in text[number.end():]):
        return None
    sign, value, divisor = number.groups(default="1")
    return Fraction(sign + value) / int(divisor) if int(divisor) else None


# ---- sorting (Stanford CS336, lecture 17) ----------------------------------------------------------------------------
# The numbers to sort are the `numbers` column; where the data has none, the integers of the prompt's text.


def sort_exact_reward(completions, prompts=None, numbers=None, **kwargs):
    """1.0 if the answer is exactly the sorted numbers: single spaces between, or for digits none."""
    def exact(text, given):
        words = [str(x) for x in sorted(given)]
        return float(extract_answer(text) in ([" ".join(words)] + ["".join(words)] * all(0 <= x <= 9 for x in given)))

    return [exact(text, given) if given else None for text, given in zip(texts(completions), _given(prompts, numbers))]


def sort_distance_reward(completions, prompts=None, numbers=None, **kwargs):
    """Share of positions that hold the sorted list's number, of the longer list's: padding costs."""
    def share(found, given):
        hits = sum(x == y for x, y in zip(found, sorted(given)))
        return hits / max(len(found), len(given))

    return [share(_found(text, given), given) if given else None
            for text, given in zip(texts(completions), _given(prompts, numbers))]


def sort_inclusion_ordering_reward(completions, prompts=None, numbers=None, **kwargs):
    """Points for numbers that occur and neighbours in order, as a share of the maximum.

    A point for each of the prompt's n numbers that occurs in the answer and for each neighbouring pair of the answer
    with x <= y: at most 2n - 1.

    The lecture's answers are as long as its prompts. Here they need not be, and 1.0 must stay the sorted list's alone:
    a number given twice must occur twice, pairs count among the first n numbers, and each number too many adds 1 to
    the maximum.
    """
    def share(found, given):
        n = len(given)
        inclusion = sum((Counter(given) & Counter(found)).values())
        ordering = sum(None not in (x, y) and x <= y for x, y in zip(found[:n], found[1:n]))
        return (inclusion + ordering) / (n + max(n, len(found)) - 1)

    return [share(_found(text, given), given) if given else None
            for text, given in zip(texts(completions), _given(prompts, numbers))]


def _given(prompts, numbers):
    return [_integers(text) for text in texts(prompts)] if numbers is None else numbers


def _found(text, given):
    """The answer's numbers; of digits that stand together, as data/sort.py writes them ("1234"), each character, so
    that what is no digit takes a place, and a place is right or wrong whatever stands in the others."""
    answer = extract_answer(text)
    if all(0 <= x <= 9 for x in given) and not re.search(r"[0-9][\s,]+[0-9]", answer):
        return [int(x) if x in "0123456789" else None for x in answer]
    return _integers(answer)


def _integers(text):
    # A minus counts where no digit stands before it. Of a long run of digits the first 18 are read: int() is quadratic.
    return [int(x) for x in re.findall(r"(?<![0-9])-?[0-9]{1,18}", text)]


# ---- Countdown (the task of TinyZero) --------------------------------------------------------------------------------

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown_reward(completions, nums, target, **kwargs):
    """1.0 if the answer is an expression of + - * / that uses each of `nums` once and makes `target`.

    It may end in "= target". No signs before numbers, no powers, no floor division. Exact: 8 / (3 - 8 / 3) is 24.
    """
    def solves(text, given, goal):
        expression, equals, result = extract_answer(text).partition("=")
        return (not equals or result.strip() == str(goal)) and _evaluate(expression.strip(), given) == goal

    return [None if goal is None else 1.0 if solves(text, given, goal) else 0.0
            for text, given, goal in zip(texts(completions), nums, target)]


def _evaluate(expression, given):
    """The exact value, or None if it is not an expression that uses each given number once. Parsed, never evaluated."""
    if len(expression) > 1000 or not re.fullmatch(r"[-+*/() 0-9]+", expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):     # what the parser raises on hostile text
        return None
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if sorted(used) != sorted(given):
        return None

    def value(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
            raise ValueError("not one of + - * /")
        return _OPERATORS[type(node.op)](value(node.left), value(node.right))

    try:
        return value(tree)
    except (ValueError, ZeroDivisionError):
        return None


# ---- length ----------------------------------------------------------------------------------------------------------


def soft_overlong_reward(completion_ids, max_completion_length, soft_punish_cache=None, **kwargs):
    """0 down to -1 over the last soft_punish_cache tokens before max_completion_length: DAPO's punishment.

    arXiv 2503.14476, eq. 13. soft_punish_cache defaults to a fifth of the length, as in the paper (4,096 of 20,480).
    """
    cache = max_completion_length // 5 if soft_punish_cache is None else soft_punish_cache
    if not 0 <= cache <= max_completion_length:
        raise ValueError(f"soft_punish_cache {cache} is not within 0 and max_completion_length {max_completion_length}")
    free = max_completion_length - cache
    return [0.0 if len(ids) <= free else -1.0 if len(ids) > max_completion_length else (free - len(ids)) / cache
            for ids in completion_ids]


# ---- loading ---------------------------------------------------------------------------------------------------------

BUILTINS = {name.removesuffix("_reward"): fn for name, fn in list(globals().items()) if name.endswith("_reward")}


class Reward(NamedTuple):
    name: str           # in the metrics: rewards/<name>/mean
    weight: float       # of its value in the sum; applied in loss.py
    fn: Callable


def load_rewards(spec, **settings):
    """`"correctness:1.0,xmlcount:0.5,my_rewards.py:my_fn:0.5"` -> list of Reward; a weight left out is 1.

    settings: values for built-ins that name them, as soft_overlong names max_completion_length and soft_punish_cache.
    Raises ValueError for unknown names, missing files and functions, weights that are no finite number, duplicates.
    """
    rewards, modules = [], {}
    for item in filter(None, (item.strip() for item in spec.split(","))):
        path, is_file, rest = item.partition(".py:")
        name, _, weight = (rest if is_file else item).partition(":")
        if is_file:
            path += ".py"
            modules[path] = modules.get(path) or _import_file(path)    # two functions of one file share its state
            choices = {n: f for n, f in vars(modules[path]).items() if callable(f) and not n.startswith("_")}
            fn = choices.get(name) or _unknown(f"function {name!r} in {path}", name, choices)
        elif name.endswith(".py"):
            raise ValueError(f"--rewards {item!r} names a file but no function; write {item}:my_function")
        else:
            fn = BUILTINS.get(name) or _unknown(f"reward {name!r}", name, BUILTINS)
            bound = {k: v for k, v in settings.items() if k in inspect.signature(fn).parameters}
            fn = functools.partial(fn, **bound) if bound else fn
        rewards.append(Reward(name, _weight(weight, item), fn))
    names = [reward.name for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--rewards {spec!r} " + ("names a reward twice" if names else "names no reward"))
    return rewards


def _weight(text, item):
    try:
        weight = float(text or 1.0)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"--rewards {item!r}: the weight {text!r} is not a number")
    return weight


def _unknown(what, name, choices):
    close = get_close_matches(name, choices, n=1)
    raise ValueError(f"unknown {what}{f', did you mean {close[0]!r}?' if close else ';'} "
                     f"choices: {', '.join(sorted(choices)) or 'none'}")


def _import_file(path):
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"--rewards: no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"user_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                     # dataclasses and pickle look their module up there
    sys.path.append(str(path.resolve().parent))         # so that the file can import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--rewards: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


# ---- scoring ---------------------------------------------------------------------------------------------------------


def score(rewards, prompts, completions, completion_ids, columns, *, trainer_state=None,
          log_metric=lambda name, value: None, log_extra=lambda column, values: None, timeout=0):
    """Call every reward function once on the whole batch -> float32 tensor (B, K), unweighted, NaN for None.

    rewards: what load_rewards gives. prompts, completions: B strings, or B lists of messages. completion_ids: B lists
    of token ids. columns: name -> B values. trainer_state, log_metric and log_extra are handed on to functions that
    want them. timeout: seconds a function may take, 0 for no bound; with a bound functions run outside the main
    thread, where `signal` does not work, and one that hangs is left behind, not killed.

    NaN counts as None, as in TRL; infinity is an error. Raises ValueError for what a function returns, RuntimeError
    for what it raises or for taking too long; the message names the function, the expected and the actual, and the
    completion at fault.
    """
    batch = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    for column, values in batch.items():
        if len(values) != len(completions):
            raise ValueError(f"column {column!r} has {len(values)} values for {len(completions)} completions")
    shared = {"trainer_state": trainer_state, "log_metric": log_metric, "log_extra": log_extra}
    arguments = [_arguments(reward, batch, shared) for reward in rewards]      # all signatures before the first call
    running, table = [], []
    for reward, kwargs in zip(rewards, arguments):
        with _errors_named(reward, batch, shared, timeout):
            running.append(_start(reward.fn, kwargs, timeout))
    for reward, result in zip(rewards, running):                               # async ones ran on beside the others
        with _errors_named(reward, batch, shared, timeout):
            values = _finish(result, timeout)
        table.append(_check_values(reward.name, values, completions))
    return torch.tensor(table, dtype=torch.float32).T                          # (K, B) -> (B, K)


def _arguments(reward, batch, shared):
    """The keyword arguments a function gets: all if it takes **kwargs, else those it names."""
    offered = {**batch, **shared}
    parameters = inspect.signature(reward.fn).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if missing:
        raise ValueError(f"reward {reward.name!r} needs {missing[0]!r}; what there is: {', '.join(offered)}")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return offered
    return {p.name: offered[p.name] for p in named if p.name in offered}


class _Hangs(Exception):
    """Not TimeoutError, which a function may raise itself."""


def _start(fn, kwargs, timeout):
    """What the function returns; of an async one a Future, already running on the event loop."""
    if timeout:
        called = Future()
        called.set_running_or_notify_cancel()       # a result that comes too late may still be set, and is dropped

        def call():
            try:
                called.set_result(fn(**kwargs))
            except Exception as error:
                called.set_exception(error)

        threading.Thread(target=call, daemon=True).start()      # daemon: one that hangs must not hold up the exit
        result = _finish(called, timeout)
    else:
        result = fn(**kwargs)
    return asyncio.run_coroutine_threadsafe(_await(result), _event_loop()) if inspect.isawaitable(result) else result


def _finish(result, timeout):
    if not isinstance(result, Future):
        return result
    if wait([result], timeout or None).not_done:
        result.cancel()
        raise _Hangs
    return result.result()


async def _await(awaitable):
    return await awaitable


@functools.cache
def _event_loop():
    # One loop for the whole run: an HTTP client that a reward function keeps between steps dies with its first loop.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextmanager
def _errors_named(reward, batch, shared, timeout):
    """Turns what a function raises into an error with its name, and the completion where that can be found."""
    B = len(batch["completions"])
    try:
        yield
    except _Hangs:
        raise RuntimeError(f"reward {reward.name!r} took longer than --reward_timeout {timeout} s on {B} completions; "
                           f"first completion: {_short(batch['completions'][0])}") from None
    except Exception as error:
        fault = _find_fault(reward, batch, shared, error)
        fault = "" if fault is None else f"; completion {fault} at fault: {_short(batch['completions'][fault])}"
        raise RuntimeError(f"reward {reward.name!r} raised {type(error).__name__}: {error}; "
                           f"expected {B} numbers{fault}") from error


def _find_fault(reward, batch, shared, error):
    """Index of the first completion on which the function, called with it alone, raises the same again, or None.

    Only asking again can tell, as the function saw the whole batch. The run is over anyway; ten seconds at most.
    """
    quiet = {**shared, "log_metric": lambda name, value: None, "log_extra": lambda column, values: None}
    end = time.monotonic() + 10
    for i in range(len(batch["completions"])):
        kwargs = _arguments(reward, {column: [values[i]] for column, values in batch.items()}, quiet)
        seconds = max(end - time.monotonic(), 0.01)
        try:
            _finish(_start(reward.fn, kwargs, seconds), seconds)
        except _Hangs:
            return None
        except Exception as again:
            if type(again) is type(error):
                return i
    return None


def _check_values(name, values, completions):
    """What a function returned -> list of B floats, NaN for None, or a ValueError that says what is wrong."""
    B, returned = len(completions), values
    values = values.tolist() if hasattr(values, "tolist") else values           # tensors and arrays
    if isinstance(values, (str, bytes, dict, set)) or not hasattr(values, "__iter__"):
        raise ValueError(f"reward {name!r} returned {type(returned).__name__} {_short(returned)}; expected a list of "
                         f"{B} numbers, one a completion; first completion: {_short(completions[0])}")
    values = list(values)
    if len(values) != B:
        raise ValueError(f"reward {name!r} returned {len(values)} values; expected {B}, one a completion; "
                         f"completion at fault: {_short(completions[min(len(values), B - 1)])}")
    floats = []
    for value, completion in zip(values, completions):
        value = value.item() if getattr(value, "ndim", None) == 0 else value    # a list of 0-d tensors, numpy scalars
        real = value is None or isinstance(value, number_types.Real)
        if not real or (value is not None and abs(value) > torch.finfo(torch.float32).max):
            raise ValueError(f"reward {name!r} returned {type(value).__name__} {_short(value)} among {B} values; "
                             f"expected {B} finite numbers (or None); completion at fault: {_short(completion)}")
        floats.append(math.nan if value is None else float(value))
    return floats


def _short(value, length=160):
    text = repr(value)
    return text if len(text) <= length else f"{text[:length // 2]} ... {text[-length // 2:]}"


def main():
    for name, fn in BUILTINS.items():
        print(f"{name:26} {inspect.getdoc(fn).splitlines()[0]}")


if __name__ == "__main__":
    main()
