"""A run that is killed, asked to stop, damaged or failed, and goes on: to the bytes of the one that never was.

Every run here is a process of its own in train.py's main(), of a smaller `tiny`; ranks meet over gloo. Most are forked
from a server that has imported everything already, the ones that torchrun or a shell must start are not."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, for two seconds
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import fsdp
import model as model_file
import train

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # where a test reads a checkpoint

# Three problems: with two ranks one has twice the work, with four one has none.
WORDS = ("--device cpu --data sort:2 --prompts_per_step 3 --num_generations 4 --save_every 2 --eval_every 0 "
         "--print_every 0 --learning_rate 1e-3 --timeout 60 --max_steps 8")  # fmt: skip

# A reward that waits in step GATE until it may go on, so that what a test sends arrives in the middle of that step.
GATED = """
import os, pathlib, time
def gated(completion_ids, trainer_state, **kwargs):
    if os.environ.get("GATE") == str(trainer_state.global_step):
        pathlib.Path(f"waiting{os.environ.get('RANK', 0)}").touch()
        for _ in range(12000):  # not for ever: nobody may be left to open it
            if not pathlib.Path("go").exists():
                time.sleep(0.01)
    return [sum(ids) % 7 / 7 for ids in completion_ids]
def fails(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 2 and os.environ["RANK"] == "1":
        raise KeyError("no such thing")
    return gated(completion_ids, trainer_state)
def hangs(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 2 and os.environ["RANK"] == "1":
        time.sleep(120)
    return gated(completion_ids, trainer_state)
"""
GATED_WORDS = f"{WORDS} --rewards my_rewards.py:gated"


def child(folder, words, log, environment, before):
    """main(), with what it prints in a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(folder)
    os.environ |= environment
    torch.set_num_threads(1)
    model_file.TINY |= SMALL
    train.plot.plot_run = lambda directory: None  # longer than all the rest
    sys.argv = ["train.py", *words.split()]
    before()
    train.main()


def nothing():
    pass


@contextlib.contextmanager
def running(folder, words, ranks=1, before=nothing, **environment):
    """Processes in train.py's main(), each with a log of what it says -> [(process, log)]; ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(ranks):
        log = folder / f"log{len(list(folder.glob('log*')))}"
        log.touch()
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}  # fmt: skip
        processes.append((PROCESSES.Process(target=child, args=(folder, words, log, world | environment, before)), log))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))  # for the fork server's imports
        for process, _ in processes:
            process.start()
    try:
        yield processes
    finally:
        for process, _ in processes:
            process.kill()


def run(folder, words, ranks=1, limit=120, **options):
    """To the end -> (exit codes, what each said)."""
    with running(folder, words, ranks, **options) as processes:
        deadline = time.monotonic() + limit
        for process, log in processes:
            process.join(max(deadline - time.monotonic(), 0.1))
            assert process.exitcode is not None, f"hangs after {limit} s: {log.read_text()}"
    return [process.exitcode for process, _ in processes], [log.read_text() for _, log in processes]


def run_well(folder, words, ranks=1, **options):
    codes, said = run(folder, words, ranks, **options)
    assert codes == [0] * ranks, said[next(rank for rank, code in enumerate(codes) if code)]
    return said[0]


def until(condition, limit=120):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"still not after {limit} s"
        time.sleep(0.001)


def logged(directory, name="metrics.jsonl"):
    """What was logged, but for times and a line that is being written."""
    path = directory / name
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: value for name, value in entry.items() if name != "step_time"} for entry in entries]


def complete(directory):
    return sorted(path.name for path in (directory / "checkpoints").glob("step_*") if path.suffix != ".tmp")


def assert_same(directory, other):
    """The weights' bytes, AdamW's, and all that was logged."""
    assert logged(directory) == logged(other)
    assert (directory / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    made = sorted([*other.glob("model/*"), *other.glob("adapter/*")])
    assert made
    for path in made:
        assert (directory / path.relative_to(other)).read_bytes() == path.read_bytes(), path.name
    assert complete(directory)[-1] == complete(other)[-1]
    state, others = (saved(path / "checkpoints" / complete(path)[-1]) for path in (directory, other))
    assert state.keys() == others.keys() and any(name.startswith("optimizer.exp_avg_sq.") for name in state)
    assert not [name for name in state if not torch.equal(state[name], others[name])]


def saved(checkpoint):
    """name -> whole tensor (their order inside the files is free)."""
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata.items()
    found = {name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype) for name, entry in entries}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where runs are started, beside the ones that were not disturbed."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "my_rewards.py").write_text(GATED)
    return folder


@pytest.fixture(scope="module")
def straight(place):
    run_well(place, f"{GATED_WORDS} --output_dir straight")
    return place / "straight"


@pytest.fixture(scope="module")
def straight_on_two(place):
    run_well(place, f"{GATED_WORDS} --output_dir straight_on_two", ranks=2)
    return place / "straight_on_two"


# ---------------------------------------------------------------------------------------------------------------------
# kill -9


def killed_again_and_again(folder, kills):
    """Killed in a save, in a step and as it starts, in turn, each time it goes on; then left alone."""
    words, draw = f"{WORDS} --max_steps {6 * kills + 2}", random.Random(0)
    run_well(folder, f"{words} --output_dir straight")
    directory, in_a_save, resumed = folder / "killed", 0, set()
    checkpoints = directory / "checkpoints"
    for i in range(kills):
        whole = complete(directory)
        step = fsdp.step_of(Path(whole[-1])) if whole else 0
        with running(folder, f"{words} --output_dir killed --resume") as [(process, log)]:

            def reached(condition):
                until(lambda: condition() or process.exitcode is not None)

            if i % 3 == 0:  # a save, the first or the second
                at = step + 2 * draw.randrange(2)
                reached(lambda: any(fsdp.step_of(path) > at for path in checkpoints.glob("step_*[0-9].tmp")))
            elif i % 3 == 1:  # a step
                at = step + draw.randrange(3)
                reached(lambda: "parameters" in log.read_text() and len(logged(directory)) >= at)
                time.sleep(0.05 * draw.random())
            else:  # as it starts: the model, the checkpoint, the log that is cut
                time.sleep(0.3 * draw.random())
            assert process.exitcode is None, log.read_text()
            process.kill()
            process.join()
        in_a_save += any(checkpoints.glob("step_*[0-9].tmp"))
        check_what_it_took(log, whole, resumed)
    whole = complete(directory)
    run_well(folder, f"{words} --output_dir killed --resume")
    check_what_it_took(max(folder.glob("log*"), key=lambda path: int(path.name[3:])), whole, resumed)
    assert in_a_save and resumed, "it was not killed where it hurts"
    assert not list(checkpoints.glob("*.tmp"))
    assert_same(directory, folder / "straight")


def check_what_it_took(log, whole, resumed):
    """The newest whole one, never one that was being saved."""
    said = log.read_text()
    if taken := re.search(r"resuming killed/checkpoints/(\S+)", said):
        assert taken[1] == whole[-1], said
        resumed.add(taken[1])
    elif "parameters" in said:
        assert "nothing complete to resume in killed: starting at step 0" in said and not whole


def test_killed_three_times_it_ends_with_the_bytes_of_the_run_that_was_not(tmp_path):
    killed_again_and_again(tmp_path, 3)


@pytest.mark.slow
def test_killed_twenty_times_it_ends_with_the_bytes_of_the_run_that_was_not(tmp_path):
    killed_again_and_again(tmp_path, 20)


# ---------------------------------------------------------------------------------------------------------------------
# SIGTERM and SIGINT


@pytest.fixture(scope="module")
def shell(place):
    """Starts a command line in `place` as its user would; `python` is this one, and torchrun takes any free port."""
    (place / "bin").mkdir()
    for name, command in [("python", ""), ("torchrun", " -m torch.distributed.run --standalone")]:
        (place / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        (place / "bin" / name).chmod(0o755)
    (place / "train.py").write_text(
        f"import sys\nsys.path[0] = {str(ROOT)!r}\nimport model, train\nmodel.TINY |= {SMALL}\n"
        "train.plot.plot_run = lambda directory: None\ntrain.main()\n"
    )

    def start(command, **environment):
        path = f"{place / 'bin'}:{os.environ['PATH']}"
        environment |= {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(["sh", "-c", f"exec {command}"], cwd=place, env=os.environ | environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

    return start


def how_to_go_on(said):
    step, command = re.search(r"stopped after step (\d+); to go on:\n(.+)", said).groups()
    return int(step), command


@contextlib.contextmanager
def gates(place, ranks=1):
    """waiting(), go(): until every rank waits in the gated step; let them go on."""
    names = [place / f"waiting{rank}" for rank in range(ranks)]
    try:
        yield (lambda: until(lambda: all(name.exists() for name in names))), (place / "go").touch
    finally:
        for path in [*names, place / "go"]:
            path.unlink(missing_ok=True)


def test_asked_to_stop_it_finishes_the_step_and_the_command_it_prints_goes_on(place, straight, shell):
    """Asked in the fifth of 8 steps: no step at which it saves anyway."""
    command = f"python train.py {GATED_WORDS} --output_dir asked"
    with gates(place) as (waiting, go):
        process = shell(command, GATE="4")
        waiting()
        process.send_signal(signal.SIGTERM)
        go()
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "SIGTERM: stopping after this step" in errors
    step, go_on = how_to_go_on(said)
    assert step == 5 and go_on == f"{command} --output_dir asked --resume"
    assert complete(place / "asked") == ["step_000004", "step_000005"] and not (place / "asked" / "model").exists()
    process = shell(go_on)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "resuming asked/checkpoints/step_000005" in said, errors
    assert_same(place / "asked", straight)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_twice_it_stops_at_once(place, number, code):
    words = f"{GATED_WORDS} --output_dir twice{code}"
    with gates(place) as (waiting, _), running(place, words, GATE="3") as [(process, log)]:
        waiting()
        os.kill(process.pid, number)
        until(lambda: "once more stops at once" in log.read_text())
        time.sleep(1.2)
        assert process.exitcode is None
        os.kill(process.pid, number)
        process.join(10)
        assert process.exitcode == code
    assert complete(place / f"twice{code}") == ["step_000002"]


def test_ctrl_c_is_a_way_to_ask(place, straight):
    words = f"{GATED_WORDS} --output_dir ctrl"
    with gates(place) as (waiting, go), running(place, words, GATE="1") as [(process, log)]:
        waiting()
        os.kill(process.pid, signal.SIGINT)
        go()
        process.join(60)
    assert process.exitcode == 0 and "Traceback" not in log.read_text(), log.read_text()
    assert complete(place / "ctrl") == ["step_000002"] and how_to_go_on(log.read_text())[0] == 2
    run_well(place, f"{words} --resume")
    assert_same(place / "ctrl", straight)


def test_one_rank_that_is_asked_stops_all(place, straight_on_two):
    words = f"{GATED_WORDS} --output_dir one"
    with gates(place, 2) as (waiting, go), running(place, words, ranks=2, GATE="4") as processes:
        waiting()
        os.kill(processes[1][0].pid, signal.SIGTERM)
        go()
        for process, log in processes:
            process.join(60)
            assert process.exitcode == 0, log.read_text()
    assert complete(place / "one") == ["step_000004", "step_000005"]
    assert how_to_go_on(processes[0][1].read_text()) == (
        5, f"torchrun --nproc_per_node 2 train.py {words} --output_dir one --resume")  # fmt: skip
    run_well(place, f"{words} --resume", ranks=2)
    assert_same(place / "one", straight_on_two)


def descendants(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["torchrun", "all"])
def test_a_scheduler_asks_torchrun_or_every_process(place, straight_on_two, shell, whom):
    """Slurm asks all of a job's processes, and torchrun then passes on what it got: twice, and yet once."""
    command = f"torchrun --nproc_per_node 2 train.py {GATED_WORDS} --output_dir {whom}"
    with gates(place, 2) as (waiting, go):
        process = shell(command, GATE="4")
        waiting()
        ranks = descendants(process.pid)
        for pid in [process.pid, *(ranks if whom == "all" else [])]:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)  # torchrun passes it on
        go()
        said, errors = process.communicate(timeout=120)
    # Whatever its ranks say, a torchrun that is asked ends with 1, and the trace of its own SignalException.
    assert process.returncode == 1 and "SignalException" in errors
    assert complete(place / whom) == ["step_000004", "step_000005"], errors
    step, go_on = how_to_go_on(said)
    process = shell(go_on)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_same(place / whom, straight_on_two)


# ---------------------------------------------------------------------------------------------------------------------
# Other numbers of processes, damage, failures


def weights(directory):
    return load_file(directory / "model" / "model.safetensors")


def test_saved_on_two_ranks_the_next_step_is_the_same_on_one_and_on_four(place):
    words = f"{GATED_WORDS} --max_steps 5 --save_every 4"
    run_well(place, f"{words} --output_dir on2", ranks=2)
    expected, loss = weights(place / "on2"), logged(place / "on2")[-1]
    before = saved(place / "on2" / "checkpoints" / "step_000004")
    moved = max((x - before[f"model.{name}"]).abs().max() for name, x in expected.items())
    assert moved > 1e-4, "nothing was learned"
    for ranks in (1, 2, 4):
        shutil.copytree(place / "on2", place / f"from2on{ranks}", ignore=shutil.ignore_patterns("model"))
        said = run_well(place, f"{words} --output_dir from2on{ranks} --resume", ranks=ranks)
        assert f"resuming from2on{ranks}/checkpoints/step_000004" in said
        assert logged(place / f"from2on{ranks}")[-1] == pytest.approx(loss, rel=1e-5, abs=1e-5)
        found, tolerance = weights(place / f"from2on{ranks}"), 0 if ranks == 2 else 1e-5
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=tolerance, atol=tolerance, msg=f"{name} on {ranks}")


