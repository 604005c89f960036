"""step: a whole GRPO step beside TRL's GRPOTrainer, and what reading a prompt once for its group saves.

Same model, prompts, lengths, reward, loss and AdamW; full fine-tuning and LoRA, without and with a reference model.
Ours is one turn of train.py's own loop, journal included. TRL's is its own Trainer.train(), in a process that waits
while it is not its turn, from on_step_begin to on_step_end: transformers' sampling, loss and update, no logging; its
defaults, but for gradient checkpointing, which is off on both sides. No token ends a completion, so all are of full
length on both. On a CPU ours runs with what train.py switches on (cpu.py) and TRL with torch's defaults; a last column
lends it our matmul route.

Peak memory is that of fresh processes after two steps: VmHWM, with malloc told to return what is freed (on CUDA what
the allocator held at most), in all and beyond what each had after its imports.

The shared prefix: forward and backward of one group by learner.optimizer_step, with it and without.

    python bench.py step --repeats 3 --json step.json
    python bench.py step --model smollm2-135m-instruct --parts shared_prefix
"""

import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch

import learner
from benchmarks import runs
from benchmarks.measure import (MIB, Elsewhere, MatmulRoutes, interleaved, line, machine, peak_memory, ratios, table,
                                version)  # fmt: skip
from model import load_model
from sample import Completion

PEER = ("trl", "peft", "datasets")  # what its side needs
PARTS = ["times", "memory", "shared_prefix"]
RANK, ALPHA = 16, 32
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_arguments(parser):
    runs.add_arguments(parser)
    parser.add_argument("--prefix_tokens", type=int, default=128, help="P and R of the shared prefix part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")


@dataclass
class Job:
    """One kind of training, for either side and any process."""

    directory: str  # the model's
    data: str  # a .jsonl file of prompts
    work: str  # where runs may write
    lora: bool
    beta: float
    device: str
    dtype: str
    prompts: int
    generations: int
    prompt_tokens: int
    new_tokens: int

    def label(self):
        return {"training": "LoRA" if self.lora else "full", "beta": self.beta}


# ---------------------------------------------------------------------------------------------------------------------
# The two sides


class Ours:
    def __init__(self, job):
        from train import train

        self.run = runs.quiet_run(dict(
            model=job.directory, data=job.data, beta=job.beta,
            lora_r=RANK if job.lora else 0, lora_alpha=ALPHA, lora_targets=",".join(LINEARS),
            prompts_per_step=job.prompts, num_generations=job.generations, max_prompt_length=job.prompt_tokens,
            max_completion_length=job.new_tokens, warmup_ratio=0, device=job.device, dtype=job.dtype,
            output_dir=tempfile.mkdtemp(dir=job.work), eval_every=0, save_every=0, print_every=0,
        ))  # fmt: skip
        self.train, self.cfg = train, self.run.cfg
        self.cfg.max_steps = 0

    def step(self):
        self.cfg.max_steps += 1
        self.train(self.cfg, self.run)

    def close(self):
        self.run.journal.bar.close()


