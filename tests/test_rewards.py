"""rewards.py: every built-in's values, the calling convention, what happens when a function misbehaves."""
import asyncio
import json
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import rewards
from rewards import load_rewards, parse_number, score

CASES = [json.loads(line) for line in (Path(__file__).parent / "reward_cases.jsonl").open(encoding="utf-8")]


def chat(text):
    return [{"role": "assistant", "content": text}]


def one(fn, text, **columns):
    """The function's value for one completion, which plain and chat data must agree on."""
    columns = {name: [value] for name, value in columns.items()}
    plain = fn(prompts=["q"], completions=[text], completion_ids=[[1]], **columns)
    assert plain == fn(prompts=[chat("q")], completions=[chat(text)], completion_ids=[[1]], **columns)
    return plain[0]


def call(fn, n=4, **options):
    reward = rewards.Reward("spy", 1.0, fn)
    completions = [f"text {i}" for i in range(n)]
    return score([reward], ["q"] * n, completions, [[0]] * n, {"answer": list("abcdefgh"[:n])}, **options)


# ---- GSM8K ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[f"{c['id']} {c['note'][:40]}" for c in CASES])
def test_published_values(case):
    text, answer = case["completion"], case["gold"]
    assert rewards.extract_answer(text) == case["extracted"]
    for name, expected in [("correctness", "correctness"), ("int", "int"), ("xmlcount", "xmlcount"),
                           ("strict_format", "strict_format_dotall"), ("soft_format", "soft_format_dotall"),
                           ("strict_format_published", "strict_format_published"),
                           ("soft_format_published", "soft_format_published")]:
        assert one(rewards.BUILTINS[name], text, answer=answer) == pytest.approx(case[expected], abs=1e-9), name


def test_the_cases_are_all_there():
    assert len(CASES) == 58