@pytest.mark.parametrize("options", ["", "--lora_r 4 --lora_dropout 0.5 --num_iterations 2"])
def test_resumed_in_the_middle_of_an_epoch_the_same_problems_and_dropout_follow(place, options):
    """Five problems, three a rollout: the checkpoint is in the second epoch or later."""
    (place / "five.jsonl").write_text("".join(json.dumps({"prompt": f"{i} ="}) + "\n" for i in range(5)))
    words = f"{GATED_WORDS} --max_completion_length 4 --save_every 4 --data five.jsonl {options}"
    name = "dropout" if options else "epochs"
    run_well(place, f"{words} --output_dir {name}")
    samples = logged(place / name, "samples.jsonl")
    order = [samples[i]["prompt"] for i in range(0, len(samples), 4)]
    assert order[:5] != order[5:10] and sorted(order[:5]) == sorted(order[5:10])  # another order in each epoch
    shutil.copytree(place / name, place / f"{name}2", ignore=shutil.ignore_patterns("model", "adapter", "step_000008"))
    assert "resuming" in run_well(place, f"{words} --output_dir {name}2 --resume")
    assert_same(place / f"{name}2", place / name)


def test_a_damaged_newest_checkpoint_is_said_and_passed_over(place, straight):
    shutil.copytree(straight, place / "damaged", ignore=shutil.ignore_patterns("model"))
    assert complete(place / "damaged") == ["step_000006", "step_000008"]
    shard = place / "damaged" / "checkpoints" / "step_000008" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    said = run_well(place, f"{GATED_WORDS} --output_dir damaged --resume")
    assert "passing over damaged/checkpoints/step_000008: __0_0.distcp is damaged" in said
    assert "resuming damaged/checkpoints/step_000006" in said
    assert_same(place / "damaged", straight)


