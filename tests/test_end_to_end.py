"""train.py as its users start it: alone, by torchrun, killed and resumed, without triton. The real `tiny`, few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.tokenizer import load_tokenizer
from model import load_model

ROOT = Path(__file__).resolve().parent.parent
ALONE = [sys.executable, str(ROOT / "train.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "train.py")]
# Two updates a rollout, a KL, an odd number of groups and of test problems, more than one micro-batch.
WORDS = ("--device cpu --prompts_per_step 3 --num_generations 4 --max_steps 8 --num_iterations 2 --max_completion_length 8 "
         "--beta 0.05 --micro_batch_tokens 80 --save_every 4 --eval_every 8 --eval_problems 5 --eval_samples 2 --print_every 1 "
         "--rewards sort_distance,my_rewards.py:mixed:0.5 --learning_rate 1e-3")  # fmt: skip
MINE = """
import os, signal
def mixed(completion_ids, trainer_state, log_metric, **kwargs):
    if os.environ.get("DIE_AT") == str(trainer_state.global_step):
        os.kill(os.getpid(), signal.SIGKILL)
    for ids in completion_ids:
        log_metric("first_id", ids[0])
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


def launch(command, words, folder, **environment):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run([*command, *words.split()], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def without_times(entries):
    return [{name: value for name, value in entry.items() if name != "step_time"} for entry in entries]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "my_rewards.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def straight(workplace):
    """The run that the others are compared with."""
    done = launch(ALONE, f"{WORDS} --output_dir straight", workplace)
    assert done.returncode == 0, done.stderr[-3000:]
    return workplace / "straight", done


def test_a_run_writes_what_it_promises_and_says_where(straight):
    folder, done = straight
    written = {path.name for path in folder.iterdir()}
    assert written == {"config.json", "metrics.jsonl", "samples.jsonl", "plot.png", "checkpoints", "model"}
    config = json.loads((folder / "config.json").read_text())
    assert config["prompts_per_step"] == 3 and config["preset"] == "sort" and config["device"] == "cpu"
    metrics = lines(folder)
    assert [line["step"] for line in metrics] == list(range(9))
    assert {"reward", "reward_std", "frac_reward_zero_std", "rewards/sort_distance/mean", "rewards/mixed/std", "loss", "grad_norm",
            "learning_rate", "entropy", "kl", "clip_ratio/region_mean", "completions/mean_length", "completions/clipped_ratio",
            "num_tokens", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "step_time",
            "first_id"} <= metrics[1].keys()  # fmt: skip
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in metrics[1:])
    assert metrics[1]["grad_norm"] > 0 and metrics[1]["kl"] == pytest.approx(0, abs=1e-6) and metrics[8]["kl"] > 1e-6
    assert {"eval/solved", "eval/reward", "eval/pass@2"} <= metrics[0].keys() & metrics[8].keys()
    samples = lines(folder, "samples.jsonl")
    assert len(samples) == 4 * 3 * 4  # rollouts, prompts, completions
    assert {"step", "prompt", "completion", "rewards", "advantage"} <= samples[0].keys()
    for sample in samples:
        assert sample["prompt"].endswith("=") and sample["rewards"].keys() == {"sort_distance", "mixed"}
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000004", "step_000008"]
    said = done.stdout + done.stderr
    for word in ("straight/plot.png", "straight/samples.jsonl", "straight/model", "held-out problems solved", "near 0"):
        assert word in said, word


def test_the_saved_model_is_read_again_and_has_learned(straight):
    folder, _ = straight
    model, tokenizer = load_model(str(folder / "model")), load_tokenizer(str(folder / "model"))
    assert tokenizer.encode("3 1 2 =") == load_tokenizer("tiny").encode("3 1 2 =") and tokenizer.stop_ids == {1}
    torch.manual_seed(0)  # --seed 0: where it started
    started = load_model("tiny")
    moved = [(p - q).abs().max().item() for p, q in zip(model.parameters(), started.parameters())]
    assert all(1e-5 < m < 0.1 for m in moved)