FORMATS = {
    "strict_format": r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$",
    "soft_format": r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("published", [False, True])
def test_linear_formats_equal_the_regular_expressions(name, published):
    """The searches replace regexes that are quadratic on hostile text; on every small text they must agree."""
    import random
    import re

    pattern = re.compile(FORMATS[name], 0 if published else re.DOTALL)
    fn = rewards.BUILTINS[name + "_published" * published]
    pieces = ["<reasoning>", "</reasoning>", "<answer>", "</answer>", "\n", "\n", " ", "x"]
    good = "<reasoning>\nx\n</reasoning>\n<answer>\n1\n</answer>\n"
    rng = random.Random(0)
    texts = ["<reasoning>" + "".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(20_000)]
    for _ in range(20_000):                                             # a good one with a piece put in or taken out
        at, to = sorted(rng.choices(range(len(good) + 1), k=2))
        texts.append(good[:at] + "".join(rng.choices(pieces, k=rng.randrange(4))) + good[rng.choice([at, to]):])
    expected = [0.5 if pattern.match(text) else 0.0 for text in texts]
    assert 0.5 in expected and 0.0 in expected
    assert fn(completions=texts) == expected


def test_reasoning_of_two_lines_counts():
    """Published without DOTALL, the strict format never paid for the reasoning of two lines it asked for."""
    text = "<reasoning>\na\nb\n</reasoning>\n<answer>\n1\n</answer>\n"
    values = {name: one(rewards.BUILTINS[name], text) for name in rewards.BUILTINS if "_format" in name}
    assert values == {"strict_format": 0.5, "soft_format": 0.5, "strict_format_published": 0.0,
                      "soft_format_published": 0.0, "think_format": 0.0}


def test_less_than_and_tag_like_text_in_the_reasoning():
    """A pattern like [^<]* for the reasoning refused every text with a comparison in it."""
    for reasoning in ["I think 3 < 4 ", "so <b>7</b> < 8", "I write <answer>8</answer>, no", "</think"]:
        assert one(rewards.soft_format_reward, f"<reasoning>{reasoning}</reasoning>\n<answer>7</answer>") == 0.5
        assert one(rewards.strict_format_reward,
                   f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n7\n</answer>\n") == 0.5
        assert one(rewards.think_format_reward, f"<think>{reasoning}</think>\n<answer>7</answer>") == 1.0
    assert one(rewards.think_format_reward, "<think>a<think>b</think>") == 0.0
    assert one(rewards.think_format_reward, "a<think>b</think>") == 0.0
    assert one(rewards.think_format_reward, "<think>b") == 0.0


def test_gold_may_be_the_whole_solution_or_a_number_or_absent():
    assert one(rewards.correctness_reward, "<answer>18</answer>", answer="9 * 2 = 18\n#### 18") == 2.0
    assert one(rewards.correctness_reward, "<answer>18</answer>", answer=18) == 2.0
    assert one(rewards.correctness_reward, "<answer>18</answer>", answer=None) is None
    assert one(rewards.gsm8k_number_reward, "<answer>18</answer>", answer=None) is None


@pytest.mark.parametrize("answer, gold", [
    ("5600", "#### 5,600"), ("5,600", "5600"), (r"\boxed{$9{,}500}", "9500"), ("$80,000", "80000"),
    ("$80,000.", "80,000"), ("-1234.5", "#### -1,234.50"), ("-$1,234.50", "-1234.5"), ("$-1,234.50", "-1234.5"),
    ("\u221222", "-22"), ("- 22", "-22"), ("18 dollars", "18"), ("25%", "25"), (r"25\%", "25"), (r"\$18", "18"),
    ("18.0", "18"), ("+7", "7"), ("**18**", "18"), ("1/2", "0.5"), (".5", "0.5"), ("18\u200b", "18"),
    (r"9\,500", "9500"), (r"\boxed{18\text{ eggs}}", "18"), (r"So we get \boxed{18}, which is 9 times 2.", "18"),
    ("1,000,000", "1000000"), ("18.", "18"), ("18 km/h", "18"),
])
def test_gsm8k_number_equal(answer, gold):
    """Answers and golds that differ only in how the number is written were counted as wrong."""
    assert one(rewards.gsm8k_number_reward, f"<answer>\n{answer}\n</answer>", answer=gold) == 1.0
    assert one(rewards.gsm8k_number_reward, answer, answer=gold) == 1.0


@pytest.mark.parametrize("answer, gold", [
    ("18 or 20", "18"), ("9*2=18", "18"), ("9*2", "92"), ("eighteen", "18"), ("1\n8", "18"), ("2,5", "25"),
    ("18, 20", "1820"), ("18 20", "1820"), ("", "0"), ("1.2.3", "1.2"), ("1/0", "1"), ("²", "2"), ("18²", "18"),
    ("2^3", "2"), ("--5", "5"), ("0.25", "25"), ("9" * 5000, "9"), ("1e3", "1"), ("x 18", "18"), ("-18", "18"),
    ("18\nso 9", "18"), ("18\nSo it is", "18"),
], ids=lambda value: value[:30])
def test_gsm8k_number_different(answer, gold):
    assert one(rewards.gsm8k_number_reward, f"<answer>{answer}</answer>", answer=gold) == 0.0


def test_a_gold_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="eleven"):
        rewards.gsm8k_number_reward(completions=["11"], answer=["eleven"])


# ---- sorting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer, exact, distance, ordering", [     # numbers 3 1 0 2: 4 positions, 4 + 3 points
    ("0 1 2 3", 1.0, 1.0, 1.0),
    (" 0 1 2 3\n", 1.0, 1.0, 1.0),
    ("<answer>0 1 2 3</answer>", 1.0, 1.0, 1.0),
    ("0 1 2  3", 0.0, 1.0, 1.0),
    ("0, 1, 2, 3", 0.0, 1.0, 1.0),
    ("3 1 0 2", 0.0, 1 / 4, 5 / 7),                                 # as given: 1 in place; 4 occur, 1 pair in order
    ("7 2 2 5", 0.0, 1 / 4, 3 / 7),                                 # the lecture's: one 2 counts, pairs 2 2 and 2 5
    ("0 0 0 0", 0.0, 1 / 4, 4 / 7),                                 # the lecture's loophole, still far from 1
    ("0 1 2", 0.0, 3 / 4, 5 / 7),
    ("0 1 2 3 4", 0.0, 4 / 5, 7 / 8),
    ("0 1 2 3 0 1 2 3", 0.0, 1 / 2, 7 / 11),                        # 4 + 3 points of 4 + 7
    ("0123", 1.0, 1.0, 1.0),                                        # digits need no spaces: how data/sort.py has them
    ("3102", 0.0, 1 / 4, 5 / 7),
    ("01234", 0.0, 4 / 5, 7 / 8),
    ("0x23", 0.0, 3 / 4, 4 / 7),                                    # x takes the 1's place; 0 2 3 occur, 2 3 in order
    ("0x123", 0.0, 1 / 5, 5 / 8),
    ("x\ny1", 0.0, 0.0, 1 / 7),
    ("0 1 2 13", 0.0, 3 / 4, 6 / 7),                                # with spaces 13 is one number
    ("0 12 3", 0.0, 1 / 4, 3 / 7),                                  # 0 and 3 occur, 0 12 is in order
    ("", 0.0, 0.0, 0.0),
])
def test_sorting(answer, exact, distance, ordering):
    given = {"numbers": [3, 1, 0, 2]}
    assert one(rewards.sort_exact_reward, answer, **given) == exact
    assert one(rewards.sort_distance_reward, answer, **given) == pytest.approx(distance)
    assert one(rewards.sort_inclusion_ordering_reward, answer, **given) == pytest.approx(ordering)


