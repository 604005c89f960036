"""data/: which problems there are and in which order, faults of files by line, prompts that are too long."""

import hashlib
import http.server
import itertools
import json
import operator
import threading
from fractions import Fraction

import pytest
from test_tokenizer import CHATML, write_tokenizer

import data
from data import countdown, gsm8k, jsonl, sort
from data.tokenizer import load_tokenizer


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---------------------------------------------------------------- generated tasks


def test_sort_problems_are_lists_of_digits():
    train, test = data.load_data("sort", seed=3)
    assert len(test) == 256
    for problem in [train[i] for i in range(50)] + test:
        assert list(problem) == ["prompt", "numbers"] and len(problem["numbers"]) == 4
        assert set(problem["numbers"]) <= set(range(10))
        assert problem["prompt"] == "".join(map(str, problem["numbers"])) + "="
    assert len(data.load_data("sort:8")[0][0]["numbers"]) == 8
    assert any(len(set(p["numbers"])) < 4 for p in test)  # repeats occur
    for option in ("1", "x", "-3"):
        with pytest.raises(ValueError, match="from 2 on"):
            data.load_data(f"sort:{option}")


@pytest.mark.parametrize("task, module", [("sort", sort), ("sort:2", sort), ("countdown", countdown)])
def test_generated_train_and_test_have_no_problem_in_common(task, module):
    # Two random streams of the same small space overlap: held-out scores then measure memory.
    tests = {json.dumps(module.identity(p)) for p in data.load_data(task)[1]}
    for seed in (0, 1):
        train = data.load_data(task, seed)[0]
        seen = {json.dumps(module.identity(train[i])) for i in range(1000)}
        assert len(tests) > 10 and not tests & seen
    if task == "sort:2":  # of all 100 lists every one is on exactly one side
        assert len(tests) + len(seen) == 100


@pytest.mark.parametrize("task", ["sort", "countdown"])
def test_generated_problems_are_a_function_of_seed_and_index(task):
    train, test = data.load_data(task, 5)
    again, same_test = data.load_data(task, 5)
    backwards = [again[i] for i in reversed(range(40))][::-1]
    assert [train[i] for i in range(40)] == backwards and train[10**9] == again[10**9]
    other, other_test = data.load_data(task, 6)
    assert [other[i] for i in range(40)] != backwards and test == same_test == other_test
    assert len({json.dumps(train[i]) for i in range(40)}) > 35


def test_generated_problems_do_not_change_between_versions():
    # A resumed or repeated run must read the same problems on every Python and after every refactoring.
    train, test = data.load_data("sort", 0)
    assert [train[i]["numbers"] for i in range(3)] == [[5, 7, 6, 6], [9, 7, 9, 6], [5, 8, 0, 7]]
    assert test[0]["numbers"] == [6, 5, 5, 3]
    train, _ = data.load_data("countdown", 0)
    assert [(train[i]["nums"], train[i]["target"]) for i in range(2)] == [([47, 91, 56], 100), ([94, 80, 51, 33], 98)]


def reachable(nums):
    """Every value that uses all of `nums` once, by exhaustion in exact fractions: not by countdown.py's own way."""
    if len(nums) == 1:
        return {Fraction(nums[0])}
    values = set()
    for i, j in itertools.permutations(range(len(nums)), 2):
        rest = [n for k, n in enumerate(nums) if k not in (i, j)]
        for op in (operator.add, operator.sub, operator.mul, operator.truediv):
            if op is not operator.truediv or nums[j]:
                values |= reachable([*rest, op(Fraction(nums[i]), nums[j])])
    return values


def test_countdown_problems_can_be_solved():
    train, test = data.load_data("countdown")
    assert len(test) == 256 and {len(p["nums"]) for p in test} == {3, 4}
    for problem in [train[i] for i in range(5)] + test[:5]:
        assert list(problem) == ["prompt", "nums", "target"]
        assert problem["target"] in reachable(problem["nums"])
        assert [m["role"] for m in problem["prompt"]] == ["system", "user"]
        question = problem["prompt"][1]["content"]
        assert str(problem["target"]) in question and ", ".join(map(str, problem["nums"])) in question
    for problem in test:
        assert all(1 <= n <= 99 for n in problem["nums"]) and 1 <= problem["target"] <= 999
        assert problem["target"] not in problem["nums"]
    assert countdown.identity({"nums": [3, 1], "target": 4}) == countdown.identity({"nums": [1, 3], "target": 4})