def trl_trainer(job, callbacks=(), steps=10**6):
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Masters in fp32, as ours; bfloat16 is its autocast.
    model = transformers.AutoModelForCausalLM.from_pretrained(job.directory, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(job.directory)
    never = model.config.vocab_size  # an end that no model can write: the ordinary checks run, and find nothing
    config = GRPOConfig(
        output_dir=job.work, beta=job.beta, per_device_train_batch_size=job.prompts * job.generations,
        num_generations=job.generations, max_completion_length=job.new_tokens, lr_scheduler_type="constant",
        bf16=job.dtype == "bfloat16", use_cpu=job.device == "cpu", gradient_checkpointing=False, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True, max_steps=steps,
        generation_kwargs={"eos_token_id": never},
    )  # fmt: skip
    peft_config = None
    if job.lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=LINEARS)
    rows = [json.loads(line) for line in Path(job.data).read_text().splitlines()]
    trainer = GRPOTrainer(
        model, runs.odd_share, config, Dataset.from_list(rows), processing_class=tokenizer, peft_config=peft_config,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.eos_token_ids = [never]
    return trainer


def trl_steps(turns, job):
    """TRL's side, in a process of its own: a turn, on the route that is named, is one step of Trainer.train()."""
    from transformers import TrainerCallback

    routes = MatmulRoutes(job.device)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            routes.use(*turns.begin())

        def on_step_end(self, *_, **__):
            turns.end()

    trl_trainer(job, [Steps()]).train()


# ---------------------------------------------------------------------------------------------------------------------
# Peak memory


def status_bytes(field):
    """VmHWM or VmRSS of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_of(kind, job):
    """In a fresh process: (bytes at the peak, bytes held when everything was imported)."""
    if kind == "TRL":
        import datasets  # noqa: F401
        import peft  # noqa: F401
        from trl import GRPOTrainer  # noqa: F401
    else:
        import train  # noqa: F401
    on_cpu = job.device == "cpu"
    imported = status_bytes("VmRSS") if on_cpu else 0
    if kind == "TRL":
        trl_trainer(job, steps=2).train()
    else:
        side = Ours(job)
        for _ in range(2):
            side.step()
        side.close()
    return status_bytes("VmHWM") if on_cpu else torch.cuda.max_memory_allocated(), imported


def peak_in_fresh_process(kind, job):
    before = dict(os.environ)
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(peak_of, kind, job).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---------------------------------------------------------------------------------------------------------------------
# The shared prefix


class Group:
    """Forward and backward of one group, by learner.optimizer_step with an optimizer that does nothing."""

    def __init__(self, args, directory, dtype):
        from train import Config

        self.model = load_model(directory, device=args.device, dtype=dtype)
        V, N = self.model.config.vocab_size, args.prefix_tokens
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(V, (args.generations + 1, N), generator=generator).tolist()
        problem, advantages = {"prompt_ids": ids[0]}, torch.randn(args.generations, generator=generator).tolist()
        self.rows = [
            learner.Row(problem, 0, i, Completion(tokens, [0.0] * N, False), "", advantage=advantage)
            for i, (tokens, advantage) in enumerate(zip(ids[1:], advantages))
        ]
        self.optimizer = SimpleNamespace(param_groups=[{}], step=lambda: None, zero_grad=self.model.zero_grad)
        self.cfgs = {shared: Config(shared_prefix=shared, max_grad_norm=0, device=args.device)
                     for shared in (True, False)}  # fmt: skip

    def pass_over(self, shared):
        learner.optimizer_step(self.model, self.optimizer, self.rows, self.cfgs[shared], 0)

    def gradients(self, shared):
        self.pass_over(shared)
        return [p.grad.clone() for p in self.model.parameters()]

    def largest_difference(self):
        """Over all parameters, of the two gradients, relative to the largest entry of the parameter's gradient."""
        pairs = zip(self.gradients(True), self.gradients(False))
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)

    def activation_bytes(self, shared):
        self.model.zero_grad(set_to_none=True)
        peak = peak_memory(lambda: self.pass_over(shared), self.model.lm_head.weight.device.type)
        return peak - sum(p.grad.nbytes for p in self.model.parameters())


# ---------------------------------------------------------------------------------------------------------------------


def time_steps(args, routes, jobs, peer):
    """A row for each job."""
    rows = []
    for job in jobs:
        ours, trl = Ours(job), Elsewhere(trl_steps, job) if peer else None
        contestants = {"ours": routes.on(routes.names[-1], ours.step)}
        if peer:
            contestants |= {name: partial(trl, name) for name in routes.names}
        seconds = interleaved(contestants, args.repeats, device=args.device)
        row = job.label() | {"s, ours": statistics.median(seconds["ours"])}
        ours.close()
        if peer:
            trl.close()
            row["s, TRL"] = statistics.median(seconds["default"])
            columns = ("times as fast as TRL", "lowest", "highest")
            row |= zip(columns, ratios(seconds["default"], seconds["ours"]))
            if "fast" in seconds:
                row["as TRL, faster matmul"] = ratios(seconds["fast"], seconds["ours"])[0]
        rows.append(row)
    return rows