def test_partial_sorting_credit_is_whole_only_for_the_sorted_list():
    """An answer repeated, or padded with sorted numbers, must not reach 1, nor one copy stand for two."""
    for answer in ["1 2 2 " * 50, "1 1 1 2 2 2", "1 2 2 2 2 2 2", "1 1 2", "2 2 1", "1 2"]:
        for fn in (rewards.sort_distance_reward, rewards.sort_inclusion_ordering_reward):
            assert one(fn, answer, numbers=[2, 1, 2]) < 1.0
    assert one(rewards.sort_inclusion_ordering_reward, "1 2 2", numbers=[2, 1, 2]) == 1.0


def test_sorting_reads_the_prompt_where_the_data_has_no_numbers():
    for prompts in (["3 1 2 ="], [[{"role": "system", "content": "Sort 9 lists."}, {"role": "user",
                                                                                    "content": "3 1 2 ="}]]):
        for fn in (rewards.sort_exact_reward, rewards.sort_distance_reward, rewards.sort_inclusion_ordering_reward):
            assert fn(prompts=prompts, completions=["1 2 3"]) == [1.0]
    assert rewards.sort_distance_reward(prompts=["-3 10 -20"], completions=["-20 -3 10"]) == [1.0]
    assert rewards.sort_distance_reward(prompts=["no numbers"], completions=["1"]) == [None]
    assert one(rewards.sort_exact_reward, "1", numbers=None) is None
    assert one(rewards.sort_exact_reward, "1020", numbers=[10, 20]) == 0.0  # of longer numbers it would be ambiguous


# ---- Countdown ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer, nums, target", [
    ("(55 + 36) / 7 + 19", [19, 36, 55, 7], 32), ("(55+36)/7+19 = 32", [19, 36, 55, 7], 32),
    ("8/(3-8/3)", [8, 3, 8, 3], 24), ("<reasoning>9 + 9</reasoning>\n<answer>3 * 5</answer>", [5, 3], 15),
    ("((7))", [7], 7), ("1\n<answer>\n2-1\n</answer>", [1, 2], 1), ("7 - 3 * 5", [3, 5, 7], -8),
])
def test_countdown_right(answer, nums, target):
    assert one(rewards.countdown_reward, answer, nums=nums, target=target) == 1.0