def test_countdown_divides_only_without_remainder():
    class Divide:  # takes the first values and the last operation on offer
        def randrange(self, n):
            return 0

        def choice(self, options):
            return options[-1]

    assert countdown.combine(Divide(), [12, 4]) == 3
    assert countdown.combine(Divide(), [12, 5]) == 60  # no division on offer: the last one is the product
    assert countdown.combine(Divide(), [12, 0]) == 0


def test_generated_prompts_fit_the_tiny_vocabulary():
    tiny = load_tokenizer("tiny")
    for task in ("sort", "countdown"):
        train, test = data.load_data(task)
        assert all(tiny.encode_prompt(p["prompt"]) for p in (train[0], test[0]))


# ---------------------------------------------------------------- epochs


def test_finite_sets_repeat_in_a_new_order_each_epoch():
    # The same order every epoch, or an order that depends on what was read before, breaks learning or resuming.
    train = data.Epochs([{"prompt": str(i)} for i in range(20)], seed=1)
    orders = [[train[e * 20 + i]["prompt"] for i in range(20)] for e in range(4)]
    assert len(train) == 20 and all(sorted(o, key=int) == [str(i) for i in range(20)] for o in orders)
    assert len({tuple(o) for o in orders}) == 4 and orders[0] != [str(i) for i in range(20)]
    jumping = data.Epochs(train.problems, seed=1)
    assert [jumping[i]["prompt"] for i in (65, 3, 41, 64)] == [orders[3][5], orders[0][3], orders[2][1], orders[3][4]]
    assert [data.Epochs(train.problems, seed=2)[i]["prompt"] for i in range(20)] != orders[0]


def test_fewer_problems_than_a_step_needs_go_on_into_the_next_epoch():
    train = data.Epochs([{"prompt": p} for p in "abc"], seed=0)
    assert sorted(train[i]["prompt"] for i in range(30)) == sorted("abc" * 10)


# ---------------------------------------------------------------- a user's own file


def test_jsonl_columns_arrive_as_they_are(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}]
    rows = [{"prompt": "안 2+2=", "answer": "4", "level": 1}, {"prompt": chat, "answer": "5", "level": None}]
    path = write(tmp_path / "a.jsonl", "\n", *rows, "  \n")  # blank lines are no rows
    train, test = data.load_data(path)
    assert train.problems == rows and test == []
    _, test = data.load_data(f"{path}:{write(tmp_path / 'b.jsonl', rows[1])}")
    assert test == [rows[1]]
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows[0]).encode() + b"\r\n")  # as Windows writes
    assert jsonl.problems(tmp_path / "bom.jsonl") == rows[:1]


GOOD = {"prompt": "2+2=", "answer": "4"}


@pytest.mark.parametrize(
    "rows, line, said",
    [
        ([GOOD, GOOD, '{"prompt": "2+', "\n", GOOD], 3, "not valid JSON"),  # a file cut off in the middle of a copy
        ([GOOD, GOOD, GOOD, {"prompt": "x"}, GOOD], 4, "'answer' is missing"),
        ([GOOD, {**GOOD, "level": 1}], 2, "'level' is not in the first line"),
        ([{"answer": "4"}], 1, "'prompt' is missing"),
        ([GOOD, "\n", '["prompt"]\n'], 3, "expected an object with prompt, found list"),
        ([GOOD, {"prompt": 7, "answer": "4"}], 2, "'prompt' must be text or a list .* not 7"),
        ([GOOD, {"prompt": "", "answer": "4"}], 2, "'prompt' must be"),
        ([GOOD, {"prompt": [], "answer": "4"}], 2, "'prompt' must be"),
        ([GOOD, {"prompt": ["hi"], "answer": "4"}], 2, "'prompt' must be"),
        ([GOOD, {"prompt": [{"role": "user"}], "answer": "4"}], 2, "'prompt' must be"),
        ([{**GOOD, "completions": "x"}], 1, "'completions' is reserved"),
    ],
)
def test_bad_lines_are_named_by_file_line_and_key(tmp_path, rows, line, said):
    # One bad line surfaced hours later as a KeyError in a reward function.
    path = write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:{line}: .*{said}"):
        data.load_data(path)


