"""adapters: what full fine-tuning, LoRA and LoRA on a 4-bit base hold in memory, counted.

Held: parameters, buffers and AdamW's state, between steps. Learning: the most that one optimizer step holds, those
included. Sampling: the most that one rollout holds, those included; on a CPU with its linears laid out once more for
speed. All with train.py's own Run on the same prompts (random words, so completions are of full length).

    python bench.py adapters --model smollm2-135m-instruct --gradient_checkpointing
"""

import tempfile
from pathlib import Path

import lora
from benchmarks import runs
from benchmarks.measure import MIB, line, machine, peak_memory, table
from learner import learner_logprobs, optimizer_step

KINDS = {
    "full": {},
    "full, beta 0.04": {"beta": 0.04},
    "LoRA r 16": {"lora_r": 16},
    "LoRA r 16, beta 0.04": {"lora_r": 16, "beta": 0.04},
    "NF4 + LoRA r 16": {"lora_r": 16, "base": "nf4"},
}


def add_arguments(parser):
    runs.add_arguments(parser)
    parser.add_argument("--micro_batch_tokens", type=int, default=4096)
    parser.add_argument("--gradient_checkpointing", action="store_true")


def held(run) -> int:
    """Bytes of parameters, buffers and AdamW's state, each once; of a separate reference model, too."""
    models = [run.model]
    if run.cfg.beta and not run.adapted:
        with run.reference() as frozen:
            models.append(frozen)
    tensors = [x for model in models for x in (*model.parameters(), *model.buffers())]
    tensors += [x for state in run.optimizer.state.values() for x in state.values()]
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


def base_bytes(model) -> float:
    """Bytes a weight of the blocks' linears, without adapters."""
    stored = weights = 0
    for module in model.model.layers.modules():
        if hasattr(module, "in_features"):
            weights += module.in_features * module.out_features
            parts = module.quantised() if isinstance(module, lora.NF4Linear) else [module.weight]
            stored += sum(x.nbytes for x in parts)
    return stored / weights


def learn(run, rows):
    """What train.py does with rows once they have advantages."""
    for i, row in enumerate(rows):
        row.advantage = 1.0 - 2.0 * (i % 2)
    if run.cfg.beta:
        with run.reference() as frozen:
            learner_logprobs(frozen, rows, run.cfg, "ref_logp")
    optimizer_step(run.model, run.optimizer, rows, run.cfg, run.step)
    run.optimizer.zero_grad(set_to_none=True)


def weigh(flags) -> dict:
    """Bytes of one kind of run. Its first step makes AdamW's state, its second is weighed."""
    from train import collect

    run = runs.quiet_run(flags)
    run.journal.bar.close()
    cfg = run.cfg
    learn(run, collect(run, cfg))
    rows, before = [], held(run)
    sampling = before + peak_memory(lambda: rows.extend(collect(run, cfg)), cfg.device)
    learning = before + peak_memory(lambda: learn(run, rows), cfg.device)
    return {"held": before, "learning": learning, "sampling": sampling, "base": base_bytes(run.model)}


def run(args):
    with tempfile.TemporaryDirectory() as work:
        directory, data = runs.model_and_prompts(args, work, 4 * args.prompts)
        common = dict(
            model=directory, data=data, prompts_per_step=args.prompts, num_generations=args.generations,
            max_prompt_length=args.prompt_tokens, max_completion_length=args.new_tokens,
            micro_batch_tokens=args.micro_batch_tokens, gradient_checkpointing=args.gradient_checkpointing,
            device=args.device, dtype=args.dtype, eval_every=0,
        )  # fmt: skip
        info = machine(args.device) | {k: getattr(args, k) for k in ("dtype", "prompts", "generations")}
        info["model"] = args.model or "random"
        print(line(info), end="\n\n")
        rows = []
        for name, kind in KINDS.items():
            found = weigh(common | kind | {"output_dir": Path(work) / name.replace(" ", "-")})
            full = rows[0] if rows else None
            row = {"": name, "bytes a weight": found["base"]}
            for what in ("held", "learning", "sampling"):
                row[f"{what}, MiB"] = found[what] / MIB
                row[f"{what} / full"] = found[what] / MIB / full[f"{what}, MiB"] if full else 1.0
            rows.append(row)
    table(rows)
    return {"machine": info, "memory": rows}