@pytest.mark.parametrize("answer, nums, target", [
    ("3 + 5", [3, 5], 9), ("5 * 3", [3, 5, 1], 15), ("3 + 3 + 5", [3, 5], 11), ("3 + 5 = 9", [3, 5], 8),
    ("3 + 5 = 8 = 8", [3, 5], 8), ("2 ** 3", [2, 3], 8), ("7 // 2", [7, 2], 3), ("7 % 4", [7, 4], 3), ("8", [3, 5], 8),
    ("35", [3, 5], 35), ("", [3], 3), ("=", [3], 3), ("3 / (5 - 5)", [3, 5, 5], 0), ("1 / 3 * 3", [1, 3, 3], 0),
    ("-3 + 5", [3, 5], 2), ("3 +", [3], 3), ("3(5)", [3, 5], 15), ("3.0 + 5", [3, 5], 8), ("0x3 + 5", [3, 5], 8),
    ("03 + 5", [3, 5], 8), ("1_0 + 5", [10, 5], 15), ("3 + 5 and 1", [3, 5, 1], 8), ("True + 5", [1, 5], 6),
    ("__import__('os').getpid()", [3], 3), ("3 + 5 \\", [3, 5], 8), ("3, 5", [3, 5], 8), ("(3, 5)", [3, 5], 8),
    ("(" * 400 + "3" + ")" * 400, [3], 3), ("-" * 900 + "3", [3], 3), ("9" * 900, [3], 3), ("(" * 100_000, [3], 3),
    ("9*" * 100_000 + "9", [9], 9), ("1" + "+1" * 2000, [1] * 2001, 2001),
], ids=lambda value: str(value)[:30])
@pytest.mark.filterwarnings("error")
def test_countdown_wrong(answer, nums, target):
    assert one(rewards.countdown_reward, answer, nums=nums, target=target) == 0.0


def test_countdown_is_exact():
    """In floating point 49 * (1 / 49) is not 1, so right answers lost."""
    assert 49 * (1 / 49) != 1
    assert one(rewards.countdown_reward, "49 * (1 / 49)", nums=[49, 1, 49], target=1) == 1.0
    assert one(rewards.countdown_reward, "10000000000000001 - 1", nums=[10000000000000001, 1], target=10**16 - 1) == 0.0
    assert one(rewards.countdown_reward, "3", nums=[3], target=None) is None


# ---- length ---------------------------------------------------------------------------------------------------------


def test_soft_overlong():
    """DAPO's equation 13 by hand: length 100 of which 20 are the ramp."""
    ids = [[1] * n for n in (0, 80, 81, 90, 100, 101)]
    values = rewards.soft_overlong_reward(completion_ids=ids, max_completion_length=100, soft_punish_cache=20)
    assert values == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    [reward] = load_rewards("soft_overlong:0.5", max_completion_length=100, unrelated=3)
    assert reward.name == "soft_overlong" and reward.weight == 0.5
    assert score([reward], ["q"] * 6, ["a"] * 6, ids, {}).flatten().tolist() == pytest.approx(values)
    [reward] = load_rewards("soft_overlong", max_completion_length=100, soft_punish_cache=10)
    assert score([reward], ["q"] * 6, ["a"] * 6, ids, {}).flatten().tolist() == pytest.approx([0, 0, 0, 0, -1, -1])
    assert rewards.soft_overlong_reward(completion_ids=ids, max_completion_length=100,
                                        soft_punish_cache=0)[-2:] == [0, -1]
    with pytest.raises(ValueError, match="soft_punish_cache 101"):
        rewards.soft_overlong_reward(completion_ids=ids, max_completion_length=100, soft_punish_cache=101)
    with pytest.raises(ValueError, match="'soft_overlong' needs 'max_completion_length'"):
        score(load_rewards("soft_overlong"), ["q"], ["a"], [[1]], {})


# ---- any text -------------------------------------------------------------------------------------------------------

HOSTILE = {
    "tags": "<reasoning>\n</reasoning>\n<answer>\n</answer>\n", "openings": "<reasoning>\n\n</reasoning>\n<answer>\n",
    "same line": "</reasoning><answer>", "answers": "<answer>", "closings": "\n</answer>\n", "spaces": " ",
    "newlines": "\n",
    "spaced": "</reasoning>          ", "digits": "1", "numbers": "1 ", "commas": "1,", "thousands": ",111",
    "minuses": "-",
    "fractions": "1/", "boxes": r"\boxed{", "braces": "{,}", "parentheses": "(", "sums": "1+", "dollars": "$",
    "dots": ".1",
}


