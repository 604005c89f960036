"""`bench.py sample`, `step` and `adapters`, our side alone: that they run, and that they measure what they say."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from benchmarks import measure, runs, sample, step
from data.tokenizer import load_tokenizer
from model import load_model
from sample import generate


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    directory = measure.model_directory(None, measure.TOY, tmp_path_factory.mktemp("toy"))
    runs.write_words(directory)
    return directory


def main(monkeypatch, tmp_path, name):
    """-> what `bench.py NAME --quick` wrote."""
    monkeypatch.setattr("sys.argv", ["bench.py", name, "--quick", "--device", "cpu", "--json", str(tmp_path / "out.json")])
    bench.main()
    return json.loads((tmp_path / "out.json").read_text())


def test_sample_quick(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sample, "PEER", "nobody-has-this")
    results = main(monkeypatch, tmp_path, "sample")
    assert capsys.readouterr().out.count("nobody-has-this is not installed") == 1
    assert [row["rows"] for row in results["ragged"]] == [1, 3]
    for row in results["ragged"]:
        steps = row["tokens/s, ours"] / row["rows"]  # a second
        assert row["share of the roofline"] == pytest.approx(steps * row["MiB a step"] * 2**20 / results["machine"]["GB/s"] / 1e9)
    assert [row["tokens up to"] for row in results["long"]] == [32, 64, 96, 128]


def adder(turns, start):
    while True:
        (x,) = turns.begin()
        turns.end((start + x, torch.backends.mkldnn.matmul.fp32_precision))


def test_a_peer_elsewhere_answers_until_it_fails_and_sees_no_switch_of_ours():
    routes = measure.MatmulRoutes("cpu")
    peer = measure.Elsewhere(adder, 5)
    answers = []
    routes.on(routes.names[-1], lambda: answers.extend(peer(x) for x in (1, 2)))()
    assert answers == [(6, "none"), (7, "none")]
    with pytest.raises(RuntimeError, match="TypeError: unsupported operand"):
        peer("x")
    peer.close()
    assert not peer.process.is_alive()


def test_bytes_of_a_step_by_hand(toy):
    model = load_model(toy)
    weights = 512 * 32 + 32  # the embedding, which is the head, and the last norm
    weights += 2 * (2 * 32 * 48 + 2 * 32 * 16 + 2 * 8 + 3 * 32 * 64 + 2 * 32)
    cache = (5 + 9 + 2 * 10) * 2 * 2 * 2 * 8  # tokens at half of 20 new ones; keys and values, layers, heads, width
    assert sample.step_bytes(model, [5, 9], 20) == 4 * (weights + cache)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(512, 32))
    assert sample.step_bytes(model, [5, 9], 20) == 4 * (weights + cache)


def test_rollout_lengths_are_geometric_whatever_the_model(toy, monkeypatch):
    """The same prompts, stops and temperature as the benchmark's, from a model that is sure of its next token."""
    model = load_model(toy)
    model.lm_head.weight.data *= 300
    lengths = []

    def recorded(*args, **kwargs):
        made = generate(*args, **kwargs)
        lengths.extend(len(completion.tokens) for group in made for completion in group)
        return made

    monkeypatch.setattr(sample, "generate", recorded)
    args = SimpleNamespace(rollout=[2, 150], prompt_tokens=[2, 4], rows=300, mean_length=8, longest=64, repeats=1, device="cpu")
    row = sample.rollout(args, measure.MatmulRoutes("cuda"), model, None)
    assert len(lengths) == 2 * 300 and row["tokens/s, ours"] > 0
    assert sum(lengths) / len(lengths) == pytest.approx(8, rel=0.1) and 20 < max(lengths) <= 64
    assert sum(n == 1 for n in lengths) / len(lengths) == pytest.approx(1 / 8, rel=0.4)


def test_prompts_are_different_and_of_the_asked_length(toy, tmp_path):
    runs.write_prompts(toy, tmp_path / "prompts.jsonl", 5, 7)
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [len(load_tokenizer(toy).encode_prompt(text)) for text in texts] == [7] * 5 and len(set(texts)) == 5


def job(toy, tmp_path, **changed):
    runs.write_prompts(toy, tmp_path / "prompts.jsonl", 8, 6)
    settings = dict(directory=toy, data=str(tmp_path / "prompts.jsonl"), work=str(tmp_path), lora=False, beta=0.0, device="cpu",
                    dtype="float32", prompts=2, generations=3, prompt_tokens=6, new_tokens=5)  # fmt: skip
    return step.Job(**settings | changed)


@pytest.mark.parametrize("lora, beta", [(False, 0.0), (True, 0.04)])
def test_a_turn_of_ours_is_one_step_of_train_py(toy, tmp_path, lora, beta):
    side = step.Ours(job(toy, tmp_path, lora=lora, beta=beta))
    before = {name: p.detach().clone() for name, p in side.run.model.named_parameters()}
    for turn in (1, 2):
        side.step()
        assert side.run.step == turn
    side.close()
    lines = side.run.journal.read("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["completions/min_length"] == line["completions/max_length"] == 5 and line["learning_rate"] == 1e-6
        assert line["reward_std"] > 0 and line["grad_norm"] > 0 and ("kl" in line) == (beta > 0)
    changed = {name for name, p in side.run.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(("lora" in name) == lora for name in changed)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="weighs processes by Linux's /proc")
def test_step_quick(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step, "PEER", ("nobody-has-this",))
    results = main(monkeypatch, tmp_path, "step")
    assert capsys.readouterr().out.count("left out") == 1
    (time,), (memory,), (prefix,) = results["times"], results["memory"], results["shared_prefix"]
    assert time["training"] == memory["training"] == "LoRA" and time["beta"] == memory["beta"] == 0.04
    assert time["s, ours"] > 0 and "s, TRL" not in time and "MiB, TRL" not in memory
    assert 100 < memory["MiB, ours"] < 2000 and 0 < memory["beyond imports"] < memory["MiB, ours"]
    assert prefix["float64"] < 1e-10 and prefix["gradients differ by, float32"] < 1e-5
    assert prefix["MiB, shared"] < prefix["MiB, plain"]


def test_adapters_quick(tmp_path, monkeypatch):
    rows = {row[""]: row for row in main(monkeypatch, tmp_path, "adapters")["memory"]}
    weights = 512 * 32 + 32 + 2 * (2 * 32 * 48 + 2 * 32 * 16 + 2 * 8 + 3 * 32 * 64 + 2 * 32)  # see above
    full = rows["full"]
    assert full["held, MiB"] * 2**20 == pytest.approx(12 * weights, rel=0.01)  # weights, two moments
    assert rows["full, beta 0.04"]["held, MiB"] * 2**20 == pytest.approx(16 * weights, rel=0.01)  # and a reference
    assert rows["LoRA r 16, beta 0.04"]["held, MiB"] == rows["LoRA r 16"]["held, MiB"] < full["held, MiB"]
    assert full["bytes a weight"] == 4 and rows["NF4 + LoRA r 16"]["bytes a weight"] < 0.55
    for row in rows.values():
        assert row["held, MiB"] < min(row["learning, MiB"], row["sampling, MiB"])