def test_files_without_rows_are_errors(tmp_path):
    with pytest.raises(ValueError, match="empty.jsonl: no lines"):
        data.load_data(write(tmp_path / "empty.jsonl", "\n"))
    with pytest.raises(ValueError, match="no file .*gone.jsonl"):
        data.load_data(str(tmp_path / "gone.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="bytes.jsonl:2: not valid JSON"):
        data.load_data(str(tmp_path / "bytes.jsonl"))


@pytest.mark.parametrize("spec, close", [("gsm8", "gsm8k"), ("sorts:4", "sort"), ("count_down", "countdown")])
def test_unknown_names_list_the_known_ones_and_the_closest(spec, close):
    with pytest.raises(ValueError, match=rf"countdown, gsm8k\[:DIRECTORY\] .*did you mean {close}\?"):
        data.load_data(spec)
    with pytest.raises(ValueError, match="nothing after the colon"):
        data.load_data("countdown:4")


# ---------------------------------------------------------------- GSM8K


ROWS = [
    {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\nMany.\n#### 5,600"},
    {"question": "How cold?", "answer": "#### -1,234.50"},
]


def test_gold_answers_lose_their_commas(tmp_path):
    # "5,600" as gold never equalled the model's 5600: 79 problems of the train set could not be solved.
    write(tmp_path / "train.jsonl", *ROWS)
    write(tmp_path / "test.jsonl", ROWS[0])
    train, test = data.load_data(f"gsm8k:{tmp_path}")
    assert [p["answer"] for p in train.problems] == ["5600", "-1234.50"] and len(test) == 1
    assert [float(p["answer"]) for p in train.problems] == [5600, -1234.5]
    system, user = test[0]["prompt"]
    assert list(test[0]) == ["prompt", "answer", "question"]
    assert user == {"role": "user", "content": "How many?"} and system["role"] == "system"
    lines = system["content"].splitlines()
    assert [line for line in lines if "<" in line] == ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]


def test_gsm8k_rows_are_checked_line_by_line(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[0], {"question": "?", "answer": "42"})
    with pytest.raises(ValueError, match="no .*test.jsonl; the directory must hold train.jsonl and test.jsonl"):
        data.load_data(f"gsm8k:{tmp_path}")
    write(tmp_path / "test.jsonl", ROWS[0], {"question": "?"})
    with pytest.raises(ValueError, match="train.jsonl:2: 'answer' has no '####'"):
        data.load_data(f"gsm8k:{tmp_path}")
    write(tmp_path / "train.jsonl", ROWS[0])
    with pytest.raises(ValueError, match="test.jsonl:2: the key 'answer' is missing"):
        data.load_data(f"gsm8k:{tmp_path}")


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A local stand-in for the place the files come from, and an empty cache; records what is asked for."""
    content = {name: json.dumps(ROWS[0]).encode() + b"\n" for name in ("train.jsonl", "test.jsonl")}
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            asked.append(name)
            self.send_response(200 if name in content else 404)
            self.end_headers()
            self.wfile.write(content.get(name, b""))

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("NANOGRPO_GSM8K_URL", f"http://127.0.0.1:{server.server_port}/files/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(gsm8k, "SHA256", {name: hashlib.sha256(text).hexdigest() for name, text in content.items()})
    yield content, asked, tmp_path / "cache" / "nanogrpo" / "gsm8k"
    server.shutdown()
    server.server_close()


def test_gsm8k_is_downloaded_once(mirror):
    _, asked, cache = mirror
    for _ in range(2):
        train, test = data.load_data("gsm8k")
        assert train[0]["answer"] == test[0]["answer"] == "5600"
    assert asked == ["train.jsonl", "test.jsonl"]
    assert sorted(path.name for path in cache.iterdir()) == ["test.jsonl", "train.jsonl"]
    (cache / "test.jsonl").write_bytes(b"{")  # damaged on disk: fetched again
    assert data.load_data("gsm8k")[1] == test and asked[2:] == ["test.jsonl"]


def test_a_download_with_another_sha256_is_refused_and_not_kept(mirror):
    # A half-finished or changed file in the cache is read as the real one for ever after.
    content, _, cache = mirror
    expected = gsm8k.SHA256["train.jsonl"]
    content["train.jsonl"] = content["train.jsonl"][:-9]
    found = hashlib.sha256(content["train.jsonl"]).hexdigest()
    with pytest.raises(ValueError, match=f"sha256 {found}, expected {expected}"):
        data.load_data("gsm8k")
    assert not cache.exists()


def test_without_a_network_one_line_says_what_to_do(mirror):
    content, _, _ = mirror
    content.clear()
    with pytest.raises(ConnectionError, match="404.*gsm8k:DIRECTORY"):
        data.load_data("gsm8k")


def test_the_real_checksums_are_the_originals():
    assert gsm8k.SHA256 == {
        "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    }


# ---------------------------------------------------------------- prompt lengths


def chat(text):
    return {"prompt": [{"role": "user", "content": text}], "answer": text}


def test_long_prompts_are_dropped_and_counted_or_cut_from_the_left(tmp_path):
    # Prompts cut from the right lost the header of the answer, and the model went on with the user's words.
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, CHATML, pad_token="<|pad|>"))
    header = tokenizer.encode("<|im_start|>assistant\n", special=False)
    long, short = chat("x" * 50), chat("hi")
    size = len(tokenizer.encode_chat(short["prompt"]))
    assert size == 21 and len(tokenizer.encode_chat(long["prompt"])) == 69

    kept, dropped = data.fit_prompts([long, short, long], tokenizer, size)
    assert dropped == 2 and [p["answer"] for p in kept] == ["hi"]
    assert kept[0]["prompt_ids"] == tokenizer.encode_chat(short["prompt"]) and "prompt_ids" not in short

    cut, dropped = data.fit_prompts([long, short], tokenizer, size, truncate=True)
    assert dropped == 0 and [len(p["prompt_ids"]) for p in cut] == [21, 21]
    assert cut[0]["prompt_ids"] == tokenizer.encode_chat(long["prompt"])[-21:] and cut[0]["prompt"] == long["prompt"]
    for problem in kept + cut:
        assert problem["prompt_ids"][-len(header) :] == header

    with pytest.raises(ValueError, match="all 2 prompts are longer than max_prompt_length 68; the shortest has 69"):
        data.fit_prompts([long, long], tokenizer, 68)
    with pytest.raises(ValueError, match="at least 1, not 0"):  # ids[-0:] would be everything
        data.fit_prompts([long], tokenizer, 0, truncate=True)
    assert data.fit_prompts([], tokenizer, 20) == ([], 0)  # a file of one's own without test problems


def test_a_finite_train_set_stays_one_after_dropping(tmp_path):
    tiny = load_tokenizer("tiny")
    train = data.Epochs([{"prompt": "x" * n} for n in range(1, 11)], seed=0)
    fitted, dropped = data.fit_prompts(train, tiny, 6)
    assert dropped == 4 and len(fitted) == 6
    lengths = [[len(fitted[e * 6 + i]["prompt_ids"]) for i in range(6)] for e in range(3)]
    assert all(sorted(order) == [1, 2, 3, 4, 5, 6] for order in lengths) and len(set(map(tuple, lengths))) > 1


def test_generated_problems_are_encoded_as_they_are_read():
    tiny = load_tokenizer("tiny")
    train, _ = data.load_data("sort", 2)
    fitted, dropped = data.fit_prompts(train, tiny, 5)
    assert dropped == 0
    for i in (0, 7, 123456):
        assert fitted[i] == {**train[i], "prompt_ids": tiny.encode(train[i]["prompt"])}
    with pytest.raises(ValueError, match="problem 7: 5 prompt tokens, above max_prompt_length 4"):
        data.fit_prompts(train, tiny, 4)[0][7]
    assert data.fit_prompts(train, tiny, 4, truncate=True)[0][7]["prompt_ids"] == tiny.encode(train[7]["prompt"])[1:]


def test_template_keywords_reach_every_prompt(tmp_path):
    # Evaluation without the switch that training used compares two different prompts.
    template = CHATML + "{% if enable_thinking is false %}<think>{% endif %}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template, pad_token="<|pad|>"))
    streams = (data.Stream(lambda i: chat("hi")), data.Epochs([chat("hi")], 0), [chat("hi")])
    for problems in streams:
        for options, end in (({}, "assistant\n"), ({"enable_thinking": False}, "<think>")):
            fitted, _ = data.fit_prompts(problems, tokenizer, 99, **options)
            assert tokenizer.decode(fitted[0]["prompt_ids"]).endswith(end)


def test_gsm8k_few_shot_examples_are_full_marks_in_the_format(tmp_path):
    """A small model copies what it is shown, a missing newline too."""
    import rewards

    row = {"question": "How many?", "answer": "So.\n#### 5,600"}
    prompt = gsm8k.problem(row, "here", few_shot=3)["prompt"]
    assert [m["role"] for m in prompt] == ["system", *["user", "assistant"] * 3, "user"]
    assert prompt[-1]["content"] == "How many?"
    shown = [m["content"] for m in prompt if m["role"] == "assistant"]
    for fn in (rewards.strict_format_reward, rewards.soft_format_reward, rewards.int_reward, rewards.xmlcount_reward):
        assert fn(completions=shown) == [0.5] * 3
    assert rewards.correctness_reward(completions=shown, answer=["10", "13", "35"]) == [2.0] * 3
    with pytest.raises(ValueError, match="few_shot is 4.*from 0 to 3"):
        gsm8k.problem(row, "here", few_shot=4)