@pytest.mark.parametrize("name", rewards.BUILTINS)
def test_linear_time_on_any_text(name):
    """A DOTALL regex took minutes on one text of repeated tags that a model in training wrote."""
    columns = {"answer": ["7"], "nums": [[1, 1]], "target": [2], "numbers": [[3, 1]], "max_completion_length": 10}
    for piece in HOSTILE.values():
        for start in ("", "<reasoning>\n", "<reasoning>"):
            text = start + piece * (200_000 // len(piece))
            began = time.perf_counter()
            [value] = rewards.BUILTINS[name](prompts=[text], completions=[text], completion_ids=[[1]], **columns)
            assert time.perf_counter() - began < 2
            assert math.isfinite(value)


def test_linear_time_reading_numbers_from_a_prompt():
    for piece in HOSTILE.values():
        text = piece * (200_000 // len(piece))
        began = time.perf_counter()
        rewards.sort_inclusion_ordering_reward(prompts=[text], completions=[text])
        assert time.perf_counter() - began < 2


# ---- the calling convention -----------------------------------------------------------------------------------------


def test_arguments_are_trls():
    """Functions written for TRL get everything by keyword: texts or messages, ids, each column as a list."""
    seen, state, logged = {}, object(), []

    def spy(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        kwargs["log_metric"]("length", 2.0)
        kwargs["log_extra"]("seen", ["a", "b"])
        return [0.25, None]

    columns = {"answer": ["1", "2"], "level": [3, 4]}
    for wrap in (str, chat):
        prompts, completions = [wrap("p"), wrap("q")], [wrap("x"), wrap("y")]
        values = score([rewards.Reward("spy", 1.0, spy)], prompts, completions, [[5], [6, 7]], columns,
                       trainer_state=state,
                       log_metric=lambda *a: logged.append(a), log_extra=lambda *a: logged.append(a))
        assert values.dtype == torch.float32 and values.shape == (2, 1)
        assert values[0, 0] == 0.25 and values[1, 0].isnan()
        assert seen["prompts"] == prompts and seen["completions"] == completions
        assert seen["completion_ids"] == [[5], [6, 7]] and seen["trainer_state"] is state
        assert {k: seen[k] for k in columns} == columns
        assert set(seen) == {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra",
                             "answer", "level"}
    assert logged == [("length", 2.0), ("seen", ["a", "b"])] * 2


def test_a_function_without_kwargs_gets_what_it_names():
    """A function of two arguments failed with "unexpected keyword argument 'completion_ids'"."""
    def short(completions, answer, missing="default"):
        assert missing == "default"
        return [float(a == "b") for a in answer]

    assert call(short).flatten().tolist() == [0, 1, 0, 0]

    def needs(completions, difficulty, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="'spy' needs 'difficulty'; what there is: answer, prompts"):
        call(needs)


def test_columns_must_have_one_value_a_completion():
    with pytest.raises(ValueError, match="column 'answer' has 1 values for 2 completions"):
        score(load_rewards("int"), ["q"] * 2, ["a"] * 2, [[1]] * 2, {"answer": ["1"]})


def test_values_stay_unweighted_one_column_a_function():
    values = score(load_rewards("correctness:3,int:0"), ["q"] * 2, ["1", "2"], [[1]] * 2, {"answer": ["1", "1"]})
    assert values.tolist() == [[2.0, 0.5], [0.0, 0.5]]


def test_async_functions_run_together_on_one_loop():
    """Each waits for the other to arrive, so one after the other would never end; and a client kept between steps
    must find its loop again, which a fresh asyncio.run a step would have closed."""
    loops = []

    def make(mine, other):
        async def fn(completions, **kwargs):
            loops.append(asyncio.get_running_loop())
            mine.set()
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, other.wait, 5), 10)
            return [1.0 if other.is_set() else 0.0] * len(completions)
        return fn

    class Callable:
        async def __call__(self, completions, **kwargs):
            return torch.arange(len(completions))

    for timeout in (0, 30):
        a, b = threading.Event(), threading.Event()
        functions = [make(a, b), lambda completions, **kwargs: [0] * len(completions), make(b, a), Callable()]
        functions = [rewards.Reward(f"f{i}", 1.0, fn) for i, fn in enumerate(functions)]
        values = score(functions, ["q"] * 2, ["x"] * 2, [[1]] * 2, {}, timeout=timeout)
        assert values.tolist() == [[1, 0, 1, 0], [1, 0, 1, 1]]
    assert len(loops) == 4 and len(set(loops)) == 1


# ---- functions that misbehave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [
    [1, 0, True, 2.5], (1, 0, 1, 2.5), torch.tensor([1, 0, 1, 2.5], dtype=torch.float64, requires_grad=True),
    np.array([1, 0, 1, 2.5]), [torch.tensor(1), np.float32(0), np.bool_(True), np.float64(2.5)], iter([1, 0, 1, 2.5]),
])
def test_numbers_of_every_kind_are_accepted(values):
    assert call(lambda **kwargs: values).flatten().tolist() == [1, 0, 1, 2.5]