def test_two_ranks_train_the_same_model(straight, workplace):
    """The same problems, completions, metrics and weights, up to the order in which fp32 numbers are added."""
    alone, _ = straight
    done = launch(TORCHRUN, f"{WORDS} --output_dir two", workplace)
    assert done.returncode == 0, done.stderr[-3000:]
    for one, two in zip(lines(alone), lines(workplace / "two"), strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"step_time"}:
            close = 2e-5 if "sampling_logp_difference" in name else 2e-4 * max(abs(one[name]), 0.1)
            assert two[name] == pytest.approx(one[name], abs=close), (one["step"], name)

    def completions(folder):
        samples = lines(folder, "samples.jsonl")
        return sorted((entry["step"], entry["prompt"], entry["completion"], *entry["rewards"].values()) for entry in samples)

    assert completions(workplace / "two") == completions(alone)
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (alone, workplace / "two"))
    assert one.keys() == two.keys()
    difference = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    assert difference.mean() < 1e-6 and difference.max() < 1e-3  # AdamW makes a full step of a gradient's rounding error
    assert done.stdout.count("held-out problems solved") == 1  # one process speaks


def test_a_killed_run_resumes_to_the_same_bytes(straight, workplace):
    """Killed while it scores the rollout of steps 7 and 8, with steps 5 and 6 logged since the checkpoint."""
    alone, _ = straight
    killed = launch(ALONE, f"{WORDS} --output_dir killed", workplace, DIE_AT="6")
    folder = workplace / "killed"
    assert killed.returncode == -9 and [line["step"] for line in lines(folder)] == list(range(7))
    assert not (folder / "model").exists()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "rew')  # as a kill may leave it
    resumed = launch(ALONE, f"{WORDS} --output_dir killed --resume", workplace)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "step_000004" in resumed.stdout + resumed.stderr
    assert without_times(lines(folder)) == without_times(lines(alone))
    assert (folder / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    for path in sorted((alone / "model").iterdir()):
        assert (folder / "model" / path.name).read_bytes() == path.read_bytes(), path.name


def test_it_runs_without_triton_on_chats_from_a_file(workplace):
    """As on macOS. The reward writes down what it is given."""
    (workplace / "spy.py").write_text("""
import json
def spy(prompts, completions, completion_ids, level, answer, trainer_state):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([prompts, completions, completion_ids, level, answer, trainer_state.global_step]) + "\\n")
    return [0.1 * len(set(ids)) for ids in completion_ids]
""")
    system = {"role": "system", "content": "Sort."}
    problems = [{"prompt": [system, {"role": "user", "content": f"{i} 1 ="}], "answer": f"1 {i}", "level": i} for i in range(3)]
    (workplace / "chats.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    without = f"""
import runpy, sys
sys.modules["triton"] = None
sys.path.insert(0, {str(ROOT)!r})
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", without]
    words = ("--data chats.jsonl --rewards spy.py:spy --prompts_per_step 2 --num_generations 3 --max_steps 2 "
             "--max_completion_length 6")  # fmt: skip
    done = launch(command, words, workplace)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = workplace / "runs" / "tiny-chats-1"
    assert [line["step"] for line in lines(folder) if "reward" in line] == [1, 2] and (folder / "model").exists()
    for prompts, completions, ids, level, answer, step in map(json.loads, (workplace / "seen.jsonl").read_text().splitlines()):
        assert len(prompts) == len(completions) == len(ids) == len(level) == len(answer) == 6
        for prompt, completion, i in zip(prompts, completions, level):
            assert prompt == problems[i]["prompt"]
            assert len(completion) == 1 and completion[0].keys() == {"role", "content"} and completion[0]["role"] == "assistant"
        assert answer == [f"1 {i}" for i in level] and level == sorted(level, key=level.index)
        assert all(isinstance(token, int) for row in ids for token in row) and step in (0, 1)


def test_a_reward_that_raises_ends_the_run_with_its_name(workplace):
    (workplace / "bad.py").write_text("def shaky(completions, **kwargs):\n    return [text.split('~')[9] for text in completions]\n")
    done = launch(ALONE, f"{WORDS} --output_dir bad --rewards bad.py:shaky", workplace)
    assert done.returncode != 0
    assert "'shaky' raised IndexError" in done.stderr and "completion 0 at fault" in done.stderr


@pytest.mark.slow
def test_the_first_command_learns_to_sort(workplace):
    """torchrun train.py, as the README has it: from nothing to most lists it has never seen. Runs that round differently
    part after some thirty steps: two of them here sorted 96.5 % and 90.2 % in the end, so the bound leaves room."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(ROOT / "train.py")]
    done = subprocess.run([*command, "--output_dir", "sort"], cwd=workplace, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    solved = [line["eval/solved"] for line in lines(workplace / "sort") if "eval/solved" in line]
    assert solved[0] < 0.05 and solved[-1] >= 0.8
