"""That every benchmark runs, and that the two measures mean what they say. Nothing here asserts a speed."""

import json
import time

import pytest
import torch

import bench
from benchmarks import head, measure


def test_peak_memory_counts_what_lives_at_once_and_what_hides_inside_an_operator():
    a = torch.ones(1000, 100)  # 400 kB that were there before
    for f, kilobytes in (
        (lambda: [a + 1 for _ in range(3)], 1200),  # all three live on
        (lambda: [(a + 1).sum() for _ in range(3)], 400),  # one at a time
        (lambda: a.median(), 400),  # only a number comes out, but it sorts a copy
    ):
        assert measure.peak_memory(f) == pytest.approx(1000 * kilobytes, rel=0.01)


def test_contestants_take_turns_and_the_first_round_is_dropped():
    calls = []
    contestants = {"a": lambda: calls.append("a"), "b": lambda: (calls.append("b"), time.sleep(0.02))}
    seconds = measure.interleaved(contestants, repeats=2, prepare=lambda: calls.append("-"))
    assert calls == ["-", "a", "-", "b"] * 3
    assert [len(rounds) for rounds in seconds.values()] == [2, 2] and min(seconds["b"]) > max(seconds["a"])


def test_head_quick(tmp_path, monkeypatch, capsys):
    """The plain and the chunked heads; TRL's and Liger's take ten seconds to import."""
    pytest.importorskip("matplotlib", reason="draws a plot")
    monkeypatch.setattr(head, "HEADS", {name: how for name, how in head.HEADS.items() if how[1] is None})
    files = tmp_path / "head.json", tmp_path / "head.png"
    monkeypatch.setattr("sys.argv", ["bench.py", "head", "--quick", "--json", str(files[0]), "--out", str(files[1])])
    bench.main()
    assert "| chunked_loss " in capsys.readouterr().out and files[1].stat().st_size > 1000
    results = json.loads(files[0].read_text())
    beyond = {(row["weight"], row["head"], row["tokens"]): row["MiB beyond dH, dW"] for row in results["memory"]}
    for weight in ("trained", "frozen"):
        assert beyond[weight, "plain", 1024] > 3.9 * beyond[weight, "plain", 256]
        for door in ("chunked_loss", "chunked_logprobs"):
            assert 1 < beyond[weight, door, 1024] < 1.1 * 1.2 and results["machine"]["chunk_bytes"] == 2**20