def small_disk():
    """Files of at most 64 KiB: the log fits, a checkpoint does not. On rank 1, where there are ranks."""
    if os.environ.get("RANK", "1") == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_fails_in_the_background_ends_the_run_with_one_line(place, ranks):
    codes, said = run(place, f"{GATED_WORDS} --output_dir full{ranks}", ranks, before=small_disk)
    assert all(codes), said
    assert "Traceback" not in said[-1] and said[-1].count("train.py: ") == 1, said[-1]
    assert "File too large" in said[-1] and f"full{ranks}" in said[-1]
    assert not complete(place / f"full{ranks}") and len(logged(place / f"full{ranks}")) <= 4


def test_checkpoints_that_cannot_be_written_are_one_line(place):
    (place / "taken").mkdir()
    (place / "taken" / "checkpoints").touch()
    (code,), (said,) = run(place, f"{GATED_WORDS} --output_dir taken")
    assert code and "Traceback" not in said and "taken/checkpoints" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("function, message", [
    ("fails", "reward 'fails' raised KeyError: 'no such thing'"),
    ("hangs", "reward 'hangs' took longer than --reward_timeout 1.0 s"),
])  # fmt: skip
def test_a_reward_that_fails_on_one_rank_ends_all_with_its_own_error_first(place, shell, function, message):
    words = f"{WORDS} --timeout 600 --rewards my_rewards.py:{function} --reward_timeout 1 --output_dir {function}"
    process = shell(f"torchrun --nproc_per_node 2 train.py {words}")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    said = errors.index(message)
    assert "[rank0]" not in errors[:said] and "Connection closed by peer" not in errors[:said], errors