def test_nan_counts_as_none():
    """As in TRL: the sum over functions ignores both."""
    assert call(lambda **kwargs: [None, float("nan"), 1, 0]).isnan().flatten().tolist() == [True, True, False, False]


@pytest.mark.parametrize("values, message", [
    ([1.0], "1 values; expected 4.*completion at fault: 'text 1'"), ([1, 2, 3], "3 values; expected 4.*'text 3'"),
    ([1] * 5, "5 values; expected 4"), ([], "0 values; expected 4.*'text 0'"),
    (1.0, "float 1.0; expected a list of 4"), ("high", "str 'high'; expected a list of 4"),
    (None, "NoneType None; .* 4"), (torch.tensor(1.0), r"Tensor tensor\(1.\); expected a list of 4"),
    ({"a": 1}, "dict .* 4"), (torch.zeros(4, 1), "list .*among 4 values.*'text 0'"),
    ([1, 1, "2", 1], "str '2' among 4 values.*fault: 'text 2'"), ([1, float("inf"), 1, 1], "float inf .*4.*'text 1'"),
    ([1, 1, 1, -1e39], "float -1e[+]39 .*finite.*'text 3'"), ([1, 1, 1, 10**400], "int 10*.*finite.*'text 3'"),
    ([1, 1, 1j, 1], "complex 1j .*'text 2'"), ("1234", "str '1234'"),
])
def test_what_is_not_one_number_a_completion_is_an_error(values, message):
    """One value for four completions was broadcast to all of them, silently."""
    with pytest.raises(ValueError, match=f"(?s)reward 'spy' returned {message}"):
        call(lambda **kwargs: values)

    async def later(**kwargs):
        return values

    with pytest.raises(ValueError, match=f"(?s)reward 'spy' returned {message}"):
        call(later)


def test_what_raises_is_named_with_the_completion_at_fault():
    def fails(completions, log_metric, **kwargs):
        log_metric("calls", 1)
        return [1 / (text != "text 2") for text in completions]

    async def fails_later(completions, log_metric, **kwargs):
        return fails(completions, log_metric)

    for fn in (fails, fails_later):
        calls = []
        with pytest.raises(RuntimeError,
                           match="'spy' raised ZeroDivisionError: .*; expected 4 numbers; completion 2 at "
                                               "fault: 'text 2'$") as caught:
            call(fn, log_metric=lambda *a: calls.append(a))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)    # with the user's own traceback
        assert len(calls) == 1                                          # the search for the fault logs nothing

    def fails_together(completions, **kwargs):
        if len(completions) > 1:
            raise ValueError("only one at a time")
        return [0.0]

    with pytest.raises(RuntimeError, match="ValueError: only one at a time; expected 4 numbers$"):
        call(fails_together)


