"""scale: how a step's time splits as ranks grow, measured here and on paper up to 1,024 GPUs.

    python bench.py scale                                   # 1, 2, 4 CPU processes share one step
    python bench.py scale --paper                           # Qwen3-8B on 8 to 1,024 H100, in seconds a step
    python bench.py scale --paper --model llama-3.1-70b --memory_gb 192 --memory_tb 8 --tflops 2250   # another card
    torchrun --nproc_per_node 8 bench.py scale              # the ranks that torchrun starts, on the GPUs it finds

Measured: strong scaling of one fixed global step through train.py's own pieces: gather, sampling, optimizer_step under
fsdp.shard, a checkpoint in the foreground and in the background. Rewards are constants. A phase lasts from a barrier to
a barrier, so it includes waiting for the slowest rank. Processes get one thread each; beyond the machine's cores they
share them, and what then still grows is what communicating costs, not what it would cost on a network.

The model behind --paper and its assumptions: benchmarks/cost.py.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fsdp
from benchmarks.cost import ASSUMPTIONS, GPUS, parameters, step_cost
from benchmarks.measure import TOY, line, machine, table
from learner import Row, optimizer_step
from model import ModelConfig, Transformer
from plan import find_config
from sample import generate

MODEL = {
    "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
}  # 2.1 million parameters


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes to start")
    parser.add_argument("--shard", nargs="+", default=["full", "none"], help="modes of fsdp.shard")
    parser.add_argument("--prompts", type=int, help="of a step, over all ranks (default: 8; on paper 1024)")
    parser.add_argument("--generations", type=int, default=8, help="G, completions of each")
    parser.add_argument("--prompt_tokens", type=int, help="default: 16; on paper 512")
    parser.add_argument("--new_tokens", type=int, help="mean length of a completion (default: 32; on paper 1024)")
    parser.add_argument("--paper", action="store_true", help="the cost model instead")
    paper = parser.add_argument_group("assumptions of --paper")
    paper.add_argument("--model", default="qwen3-8b", help="any that plan.py knows")
    paper.add_argument("--gpu", choices=GPUS, default="h100")
    paper.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1024])
    for name, value, text in ASSUMPTIONS:
        paper.add_argument(f"--{name}", type=float, default=value, help=f"{text} (default: {value or 'of --gpu'})")


# ---------------------------------------------------------------------------------------------------------------------
# Measured


class Phases:
    """Seconds of named phases, from all ranks' arrival at their start to all ranks' arrival at their end."""

    def __init__(self, world):
        self.world, self.seconds = world, {}

    def meet(self):
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        fsdp.barrier()
        return time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name):
        start = self.meet()
        yield
        self.seconds.setdefault(name, []).append(self.meet() - start)

    def medians(self):
        return {name: statistics.median(rounds[1:] or rounds) for name, rounds in self.seconds.items()}


def rank_main(args):
    """One rank: the rows of every mode; the first shows and returns them."""
    world = fsdp.setup(args.device)
    folder = fsdp.gather_objects([tempfile.mkdtemp()] if fsdp.is_first() else [])[0]  # one machine, or a shared /tmp
    rows = [{"ranks": world.size, "shard": mode} | measure(args, world, mode, Path(folder)) for mode in args.shard]
    if fsdp.is_first():
        table(rows)
        shutil.rmtree(folder)
    fsdp.shutdown()
    return rows if world.rank == 0 else None


def measure(args, world, mode, folder):
    """Median seconds of each phase of a step, over args.repeats steps after a first one."""
    from train import Config

    raw = TOY if args.quick else MODEL
    torch.manual_seed(0)
    with torch.device(world.device):
        model = Transformer(ModelConfig.from_dict(raw))
    model.init_weights()
    fsdp.shard(model, world, mode, args.torch_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    cfg = Config(device=world.device.type, prompts_per_step=args.prompts, num_generations=args.generations,
                 max_completion_length=args.new_tokens)  # fmt: skip
    prompts = torch.randint(raw["vocab_size"], (args.prompts, args.prompt_tokens)).tolist()
    mine = dict(list(enumerate(prompts))[world.rank :: world.size])  # as train.collect deals them
    phases, stepping = Phases(world), []
    optimizer.register_step_pre_hook(lambda *_: stepping.append(-time.perf_counter()))
    optimizer.register_step_post_hook(lambda *_: stepping.append(time.perf_counter()))
    for i in range(args.repeats + 1):
        with contextlib.ExitStack() as gathered:
            with phases("gather"):
                plain = gathered.enter_context(fsdp.unsharded(model))
            with phases("sampling"):
                groups = generate(plain, list(mine.values()), args.generations, max_new_tokens=args.new_tokens,
                                  keys=list(mine), seed=i)  # fmt: skip
        rows = [Row({"prompt_ids": prompts[p]}, p, j, completion, "", advantage=(-1.0) ** j)
                for p, group in zip(mine, groups) for j, completion in enumerate(group)]  # fmt: skip
        with phases("learner"):
            optimizer_step(model, optimizer, rows, cfg, 0)
        with phases("save"):
            fsdp.save_checkpoint(folder / mode / f"step_{2 * i}", model, optimizer, {})
        with phases("save, background"):
            fsdp.save_checkpoint(folder / mode / f"step_{2 * i + 1}", model, optimizer, {}, background=True)
        fsdp.wait_for_save()
    found = phases.medians()
    updates = [end + start for start, end in zip(stepping[::2], stepping[1::2])]
    update = statistics.median(updates[1:] or updates)
    return {
        "gather": found["gather"], "sampling": found["sampling"], "forward, backward": found["learner"] - update,
        "optimizer": update, "step": found["gather"] + found["sampling"] + found["learner"], "save": found["save"],
        "save, background": found["save, background"],
    }  # fmt: skip


def launch(args, ranks):
    """torchrun with this many processes of one thread -> their rows."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += [str(Path(__file__).resolve().parent.parent / "bench.py"), "scale", "--json", str(path)]
        for name in ("repeats", "dtype", "device", "prompts", "generations", "prompt_tokens", "new_tokens"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--shard", *args.shard] + ["--quick"] * args.quick
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": temporary},
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            sys.exit(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
        return json.loads(path.read_text())


def run(args):
    args.prompts = args.prompts or (1024 if args.paper else 8)
    args.prompt_tokens = args.prompt_tokens or (512 if args.paper else 16)
    args.new_tokens = args.new_tokens or (1024 if args.paper else 32)
    if "RANK" in os.environ and not args.paper:
        return rank_main(args)
    rows = on_paper(args) if args.paper else measured(args)
    table(rows)
    return rows


def measured(args):
    info = machine(args.device) | {"threads": 1, "cores": os.cpu_count()}  # a process's threads, the machine's cores
    print(line(info))
    print(f"{args.prompts} prompts x {args.generations} completions of {args.new_tokens} tokens over all ranks; "
          f"seconds, medians of {args.repeats} steps:\n")  # fmt: skip
    rows = [row for ranks in args.ranks for row in launch(args, ranks)]
    first = {row["shard"]: row["step"] for row in reversed(rows)}
    return [row | {"step, relative": row["step"] / first[row["shard"]]} for row in rows]


def on_paper(args):
    for name, value in zip(("tflops", "memory_tb", "memory_gb"), GPUS[args.gpu]):
        setattr(args, name, getattr(args, name) or value)
    config = find_config(args.model)
    N = parameters(config)
    assumed = ", ".join(f"{name} {getattr(args, name):g}" for name, _, _ in ASSUMPTIONS)
    print(f"{args.model}, {N / 1e9:.2f} billion parameters, on {args.gpu}: {args.prompts} prompts of "
          f"{args.prompt_tokens} tokens x {args.generations} completions of {args.new_tokens} on average. "
          f"Assumed: {assumed}. Seconds:\n")  # fmt: skip
    rows = [step_cost(config, N, gpus, hybrid, args)
            for gpus in args.gpus for hybrid in (False, True) if not hybrid or gpus > args.node]  # fmt: skip
    first = next((row["step"] * row["GPUs"] for row in rows if row["step"]), None)
    return [row | {"efficiency": first / (row["step"] * row["GPUs"]) if row["step"] else None} for row in rows]
