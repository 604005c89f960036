"""`bench.py device` and `bench.py scale`: every part runs and none spoils another, wrong kernels are noticed, and
the cost model on paper counts as its equations say. Nothing here asserts a speed."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import chunked_kernel
import fsdp
from benchmarks import cost, device, guarded
from plan import find_config

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fork_server(monkeypatch):
    """It may start here, and must find what this and other tests have it import beforehand."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))


# ---------------------------------------------------------------------------------------------------------------------
# Parts


def good(size):
    yield {"a": 1}
    yield {"a": 2, "failed": "out of memory"}


def broken(size):
    yield {"a": 3}
    raise RuntimeError("two\nlines")


def killed(size):
    yield {"a": 4}
    os._exit(9)


def hanging(size):
    time.sleep(1000)
    yield {"a": 5}


def endless(size):
    while True:
        yield {"a": 6}


def test_a_part_that_raises_or_dies_costs_only_itself(tmp_path, capsys):
    parts = {"good": (good, 0.2), "broken": (broken, 0.2), "killed": (killed, 0.2), "last": (good, 0.2)}
    guarded.run_parts(parts, None, 10, {"machine": "m"}, tmp_path / "all.json")
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["machine"] == "m"
    assert {name: (part["ended"], len(part["rows"])) for name, part in found["parts"].items()} == {
        "good": ("finished", 2), "broken": ("RuntimeError: two lines", 1), "killed": ("died with exit code 9", 1),
        "last": ("finished", 2),
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert "good: finished; 2 rows, 1 of them failed" in shown and "| 2 | out of memory |" in shown


def test_a_part_ends_with_its_time():
    """After the row it is at; one that hangs is killed when patience ends."""
    first, ended = guarded.messages(endless, None, time.monotonic() - 1, 60)
    assert first == {"a": 6} and ended.startswith("stopped")
    assert list(guarded.messages(hanging, None, time.monotonic(), 0.5))[-1].startswith("killed")


def test_device_on_a_cpu(tmp_path, monkeypatch, capsys):
    """All parts as they are; TRL's and Liger's heads take ten seconds to import."""
    small = device.toy("cpu")._replace(heads=("plain", "chunked_loss"))
    monkeypatch.setattr(device, "toy", lambda device: small)
    monkeypatch.setattr("sys.argv", ["bench.py", "device", "--device", "cpu", "--json", str(tmp_path / "device.json")])
    bench.main()
    found = json.loads((tmp_path / "device.json").read_text())
    assert {name: part["ended"] for name, part in found["parts"].items()} == dict.fromkeys(device.PARTS, "finished")
    rows = {name: part["rows"] for name, part in found["parts"].items()}
    assert not [row for part in rows.values() for row in part if "failed" in row]
    assert [len(part) for part in rows.values()] == [3, 4, 8, 4, 8]
    assert {row["row passes"] for row in rows["kernels"]} == {"torch"} == {found["machine"]["row passes"]}
    assert all(row["tokens/s"] > 0 and row["peak GiB"] > 0 for row in rows["step"])
    shown = capsys.readouterr().out
    assert all(f"\n{name}: finished" in shown for name in device.PARTS)


def kernels(**changes):
    return list(device.kernels(device.toy("cpu")._replace(exact_tokens=8, **changes)))


@pytest.mark.parametrize("name, spoil", [
    ("_gradient_torch", lambda dz: dz * 1.02),
    ("_gradient_torch", lambda dz: dz * torch.nan),
    ("_statistics_torch", lambda values: (values[0] + 0.002, *values[1:])),
    ("_statistics_torch", lambda values: (values[0], values[1] + 0.002, *values[2:])),
])  # fmt: skip
def test_a_wrong_kernel_is_noticed(monkeypatch, name, spoil):
    assert not [row for row in kernels() if "failed" in row]
    right = getattr(chunked_kernel, name)
    monkeypatch.setattr(chunked_kernel, name, lambda *args: spoil(right(*args)))
    assert all("beyond rounding" in row["failed"] for row in kernels())


def test_both_row_passes_are_measured_where_triton_runs(monkeypatch):
    """As on CUDA: the choice falls on Triton, and `row_pass` turns it off for the time of a call."""
    monkeypatch.setattr(chunked_kernel, "_use_triton", lambda z: True)
    calls = []

    def statistics(z, targets):
        calls.append("triton")
        return chunked_kernel._statistics_torch(z, targets)

    monkeypatch.setattr(chunked_kernel, "_statistics_triton", statistics)
    monkeypatch.setattr(chunked_kernel, "_gradient_triton", chunked_kernel._gradient_torch)
    rows = kernels()
    assert [row["row passes"] for row in rows] == ["triton", "torch"] * 4
    assert not [row for row in rows if "failed" in row]
    with device.row_pass("torch"):
        assert not chunked_kernel._use_triton(None)
    assert chunked_kernel._use_triton(None) and calls


def test_recorded_steps_are_compared_with_plain_ones(monkeypatch, recorded):
    """As on CUDA, with conftest's recorder."""
    monkeypatch.setitem(device.DTYPES, "bfloat16", torch.float32)
    rows = list(device.decode(device.toy("cpu")._replace(decode_rows=(2,))))
    assert device.RECORDED == {"cpu", "cuda"}
    assert [row["steps"] for row in rows] == ["recorded", "plain"] * 2 and "replay" in recorded
    assert [row.get("alike") for row in rows] == [None, 1.0] * 2


def test_what_does_not_fit_is_said_and_nothing_larger_tried(monkeypatch):
    size = device.toy("cpu")._replace(step_rows=(2, 4, 8, 16))
    right, tried = device.optimizer_step, []

    def step(model, optimizer, rows, cfg, i):
        tried.append(len(rows))
        if len(rows) > 4:
            raise torch.OutOfMemoryError("no")
        return right(model, optimizer, rows, cfg, i)

    monkeypatch.setattr(device, "optimizer_step", step)
    rows = list(device.steps(size, fsdp.World(0, 1, torch.device("cpu")), "float32", True, {}))
    assert [(row["completions"], row.get("failed")) for row in rows] == [(2, None), (4, None), (8, "out of memory")]
    assert max(tried) == 8 and "step s" in rows[1] and "step s" not in rows[2] and "sampling s" in rows[2]


# ---------------------------------------------------------------------------------------------------------------------
# Scale


def test_two_ranks_share_a_step(tmp_path, monkeypatch, capsys):
    words = ["--quick", "--ranks", "2", "--repeats", "1", "--prompts", "3", "--generations", "2", "--new_tokens", "4"]
    monkeypatch.setattr("sys.argv", ["bench.py", "scale", *words, "--json", str(tmp_path / "scale.json")])
    bench.main()
    rows = json.loads((tmp_path / "scale.json").read_text())
    assert [(row["ranks"], row["shard"]) for row in rows] == [(2, "full"), (2, "none")]
    for row in rows:
        parts = [row[name] for name in ("gather", "sampling", "forward, backward", "optimizer")]
        assert min(*parts, row["save"], row["save, background"]) > 0
        assert sum(parts) == pytest.approx(row["step"]) and row["step, relative"] == 1
    assert "| 2     | full  |" in capsys.readouterr().out


def assumptions(**changes):
    """Round numbers, no efficiencies, no latency."""
    values = {name: value for name, value, _ in cost.ASSUMPTIONS} | dict(
        tflops=1000, memory_tb=1, memory_gb=1000, mfu=1, decode_efficiency=1, link_efficiency=1, latency_us=0,
        longest=1, reserve_gb=0, nvlink_gb=400, infiniband_gb=25, prompts=16, generations=4, prompt_tokens=100,
        new_tokens=200,
    )  # fmt: skip
    return SimpleNamespace(**values | changes)


def test_the_cost_model_by_hand():
    config = find_config("qwen3-8b")
    N, kv = cost.parameters(config), 2 * 2 * 36 * 8 * 128
    alone = cost.step_cost(config, N, 8, False, assumptions(node=8))
    assert alone["groups a rank"] == 2 and alone["rows at once"] == 8
    assert alone["decode"] == pytest.approx((200 * 2 * N + 8 * 200 * 200 * kv) / 1e12)  # a row's mean: 100 + 200/2
    assert alone["prefill"] == pytest.approx(2 * N * 2 * 100 / 1e15)
    assert alone["gather"] == pytest.approx(2 * N * 7 / 8 / 400e9)  # seven parts of eight arrive over NVLink
    assert alone["links"] == pytest.approx(8 * N * 7 / 8 / 400e9)  # 2 + 2 + 4 bytes a parameter, one micro-batch
    assert alone["learner"] == pytest.approx(max(8 * N * (8 * 200 + 2 * 100) / 1e15, alone["links"]))
    assert alone["optimizer"] == pytest.approx(28 * N / 8 / 1e12)
    assert alone["GB a GPU"] == pytest.approx((2 * N + 16 * N / 8 + 8 * 300 * kv) / 1e9)
    parts = ("decode", "prefill", "gather", "learner", "optimizer")
    assert alone["step"] == pytest.approx(sum(alone[part] for part in parts))
    assert alone["most"] == "decode"


def test_full_and_hybrid_sharding_on_paper():
    config = find_config("qwen3-8b")
    N = cost.parameters(config)
    full, hybrid = (cost.step_cost(config, N, 16, hybrid, assumptions(node=8)) for hybrid in (False, True))
    assert full["gather"] == pytest.approx(2 * N * 15 / 16 / (8 * 25e9))  # a node's links together
    assert hybrid["GB a GPU"] - full["GB a GPU"] == pytest.approx((16 * N / 8 - 16 * N / 16) / 1e9)
    assert hybrid["gather"] == pytest.approx(2 * N * 7 / 8 / 400e9)
    inside, between = 8 * N * 7 / 8 / 400e9, 2 * (4 * N / 8) / 2 / 25e9  # the all-reduce of an eighth, over two nodes
    assert hybrid["links"] == pytest.approx(inside + between)
    slow = cost.step_cost(config, N, 16, False, assumptions(node=8, latency_us=10))
    assert slow["gather"] - full["gather"] == pytest.approx(36 * 15 * 10e-6)  # a ring for each block


def test_the_queue_and_the_longest_completion_bound_decoding():
    config, room = find_config("qwen3-8b"), assumptions(memory_gb=1)
    N = cost.parameters(config)
    room.memory_gb = (4 * N + 3.5 * 300 * 147456) / 1e9  # of eight rows three fit at a time
    queued = cost.step_cost(config, N, 8, False, room)
    keys = 8 * 200 * 200 * 147456 / 1e12
    assert queued["rows at once"] == 3
    assert queued["decode"] == pytest.approx(200 * 8 / 3 * 2 * N / 1e12 + keys)
    long = cost.step_cost(config, N, 8, False, assumptions(longest=4))
    assert long["decode"] == pytest.approx(4 * 200 * 2 * N / 1e12 + keys)


def test_a_model_that_does_not_fit_has_no_times():
    config = find_config("llama-3.1-70b")
    row = cost.step_cost(config, cost.parameters(config), 1024, False, assumptions(memory_gb=80))
    assert row["step"] is None and row["decode"] is None and row["rows at once"] is None
    assert row["GB a GPU"] > 2 * 70.55  # the copy that samples


def test_the_paper_is_printed(monkeypatch, capsys, tmp_path):
    path = tmp_path / "paper.json"
    words = ["--paper", "--gpu", "h200", "--memory_tb", "9", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["bench.py", "scale", *words])
    bench.main()
    shown = capsys.readouterr().out
    assert "tflops 989, memory_tb 9, memory_gb 141" in shown and "8.19 billion parameters" in shown
    rows = json.loads(path.read_text())
    assert [row["GPUs"] for row in rows] == [8, 64, 64, 256, 256, 1024, 1024] and rows[0]["efficiency"] == 1
    monkeypatch.setattr("sys.argv", ["bench.py", "scale", "--paper", "--model", "llama-3.1-70b"])
    bench.main()
    assert "70.55 billion" in capsys.readouterr().out