def weigh_steps(jobs, peer):
    """A row for each job."""
    rows = []
    for job in jobs:
        peak, imported = peak_in_fresh_process("ours", job)
        row = job.label() | {"MiB, ours": round(peak / MIB), "beyond imports": round((peak - imported) / MIB)}
        if peer:
            others, others_imported = peak_in_fresh_process("TRL", job)
            row |= {"MiB, TRL": round(others / MIB), "TRL, beyond imports": round((others - others_imported) / MIB)}
            row |= {"ours / TRL": peak / others}
            row |= {"beyond imports, ours / TRL": (peak - imported) / (others - others_imported)}
        rows.append(row)
    return rows


def shared_prefix(args, routes, directory):
    """One row; also in float64, the two gradients' difference."""
    group = Group(args, directory, args.torch_dtype)
    route = routes.names[-1]
    contestants = {shared: routes.on(route, lambda shared=shared: group.pass_over(shared)) for shared in (True, False)}
    seconds = interleaved(contestants, args.repeats, device=args.device)
    memory = {shared: group.activation_bytes(shared) for shared in contestants}
    faster, lowest, highest = ratios(seconds[False], seconds[True])
    row = {
        "P": args.prefix_tokens, "R": args.prefix_tokens, "G": args.generations, "times as fast": faster,
        "lowest": lowest, "highest": highest, "MiB, plain": memory[False] / MIB, "MiB, shared": memory[True] / MIB,
        "memory / plain": memory[True] / memory[False],
        f"gradients differ by, {args.dtype}": group.largest_difference(),
    }  # fmt: skip
    exact = Group(args, directory, torch.float64)
    return row | {"float64": exact.largest_difference()}


def run(args):
    """Seconds, memory and ratios of whole steps, and of the shared prefix. Returns all numbers."""
    if args.quick:
        args.prompts, args.generations, args.prompt_tokens, args.new_tokens, args.prefix_tokens = 2, 2, 6, 4, 8
        args.repeats = 1
    routes = MatmulRoutes(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        directory, data = runs.model_and_prompts(args, temporary, 8 * args.prompts)
        info = machine(args.device) | {package: version(package) for package in ("trl", "transformers")}
        info |= {"model": args.model or "random", "dtype": args.dtype}
        print(line(info), end="\n\n")
        peer = all(version(package) for package in PEER)
        if not peer:
            print(f"TRL's columns are left out: they need {', '.join(PEER)}.\n")
        kinds = [(True, 0.04)] if args.quick else [(x, y) for x in (False, True) for y in (0.0, 0.04)]
        jobs = [Job(directory, data, temporary, lora, beta, args.device, args.dtype, args.prompts, args.generations,
                    args.prompt_tokens, args.new_tokens) for lora, beta in kinds]  # fmt: skip
        parts = {}
        if "times" in args.parts:
            parts["times"] = time_steps(args, routes, jobs, peer)
            size = f"{args.prompts} prompts x {args.generations}, {args.prompt_tokens} + {args.new_tokens} tokens"
            print(f"A step of {size}; medians, ratios paired round by round:\n")
            table(parts["times"])
        if "memory" in args.parts and (args.device == "cuda" or Path("/proc/self/status").exists()):
            parts["memory"] = weigh_steps(jobs, peer)
            print("\nPeak memory of a fresh process:\n")
            table(parts["memory"])
        if "shared_prefix" in args.parts:
            parts["shared_prefix"] = [shared_prefix(args, routes, directory)]
            print("\nForward and backward of one group, its prompt read once and not; memory beyond gradients:\n")
            table(parts["shared_prefix"])
    return {"machine": info} | parts