def test_long_completions_are_shortened_in_messages():
    with pytest.raises(ValueError) as caught:
        score([rewards.Reward("f", 1.0, lambda **kwargs: ["x"])], ["q"], ["a" * 100_000], [[1]], {})
    assert len(str(caught.value)) < 500


def test_a_function_that_hangs_is_named():
    release = threading.Event()

    async def sleeps(completions, **kwargs):
        await asyncio.sleep(60)

    for fn in (lambda **kwargs: release.wait(60), sleeps):
        began = time.perf_counter()
        with pytest.raises(RuntimeError, match="'spy' took longer than --reward_timeout 0.2 s on 4 completions"):
            call(fn, timeout=0.2)
        assert time.perf_counter() - began < 10
    release.set()
    assert call(lambda **kwargs: [1, 2, 3, 4], timeout=30).flatten().tolist() == [1, 2, 3, 4]

    def own_timeout(**kwargs):
        raise TimeoutError("no answer from the judge")

    with pytest.raises(RuntimeError, match="raised TimeoutError: no answer"):
        call(own_timeout, timeout=30)


def test_without_a_timeout_functions_run_in_the_main_thread():
    """Checkers that bound themselves by signal.alarm work there only."""
    threads = []
    call(lambda **kwargs: [threads.append(threading.current_thread())] * 4)
    assert threads == [threading.main_thread()]


# ---- loading --------------------------------------------------------------------------------------------------------


def test_load_rewards(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 3\n")
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour import VALUE\n"
        "@dataclass\nclass Thing:\n    x: int\n"
        "CALLS = []\n"
        "def mine(completions, **kwargs):\n    CALLS.append(1)\n    return [VALUE] * len(completions)\n"
        "async def other(completions):\n    return [len(CALLS)] * len(completions)\n")
    loaded = load_rewards(f"correctness:1.5, xmlcount:-0.5,int,{file}:mine,{file}:other:0.25,")
    assert [(r.name, r.weight) for r in loaded] == [
        ("correctness", 1.5), ("xmlcount", -0.5), ("int", 1.0), ("mine", 1.0), ("other", 0.25)]
    assert loaded[0].fn is rewards.correctness_reward
    values = score(loaded[3:], ["q"], ["a"], [[1]], {})
    assert values.tolist() == [[3.0, 1.0]]                              # one module, so other sees what mine did


def test_load_rewards_errors(tmp_path):
    file = tmp_path / "my.py"
    file.write_text("def my_fn(**kwargs): return []\nVALUE = 3\n")
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    for spec, message in [
        ("corectness", "unknown reward 'corectness', did you mean 'correctness'.*choices: correctness, countdown, "),
        ("correctness_reward:1", "did you mean 'correctness'"),
        ("quality", "unknown reward 'quality'; choices: "),
        (f"{file}:my_fun", "unknown function 'my_fun' in .*my.py, did you mean 'my_fn'"),
        (f"{file}:VALUE", "unknown function 'VALUE' in .*my.py; choices: my_fn"),
        (f"{file}", "names a file but no function"),
        (f"{tmp_path}/none.py:fn", "no file .*none.py"),
        (f"{tmp_path}/broken.py:fn", "broken.py cannot be imported: ModuleNotFoundError: No module named 'no_such"),
        ("int:high", "'int:high': the weight 'high' is not a number"), ("int:nan", "weight 'nan'"),
        ("int:1:2", "'1:2'"),
        ("int:1,int:2", "names a reward twice"), ("", "names no reward"), (" , ", "names no reward"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_rewards(spec)


def test_command_line_lists_every_built_in(capsys):
    rewards.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(rewards.BUILTINS) and max(map(len, lines)) < 130
    assert set(rewards.BUILTINS) >= {
        "correctness", "int", "strict_format", "soft_format", "xmlcount", "gsm8k_number", "sort_distance",
        "sort_inclusion_ordering", "sort_exact", "countdown", "soft_overlong"}


def test_parse_number_is_exact():
    assert parse_number("0.1") * 10 == 1