def not_finite():
    """On rank 1, sampling finds in its third step that logits are not finite."""
    if os.environ["RANK"] == "1":
        real, calls = train.generate, []

        def generate(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                raise FloatingPointError("the logits are not finite")
            return real(*args, **kwargs)

        train.generate = generate


def test_numbers_that_are_not_finite_on_one_rank_end_all(place):
    words = f"{GATED_WORDS} --timeout 600 --output_dir broken"
    codes, said = run(place, words, ranks=2, limit=60, before=not_finite)
    assert all(codes) and said[1].rstrip().endswith("train.py: the logits are not finite")


def nan_advantage():
    """On rank 1, in the third step."""
    if os.environ["RANK"] == "1":
        real, calls = train.set_advantages, []

        def set_advantages(rows, cfg, weights):
            real(rows, cfg, weights)
            calls.append(1)
            if len(calls) == 3:
                rows[0].advantage = float("nan")

        train.set_advantages = set_advantages


def test_a_loss_of_nan_on_one_rank_is_skipped_by_all(place):
    run_well(place, f"{GATED_WORDS} --output_dir nan", ranks=2, before=nan_advantage)
    assert [line["skipped_update"] for line in logged(place / "nan")] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert all(x.isfinite().all() for x in weights(place / "nan").values())


def only_offloaded():
    real = fsdp.fully_shard

    def fully_shard(module, *, offload_policy, **options):
        assert isinstance(offload_policy, fsdp.CPUOffloadPolicy)
        return real(module, offload_policy=offload_policy, **options)

    fsdp.fully_shard = fully_shard


def test_weights_in_cpu_memory_between_uses_learn_the_same(place, straight_on_two):
    run_well(place, f"{GATED_WORDS} --output_dir offloaded --cpu_offload", ranks=2, before=only_offloaded)
    assert_same(place / "offloaded", straight_on_two)


@pytest.mark.parametrize("words", ["--lora_r 4", "--adapter some/where"])
def test_adapters_are_not_kept_in_cpu_memory(words):
    with pytest.raises(ValueError, match="--cpu_offload .* leave it off") as caught:
        train.config_from([*words.split(), "--cpu_offload"])
    assert "\n" not in str(caught.value)
