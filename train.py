"""GRPO, top to bottom: sample a group of completions for each prompt, score them, compare within the group, update.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)                              over the G completions of a prompt
    L   = - sum_{i,t}  weight_{it} · min(w_it A_i, clip(w_it, 1-ε, 1+ε) A_i)      w_it = π(y_it) / π_old(y_it)

GRPO: Shao et al., arXiv:2402.03300; R1: arXiv:2501.12948. All the variants are in loss.py, one function each.

Lives here: the algorithm, the one Config, what a run writes. Not here: the network (model.py), sampling (sample.py),
rewards (rewards.py), losses (loss.py), logits (chunked_kernel.py), adapters (lora.py), processes (fsdp.py), text (data/).

    torchrun train.py                                           # a tiny model learns to sort, three minutes on a CPU
    torchrun train.py --model qwen3-0.6b                        # GSM8K, the five usual rewards
    torchrun --nproc_per_node 8 train.py --model qwen3-8b       # the same over eight GPUs
    python train.py --help

    B rows (completions), G completions a prompt, P prompts, R tokens of the longest completion, N completion tokens that
    count, K reward functions, D width, V vocabulary
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import random
import re
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import data
import fsdp
import plot
from chunked_kernel import chunk_tokens, chunked_logprobs, chunked_loss
from data.tokenizer import load_tokenizer
from loss import (LossConfig, combine_rewards, entropy_keep, flat_groups, global_denominator, group_advantages, is_pointwise,
                  kl_penalty, policy_loss, policy_metrics, reward_metrics, sampler_correction, token_loss, token_weights)  # fmt: skip
from model import Prefix, Transformer, fast_cpu_matmul, find_checkpoint, load_model, write_checkpoint
from rewards import load_rewards, score
from sample import Completion, generate

# ---------------------------------------------------------------------------------------------------------------------
# Every knob, once: field, default, comment. Flags, --help and a run's config.json are made from these lines.


@dataclass
class Config:
    # What is trained, on what, for what
    model: str = "tiny"  # an alias (qwen3-0.6b, smollm2-135m-instruct, …), a directory or a hub id
    preset: str | None = None  # sort, gsm8k; defaults that flags override (default: sort for tiny, else gsm8k)
    data: str | None = None  # sort[:LENGTH], countdown, gsm8k[:DIRECTORY], FILE.jsonl[:TEST.jsonl]
    rewards: str | None = None  # name:weight,file.py:function:weight,… (default: the usual ones of the data)
    solved: str | None = None  # the reward that is above 0 where an answer is right, for evaluation (default: the data's)
    enable_thinking: bool | None = None  # passed to the chat template, where it has such a switch
    output_dir: str | None = None  # default: runs/MODEL-DATA, numbered
    resume: bool = False  # go on from the newest complete checkpoint of output_dir
    seed: int = 0  # of everything random
    # Rollouts
    prompts_per_step: int = 8  # P, over all ranks
    num_generations: int = 8  # G, completions of each prompt
    max_prompt_length: int = 512  # longer prompts are dropped and counted
    truncate_prompts: bool = False  # cut long prompts on the left instead
    max_completion_length: int = 512  # tokens
    temperature: float = 1.0  # of sampling, and of every log-prob
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    max_batch: int | None = None  # rows that decode together (default: what kv_bytes allow)
    kv_bytes: int = 2 << 30  # memory for keys and values while sampling
    dynamic_sampling: int = 0  # up to this many extra rounds replace groups whose rewards are all equal (DAPO)
    reward_timeout: float = 0.0  # seconds a reward function may take; 0: any
    # Loss
    loss_type: str = "dapo"  # grpo, bnpo, dr_grpo, dapo, gspo, cispo, sapo, luspo, vespo, reinforce, … or file.py:name
    scale_rewards: str = "group"  # group, batch, none, rloo, raw, max, normalize_then_sum
    beta: float = 0.0  # weight of the KL to the reference model; 0 needs no reference
    kl: str = "k3w"  # its estimator: k1, k2, k3, k3w
    kl_in_reward: bool = False  # take beta · KL off the rewards instead
    epsilon: float = 0.2  # clip below 1 - epsilon
    epsilon_high: float | None = None  # clip above 1 + epsilon_high (default: epsilon; for cispo the cap itself, 5.0)
    delta: float | None = None  # cap of the unclipped ratio
    importance_sampling_level: str | None = None  # token or sequence (default: the variant's own)
    top_entropy_quantile: float = 1.0  # share of tokens, those of highest entropy, that the policy term keeps
    entropy_coef: float = 0.0  # weight of the entropy bonus
    off_policy_threshold: float | None = None  # drop a row with A < 0 that has drifted further than this
    sampler_correction: str = "none"  # none, truncate, mask: importance weights between sampler and learner
    sampler_correction_cap: float = 3.0  # where it truncates or masks
    mask_truncated_completions: bool = False  # completions that ran out of length teach nothing
    # Optimization
    max_steps: int = 250  # optimizer steps
    num_iterations: int = 1  # passes over each rollout
    steps_per_generation: int = 1  # optimizer steps a pass; each takes prompts_per_step prompts
    learning_rate: float = 1e-6  # the peak
    lr_scheduler_type: str = "constant"  # constant, linear, cosine
    warmup_ratio: float = 0.0  # share of max_steps in which the rate rises to its peak
    min_lr_ratio: float = 0.0  # the last step's rate over the peak
    adam_beta1: float = 0.9  # AdamW
    adam_beta2: float = 0.999  # AdamW
    weight_decay: float = 0.0  # AdamW
    max_grad_norm: float = 1.0  # gradients of a larger global norm are scaled down to it
    # Machine
    device: str | None = None  # cpu or cuda (default: cuda where there is one)
    dtype: str | None = None  # compute type, float32 or bfloat16 (default: bfloat16 on cuda); masters are always fp32
    micro_batch_tokens: int = 4096  # tokens in one forward and backward pass; smaller takes less memory
    shared_prefix: bool = True  # the learner reads each prompt once for its whole group
    chunked_head: bool = True  # never hold all logits; false: the plain head, for comparison
    chunk_bytes: int = 256 << 20  # logits held at a time
    gradient_checkpointing: bool = False  # recompute activations instead of keeping them
    shard: str = "full"  # full, hybrid, none: how parameters are spread over ranks
    timeout: float = 600.0  # seconds a rank waits for the others
    # What is shown and kept
    eval_every: int = 50  # steps between evaluations; 0: never
    eval_problems: int = 64  # held-out problems, at most
    eval_samples: int = 4  # k of pass@k; 0: greedy only
    save_every: int = 100  # steps between checkpoints; 0: only the model at the end
    print_every: int = 25  # steps between printed samples; 0: never

    @property
    def weights(self) -> list[float]:
        return [reward.weight for reward in load_rewards(self.rewards)]

    @property
    def loss(self) -> LossConfig:
        return LossConfig(**{f.name: getattr(self, f.name) for f in fields(LossConfig)})


PRESETS = {
    "sort": dict(
        data="sort", prompts_per_step=32, num_generations=16, max_prompt_length=64, max_completion_length=12, max_steps=300,
        learning_rate=1e-3, lr_scheduler_type="linear", warmup_ratio=0.03, min_lr_ratio=0.1, adam_beta2=0.95,
        eval_problems=256, eval_samples=0, print_every=50, save_every=0,
    ),
    "gsm8k": dict(data="gsm8k", warmup_ratio=0.02),
}  # fmt: skip

# For each kind of data: its rewards, and the one that says whether an answer is right.
TASKS = {
    "sort": ("sort_distance", "sort_exact"),
    "countdown": ("countdown", "countdown"),
    "gsm8k": ("correctness,int,strict_format,soft_format,xmlcount", "gsm8k_number"),
}


def config_from(argv) -> Config:
    """Flags over preset over defaults. ValueError with the known names and the closest for anything unknown."""
    known = {f.name: f for f in fields(Config)}
    given = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        negated = name.startswith("no_") and name.removeprefix("no_") in known
        name = name.removeprefix("no_") if negated else name
        if not word.startswith("--") or name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean --{close[0]}?" if close else ""
            raise ValueError(f"unknown argument {word!r}{hint} (`python train.py --help` lists all)")
        kind = known[name].type.removesuffix(" | None")
        if not has_value:
            if kind == "bool" and (not words or words[0].startswith("--")):
                value = "true"
            elif not words:
                raise ValueError(f"--{name} needs a value ({kind})")
            else:
                value = words.pop(0)
        value = parse(name, kind, value)
        given[name] = not value if negated else value
    preset = given.get("preset") or ("sort" if given.get("model", "tiny") == "tiny" else "gsm8k")
    check_choice("preset", preset, PRESETS)
    cfg = Config(**(PRESETS[preset] | given | {"preset": preset}))
    complete(cfg)
    return cfg


def parse(name: str, kind: str, value: str):
    if kind == "bool":
        if value.lower() in ("true", "1", "yes"):
            return True
        if value.lower() in ("false", "0", "no"):
            return False
        raise ValueError(f"--{name} {value!r}: a yes or no is needed (true, false, 1, 0, yes, no)")
    try:
        return {"int": int, "float": float, "str": str}[kind](value)
    except ValueError:
        raise ValueError(f"--{name} {value!r}: {'a whole number' if kind == 'int' else 'a number'} is needed") from None


def check_choice(what: str, value, choices):
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        raise ValueError(f"--{what} {value!r} is unknown{f', did you mean {close[0]}?' if close else ''} "
                         f"(choices: {', '.join(choices)})")  # fmt: skip


def complete(cfg: Config):
    """Fills what depends on other knobs, and refuses what cannot work."""
    task = cfg.data.partition(":")[0]
    rewards, solved = TASKS.get(task, (None, None))
    cfg.rewards = cfg.rewards or rewards
    if cfg.rewards is None:
        raise ValueError(f"--data {cfg.data} needs --rewards: name:weight,… (`python rewards.py` lists the built-in ones)")
    cfg.solved = cfg.solved or solved or cfg.rewards.split(",")[0]
    if cfg.loss_type == "cispo" and cfg.epsilon_high is None:
        cfg.epsilon_high = 5.0
        print("cispo: epsilon_high, the cap of its weights, is set to 5.0")
    check_choice("lr_scheduler_type", cfg.lr_scheduler_type, ("constant", "linear", "cosine"))
    check_choice("sampler_correction", cfg.sampler_correction, ("none", "truncate", "mask"))
    if cfg.device is not None:
        check_choice("device", cfg.device, ("cpu", "cuda"))
    if cfg.dtype is not None:
        check_choice("dtype", cfg.dtype, ("float32", "bfloat16"))
    for name in ("prompts_per_step", "num_generations", "max_completion_length", "max_steps", "num_iterations",
                 "steps_per_generation", "micro_batch_tokens", "max_prompt_length", "chunk_bytes", "kv_bytes"):  # fmt: skip
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name} is {getattr(cfg, name)}, but must be at least 1")
    if cfg.temperature <= 0:
        raise ValueError(f"--temperature is {cfg.temperature}, but training needs one above 0: greedy groups are all alike")
    if cfg.kl_in_reward and cfg.scale_rewards == "normalize_then_sum":
        raise ValueError("--kl_in_reward changes the summed reward, which --scale_rewards normalize_then_sum does not form")
    cfg.loss  # checks the loss's own names
    group_advantages(torch.zeros(cfg.num_generations), cfg.num_generations, cfg.scale_rewards)  # and the scale's


def help_text() -> str:
    """Made from Config's own lines."""
    lines = [__doc__.split("\n\n")[0], "", "usage: torchrun train.py [--name value] …   (- and _ alike; --flag and --no-flag)"]
    for line in inspect.getsource(Config).splitlines():
        if group := re.match(r"    # (.+)", line):
            lines += ["", group[1]]
        elif knob := re.match(r"    (\w+): (.+?) = (.+?)  # (.+)", line):
            name, kind, default, comment = knob.groups()
            kind = kind.removesuffix(" | None")
            shown = "" if default == "None" else f" [{default}]"
            lines.append(f"  --{name + ' ' + kind.upper():36} {comment}{shown}")
    lines += ["", "Presets"]
    lines += [f"  {name}: " + " ".join(f"--{k} {v}" for k, v in preset.items()) for name, preset in PRESETS.items()]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm


def train(cfg: Config, run: "Run"):
    """The loop. Everything global (problem numbers, denominators, norms, metrics) is the same for any number of ranks."""
    model, optimizer = run.model, run.optimizer
    updates = cfg.num_iterations * cfg.steps_per_generation
    if cfg.eval_every and run.step == 0:
        run.log(evaluate(run, cfg))
    while run.step < cfg.max_steps:
        clock = time.perf_counter()
        rows = collect(run, cfg)  # 1  sample G completions a prompt  2  score them
        if updates > 1 or cfg.sampler_correction != "none" or cfg.kl_in_reward:
            learner_logprobs(model, rows, cfg, "old_logp")  # else the ratio is 1 in value, and needs no pass
        if cfg.beta:
            with run.reference() as frozen:
                learner_logprobs(frozen, rows, cfg, "ref_logp")
        set_advantages(rows, cfg)  # 3  compare within the group
        described = run.describe(rows)
        for update in range(min(updates, cfg.max_steps - run.step)):  # 4  update
            part = [row for row in rows if row.place // cfg.prompts_per_step == update % cfg.steps_per_generation]
            metrics = described | optimizer_step(model, optimizer, part, cfg, run.step)
            run.step += 1
            metrics["step_time"] = time.perf_counter() - clock
            if cfg.eval_every and (run.step % cfg.eval_every == 0 or run.step == cfg.max_steps):
                metrics |= evaluate(run, cfg)
            run.log(metrics)
            clock = time.perf_counter()
        # Between rollouts, so that nothing of a rollout has to be saved: at the first chance after a multiple.
        if cfg.save_every and run.step // cfg.save_every > (run.step - updates) // cfg.save_every:
            run.save()


@dataclass
class Row:
    """One completion and all that becomes of it. The rows of a group stand together, groups in the order of `index`."""

    problem: dict
    index: int  # the problem's number, counted over the whole run and all ranks
    sample: int  # which of the group's G
    completion: Completion
    text: str
    rewards: torch.Tensor | None = None  # (K,)
    advantage: float = 0.0
    place: int = 0  # of its group in the rollout, over all ranks
    counts: bool = True  # False: its tokens are masked
    old_logp: torch.Tensor | None = None  # (n,) each, n = its tokens
    ref_logp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    keep: torch.Tensor | None = None  # bool


def collect(run: "Run", cfg: Config) -> list[Row]:
    """This rank's share of prompts_per_step · steps_per_generation groups, sampled and scored.

    With dynamic_sampling (DAPO, arXiv:2503.14476) groups whose rewards are all equal are replaced by groups of new
    problems, for that many rounds at most; what is missing then is filled with such groups, so a step never shrinks.
    """
    wanted = cfg.prompts_per_step * cfg.steps_per_generation
    chosen, flat, mine = [], [], {}
    for _ in range(1 + cfg.dynamic_sampling):
        indices = range(run.next_problem, run.next_problem + wanted - len(chosen))
        run.next_problem = indices.stop
        problems = {i: run.train[i] for i in indices[run.world.rank :: run.world.size]}
        rows = sample_rows(run, cfg, problems, cfg.num_generations, cfg.temperature)
        score_rows(run, rows)
        groups = [rows[i : i + cfg.num_generations] for i in range(0, len(rows), cfg.num_generations)]
        mine |= {group[0].index: group for group in groups}
        is_flat = dict(fsdp.gather_objects([(group[0].index, run.is_flat(group)) for group in groups]))
        flat += [i for i in indices if is_flat[i]]
        chosen += [i for i in indices if not is_flat[i]]
        if len(chosen) == wanted:
            break
    chosen = sorted(chosen + flat[: wanted - len(chosen)])
    rows = [row for i in chosen if i in mine for row in mine[i]]
    for row in rows:
        row.place = chosen.index(row.index)
        row.counts = row.completion.finished or not cfg.mask_truncated_completions
    return rows


def sample_rows(run: "Run", cfg: Config, problems: dict[int, dict], n: int, temperature: float, key=lambda i: i) -> list[Row]:
    """n completions of each problem {index: problem}. Draws are keyed by the problem's index: no rank, no order."""
    with fsdp.unsharded(run.model) as plain:
        groups = generate(
            plain, [problem["prompt_ids"] for problem in problems.values()], n, max_new_tokens=cfg.max_completion_length,
            temperature=temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p, stop_ids=run.tokenizer.stop_ids,
            seed=cfg.seed, keys=[key(i) for i in problems], max_batch=cfg.max_batch, kv_bytes=cfg.kv_bytes,
        )  # fmt: skip
    return [Row(problem, i, j, completion, run.tokenizer.decode(completion.tokens))
            for (i, problem), group in zip(problems.items(), groups) for j, completion in enumerate(group)]  # fmt: skip


def score_rows(run: "Run", rows: list[Row], judge: bool = False):
    """Sets row.rewards, one value a reward function (and, to judge, the one that says whether an answer is right)."""
    if not rows:
        return
    chat = not isinstance(rows[0].problem["prompt"], str)
    texts = [[{"role": "assistant", "content": row.text}] if chat else row.text for row in rows]
    columns = {name: [row.problem[name] for row in rows] for name in rows[0].problem if name not in ("prompt", "prompt_ids")}
    values = score(
        run.rewards + run.judge * judge, [row.problem["prompt"] for row in rows], texts, [row.completion.tokens for row in rows], columns,
        trainer_state=SimpleNamespace(global_step=run.step, max_steps=run.cfg.max_steps),
        **({} if judge else dict(log_metric=run.log_metric, log_extra=run.log_extra)), timeout=run.cfg.reward_timeout,
    )  # fmt: skip
    for row, value in zip(rows, values):
        row.rewards = value


def set_advantages(rows: list[Row], cfg: Config):
    """Sets each row's advantage; statistics that reach over groups reach over all ranks."""
    rewards = torch.stack([row.rewards for row in rows]) if rows else torch.zeros(0, len(cfg.weights))  # (B,K)
    if cfg.kl_in_reward:
        drift = [kl_penalty(row.old_logp[None], row.ref_logp[None], torch.ones(1, len(row.old_logp))) for row in rows]
        rewards = combine_rewards(rewards, cfg.weights) - cfg.beta * torch.cat([torch.zeros(0), *drift])  # (B,)
    everyone = [(row.index, row.sample, values) for row, values in zip(rows, rewards.tolist())]
    everyone = sorted(fsdp.gather_objects(everyone), key=lambda entry: entry[:2])
    rewards = torch.tensor([values for _, _, values in everyone])
    values = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards, cfg.weights if rewards.dim() == 2 else None)
    mine = {entry[:2]: value for entry, value in zip(everyone, values.tolist())}
    for row in rows:
        row.advantage = mine[row.index, row.sample]


class MicroBatch(NamedTuple):
    """Rows that go through the model together. `at` finds the N hidden states that predict a counted token."""

    tokens: torch.Tensor  # what Transformer.forward reads
    prefix: Prefix | None
    at: torch.Tensor  # (N,) into the flattened hidden states
    targets: torch.Tensor  # (N,) the tokens they predict
    mask: torch.Tensor  # (B,R) bool
    advantages: torch.Tensor  # (B,)
    sampler_logp: torch.Tensor  # (B,R)
    old_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None
    keep: torch.Tensor | None


def cut(rows: list[Row], cfg: Config) -> list[list[Row]]:
    """Rows -> lists of rows of about micro_batch_tokens each, as many on every rank, groups together where they fit.

    Ordered by length, so that rows of a micro-batch need little padding. A rank that has fewer gets empty ones, since
    sharded models must be called equally often everywhere.
    """
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: -len(row.completion.tokens)):
        groups[row.index].append(row)  # the longest row first, and groups by their longest row
    batches, room = [], 0
    for group in groups.values():
        prompt = len(group[0].problem["prompt_ids"])
        for i, row in enumerate(group):
            whole = prompt + sum(len(r.completion.tokens) for r in group) if i == 0 else 0
            cost = len(row.completion.tokens) + (0 if i and cfg.shared_prefix else prompt)
            if not batches or cost > room or (room < whole <= cfg.micro_batch_tokens):
                batches.append([])
                room = cfg.micro_batch_tokens
            batches[-1].append(row)
            room -= cost
    most = max(fsdp.gather_objects([len(batches)]))
    return batches + [[] for _ in range(most - len(batches))]


def pack(rows: list[Row], cfg: Config, device) -> MicroBatch:
    """A row's input is its prompt's last token and all completion tokens but the last, so that position t predicts
    completion token t; the rest of the prompt is its group's prefix, or with shared_prefix off stands before it."""
    if not rows:  # one token that counts for nothing: the same forward and backward, a gradient of zero
        rows = [Row({"prompt_ids": [0]}, -1, 0, Completion([0], [0.0], True), "", counts=False)]
    prompts = {row.index: row.problem["prompt_ids"] for row in rows}
    place = {index: i for i, index in enumerate(prompts)}
    lengths = torch.tensor([len(row.completion.tokens) for row in rows])

    def pad(sequences, dtype=torch.long):
        return pad_sequence([torch.as_tensor(s, dtype=dtype) for s in sequences], batch_first=True)

    targets = pad([row.completion.tokens for row in rows])  # (B,R)
    mask = torch.arange(targets.shape[1]) < (lengths * torch.tensor([row.counts for row in rows]))[:, None]
    inputs = [row.problem["prompt_ids"][-1:] + row.completion.tokens[:-1] for row in rows]
    prefix, start = None, torch.zeros_like(lengths)
    if cfg.shared_prefix:
        heads = [prompt[:-1] for prompt in prompts.values()]
        where = torch.tensor([place[row.index] for row in rows])
        prefix = Prefix(*(x.to(device) for x in (pad(heads), torch.tensor(list(map(len, heads))), where, lengths)))
    else:
        start = torch.tensor([len(row.problem["prompt_ids"]) - 1 for row in rows])
        inputs = [row.problem["prompt_ids"][:-1] + tokens for row, tokens in zip(rows, inputs)]
    tokens = pad(inputs)
    b, t = mask.nonzero(as_tuple=True)

    def optional(name, dtype=torch.float32):
        values = [getattr(row, name) for row in rows]
        return None if values[0] is None else pad(values, dtype).to(device)

    return MicroBatch(
        tokens.to(device), prefix, (b * tokens.shape[1] + start[b] + t).to(device), targets[mask].to(device),
        mask.to(device), torch.tensor([row.advantage for row in rows], device=device),
        pad([row.completion.logprobs for row in rows], torch.float32).to(device),
        optional("old_logp"), optional("ref_logp"), optional("keep", torch.bool),
    )  # fmt: skip


def logprob_head(mb: MicroBatch, cfg: Config):
    """A head that gives the counted tokens' log-probs and entropies, (N,) each."""

    def head(hidden, weight):
        hidden = hidden.flatten(0, 1)[mb.at]  # (N,D): only what counts enters the head
        if cfg.chunked_head:
            chunk = chunk_tokens(len(weight), cfg.chunk_bytes)
            return chunked_logprobs(hidden, weight, mb.targets, cfg.temperature, chunk=chunk)
        logp = ((hidden @ weight.T).float() / cfg.temperature).log_softmax(-1)  # (N,V)
        return logp.gather(1, mb.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    return head


def loss_head(mb: MicroBatch, cfg: Config, denominator: int, differences: list):
    """A head that gives (loss, metrics). The one place that chooses the head's door: a variant whose terms are of one
    token each is differentiated chunk by chunk in the forward pass, any other from all log-probs at once."""
    loss_cfg = cfg.loss
    correction = None
    if cfg.sampler_correction != "none":
        mode = f"token_{cfg.sampler_correction}"
        correction = sampler_correction(mb.old_logp, mb.sampler_logp, mb.mask, mode, cfg.sampler_correction_cap)

    def flat(x):
        return None if x is None else x[mb.mask]

    def head(hidden, weight):
        if cfg.chunked_head and is_pointwise(loss_cfg):
            old, ref, A = flat(mb.old_logp), flat(mb.ref_logp), flat(mb.advantages[:, None].expand(mb.mask.shape))
            weights = flat(token_weights(loss_cfg, mb.mask, denominator))
            terms = token_loss(loss_cfg, old, ref, A, weights, flat(mb.keep), flat(correction))
            loss, logp, entropy = chunked_loss(hidden.flatten(0, 1)[mb.at], weight, mb.targets, terms, cfg.temperature,
                                               chunk=chunk_tokens(len(weight), cfg.chunk_bytes))  # fmt: skip
            metrics = policy_metrics(loss_cfg, logp, old, ref, A, torch.ones_like(logp), entropy)
        else:
            logp, entropy = logprob_head(mb, cfg)(hidden, weight)
            spread = [torch.zeros(mb.mask.shape, dtype=x.dtype, device=x.device).masked_scatter(mb.mask, x) for x in (logp, entropy)]
            loss, metrics = policy_loss(loss_cfg, spread[0], mb.old_logp, mb.ref_logp, mb.advantages, mb.mask, denominator,
                                        spread[1], mb.keep, correction, mb.sampler_logp)  # fmt: skip
        policy = logp.detach() if mb.old_logp is None else flat(mb.old_logp)  # the one that sampled
        differences.append((policy - flat(mb.sampler_logp)).abs())
        return loss, metrics

    return head


@torch.no_grad()
def learner_logprobs(model, rows: list[Row], cfg: Config, name: str):
    """Sets each row's <name> and entropy, (n,), by the learner's own forward, without dropout."""
    was_training = model.training
    model.eval()
    try:
        for batch in cut(rows, cfg):
            mb = pack(batch, cfg, device_of(model))
            values = model(mb.tokens, prefix=mb.prefix, head=logprob_head(mb, cfg))
            for field_name, x in zip((name, "entropy"), values):
                x = torch.zeros(mb.mask.shape, device=x.device).masked_scatter(mb.mask, x.float()).cpu()  # (B,R)
                for row, line in zip(batch, x):
                    setattr(row, field_name, line[: len(row.completion.tokens)])
    finally:
        model.train(was_training)


def keep_high_entropy(model, rows: list[Row], cfg: Config):
    """Sets row.keep: which tokens are among the step's top_entropy_quantile, over all micro-batches and ranks."""
    learner_logprobs(model, rows, cfg, "unused_logp")
    counted = [row.entropy for row in rows if row.counts]
    everyone = torch.tensor(fsdp.gather_objects(torch.cat(counted).tolist() if counted else []))
    for row in rows:
        row.keep = entropy_keep(cfg.loss, row.entropy, torch.ones_like(row.entropy), everyone)


def optimizer_step(model, optimizer, rows: list[Row], cfg: Config, step: int) -> dict:
    """One update from this rank's rows; the denominator is counted over all micro-batches and ranks before the first
    backward, so that how a step is cut never changes its gradient. Returns the step's metrics, the same on each rank."""
    if cfg.top_entropy_quantile < 1:
        keep_high_entropy(model, rows, cfg)
    batches = cut(rows, cfg)
    packed = [pack(batch, cfg, device_of(model)) for batch in batches]
    count = sum(global_denominator(cfg.loss, mb.mask).item() for batch, mb in zip(batches, packed) if batch)
    denominator = max(fsdp.all_sum(count), 1)

    model.train()
    optimizer.zero_grad(set_to_none=True)
    total, sums, differences = 0.0, defaultdict(lambda: [0.0, 0.0]), []
    for mb in packed:
        loss, metrics = model(mb.tokens, prefix=mb.prefix, head=loss_head(mb, cfg, denominator, differences))
        loss.backward()
        total += loss.item()
        for name, (value, weight) in metrics.items():
            sums[name][0] += value.item()
            sums[name][1] += weight.item()
    norm = fsdp.clip_grad_norm(model, cfg.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(cfg, step)
    finite = math.isfinite(norm) and math.isfinite(fsdp.all_sum(total))
    if finite:
        optimizer.step()

    differences = torch.cat(differences)
    sums["sampling/sampling_logp_difference/mean"] = [differences.sum().item(), len(differences)]
    result = {"loss": fsdp.all_sum(total), "grad_norm": norm, "learning_rate": optimizer.param_groups[0]["lr"],
              "skipped_update": int(not finite)}  # fmt: skip
    for name, (value, weight) in sums.items():
        value, weight = fsdp.all_sum(value), fsdp.all_sum(float(weight))
        result[name] = value / max(weight, 1)
    largest = fsdp.gather_objects([differences.max().item() if len(differences) else 0.0])
    return result | {"sampling/sampling_logp_difference/max": max(largest)}


def learning_rate(cfg: Config, step: int) -> float:
    """Of optimizer step `step`, counted from 0: it rises to its peak at the last warm-up step, and falls to the floor at
    the last step of all."""
    warmup = math.ceil(cfg.warmup_ratio * cfg.max_steps)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    done = (step + 1 - warmup) / max(cfg.max_steps - warmup, 1)
    fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[cfg.lr_scheduler_type]
    return cfg.learning_rate * (1 - (1 - cfg.min_lr_ratio) * fall)


def evaluate(run: "Run", cfg: Config) -> dict:
    """Held-out problems, each once over all ranks: greedy, and the share solved in one of eval_samples draws."""
    problems = dict(list(enumerate(run.test))[run.world.rank :: run.world.size])
    entries, samples = [], []
    for n, temperature in [(1, 0.0), (cfg.eval_samples, cfg.temperature)]:
        rows = sample_rows(run, cfg, problems, n, temperature, key=lambda i: -1 - i) if n else []  # keys no training uses
        score_rows(run, rows, judge=True)
        entries += [(row.index, temperature > 0, row.rewards.tolist(), len(row.completion.tokens)) for row in rows]
        samples += rows
    entries = fsdp.gather_objects(entries)
    greedy = torch.tensor([rewards for _, sampled, rewards, _ in entries if not sampled])  # (problems, K+1)
    if not len(greedy):
        return {}
    names = [reward.name for reward in run.rewards]
    metrics = {f"eval/rewards/{name}/mean": value for name, value in zip(names, greedy[:, :-1].nanmean(0).tolist())}
    metrics["eval/reward"] = combine_rewards(greedy[:, :-1], cfg.weights).nanmean().item()
    metrics["eval/solved"] = (greedy[:, -1] > 0).float().mean().item()
    metrics["eval/mean_length"] = sum(length for _, sampled, _, length in entries if not sampled) / len(greedy)
    if cfg.eval_samples:
        solved = defaultdict(bool)
        for index, sampled, rewards, _ in entries:
            solved[index] |= sampled and rewards[-1] > 0
        metrics[f"eval/pass@{cfg.eval_samples}"] = sum(solved.values()) / len(solved)
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# A run: what it is made of, and what it writes


class Run:
    """Everything the loop needs, set up once, and the run's directory (README: what a run writes)."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.world = world = fsdp.setup(cfg.device, cfg.timeout)
        cfg.device = world.device.type
        cfg.dtype = cfg.dtype or ("bfloat16" if cfg.device == "cuda" else "float32")
        fast_cpu_matmul()
        place = find_checkpoint(cfg.model)
        self.tokenizer = load_tokenizer(place)
        template = {} if cfg.enable_thinking is None else {"enable_thinking": cfg.enable_thinking}
        self.train, self.test = data.load_data(cfg.data, cfg.seed)
        fit = dict(truncate=cfg.truncate_prompts, **template)
        self.train, dropped = data.fit_prompts(self.train, self.tokenizer, cfg.max_prompt_length, **fit)
        self.test, dropped_test = data.fit_prompts(self.test[: cfg.eval_problems], self.tokenizer, cfg.max_prompt_length, **fit)
        settings = {"max_completion_length": cfg.max_completion_length}
        self.rewards = load_rewards(cfg.rewards, **settings)
        self.judge = load_rewards(cfg.solved, **settings)

        torch.manual_seed(cfg.seed)
        dtype = getattr(torch, cfg.dtype)

        def prepare(model):
            model.model.checkpointing = cfg.gradient_checkpointing
            fsdp.shard(model, world, cfg.shard, dtype)

        self.model = load_model(place, device=world.device, prepare=prepare)
        longest = self.model.config.max_position_embeddings
        if cfg.max_prompt_length + cfg.max_completion_length > longest:
            raise ValueError(f"--max_prompt_length {cfg.max_prompt_length} and --max_completion_length "
                             f"{cfg.max_completion_length} together pass the {longest} tokens that {cfg.model} reads")  # fmt: skip
        self.reference = None
        if cfg.beta:
            frozen = load_model(place, device=world.device, prepare=prepare).requires_grad_(False)
            frozen.load_state_dict(self.model.state_dict())  # `tiny` is random: the copy must be this one
            self.reference = lambda: nullcontext(frozen)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        betas = (cfg.adam_beta1, cfg.adam_beta2)
        self.optimizer = torch.optim.AdamW(trained, lr=cfg.learning_rate, betas=betas, weight_decay=cfg.weight_decay, fused=True)

        self.step = self.next_problem = self.num_tokens = 0
        self.directory = fsdp.gather_objects([choose_directory(cfg)] if fsdp.is_first() else [])[0]
        self.restore()
        self.user_metrics, self.user_columns = defaultdict(list), {}
        if fsdp.is_first():
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "config.json").write_text(json.dumps(asdict(cfg), indent=1) + "\n")
            self.announce(dropped, dropped_test)
        self.bar = tqdm(total=cfg.max_steps, initial=self.step, disable=not fsdp.is_first(), unit="step", dynamic_ncols=True)

    def announce(self, dropped: int, dropped_test: int):
        cfg, model = self.cfg, self.model
        count = sum(p.numel() for p in model.parameters())
        defaults = {f.name: f.default for f in fields(Config)}
        changed = {k: v for k, v in asdict(cfg).items() if v != defaults[k] and k not in ("model", "data", "rewards", "preset")}
        size = f"{len(self.train):,} problems" if hasattr(self.train, "__len__") else "endless problems"
        rows = cfg.prompts_per_step * cfg.num_generations
        print(f"{cfg.model}: {count:,} parameters, {count * 16 / 2**30:.2f} GiB with gradients and AdamW's state in fp32, "
              f"computing in {cfg.dtype} on {self.world.size} x {self.world.device.type}")  # fmt: skip
        print(f"{cfg.data}: {size} to train on, {len(self.test)} held out"
              + (f"; {dropped} + {dropped_test} dropped, longer than {cfg.max_prompt_length} tokens" if dropped + dropped_test else ""))  # fmt: skip
        print(f"rewards: {cfg.rewards}; solved: {cfg.solved} above 0")
        print(f"each step: {cfg.prompts_per_step} prompts x {cfg.num_generations} completions = {rows} rows of at most "
              f"{cfg.max_completion_length} tokens, {cfg.max_steps} steps, head: {'chunked' if cfg.chunked_head else 'plain'}")  # fmt: skip
        print(f"preset {cfg.preset}: " + " ".join(f"{k}={v}" for k, v in changed.items()))
        print(f"writing to {self.directory}\nWith one update a rollout and no KL the loss is near 0 by construction (advantages sum "
              "to 0): watch the reward and grad_norm instead.")  # fmt: skip

    def is_flat(self, group: list[Row]) -> bool:
        total = combine_rewards(torch.stack([row.rewards for row in group]), self.cfg.weights)
        return bool(flat_groups(total, len(group))[0])

    def log_metric(self, name: str, value: float):
        self.user_metrics[name].append(value)

    def log_extra(self, column: str, values: list):
        self.user_columns[column] = values

    def describe(self, rows: list[Row]) -> dict:
        """The rollout's metrics over all ranks, under TRL's names; writes samples.jsonl, prints a sample now and then."""
        cfg, G = self.cfg, self.cfg.num_generations
        facts = [(row.index, row.sample, row.rewards.tolist(), len(row.completion.tokens), row.completion.finished,
                  len(row.problem["prompt_ids"])) for row in rows]  # fmt: skip
        facts = sorted(fsdp.gather_objects(facts))
        _, _, rewards, lengths, finished, prompts = zip(*facts)
        metrics = reward_metrics(torch.tensor(rewards), [reward.name for reward in self.rewards], G, self.cfg.weights)
        ended = [length for length, done in zip(lengths, finished) if done] or [0]
        self.num_tokens += sum(lengths) + sum(prompts)
        metrics |= {
            "completions/mean_length": sum(lengths) / len(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": 1 - sum(finished) / len(finished),
            "completions/mean_terminated_length": sum(ended) / len(ended),
            "num_tokens": self.num_tokens,
        }
        for name, values in self.user_metrics.items():
            metrics[name] = sum(values) / len(values)
        self.user_metrics.clear()
        extras = self.user_columns
        self.user_columns = {}
        shown = [
            {"step": self.step + 1, "prompt": row.problem["prompt"], "completion": row.text,
             "rewards": dict(zip([reward.name for reward in self.rewards], row.rewards.tolist())), "advantage": row.advantage}
            | {name: values[i] for name, values in extras.items() if len(values) == len(rows)}
            for i, row in enumerate(rows) if row.place < SHOWN_GROUPS
        ]  # fmt: skip
        shown = fsdp.gather_objects(shown)
        if fsdp.is_first():
            self.append("samples.jsonl", shown)
            if cfg.print_every and self.step % cfg.print_every == 0 and shown:
                best = max(shown, key=lambda sample: sample["advantage"])
                prompt = best["prompt"] if isinstance(best["prompt"], str) else best["prompt"][-1]["content"]
                rewards = " ".join(f"{k} {v:.2f}" for k, v in best["rewards"].items())
                self.bar.write(f"--- step {self.step + 1}: {prompt}\n{best['completion']}\n--- {rewards}, advantage {best['advantage']:.2f}")
        return metrics

    def log(self, metrics: dict):
        if fsdp.is_first():
            self.append("metrics.jsonl", [{"step": self.step} | metrics])
            if "reward" in metrics:
                self.bar.set_postfix_str(f"reward {metrics['reward']:.3f} length {metrics['completions/mean_length']:.0f} "
                                         f"{metrics['step_time']:.1f} s")  # fmt: skip
                self.bar.update()
            evaluation = {k.removeprefix("eval/"): v for k, v in metrics.items() if k.startswith("eval/")}
            if evaluation:
                self.bar.write(f"step {self.step}, held out: " + " ".join(f"{k} {v:.3f}" for k, v in evaluation.items()))

    def append(self, name: str, entries: list[dict]):
        with open(self.directory / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def save(self):
        state = {"step": self.step, "next_problem": self.next_problem, "num_tokens": self.num_tokens}
        fsdp.save_checkpoint(self.directory / "checkpoints" / f"step_{self.step:06d}", self.model, self.optimizer, state)

    def restore(self):
        """With --resume: the newest complete checkpoint, and the logs cut back to it; without one, step 0."""
        path = fsdp.latest_checkpoint(self.directory) if self.cfg.resume else None
        if path is None:
            if self.cfg.resume and fsdp.is_first():
                print(f"nothing complete to resume in {self.directory}: starting at step 0")
        else:
            state = fsdp.load_checkpoint(path, self.model, self.optimizer)
            self.step, self.next_problem, self.num_tokens = state["step"], state["next_problem"], state["num_tokens"]
        if fsdp.is_first() and self.cfg.resume:
            for name in ("metrics.jsonl", "samples.jsonl"):
                file = self.directory / name
                if file.exists():
                    lines = [line for line in file.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
                    kept = [line for line in lines if path and json.loads(line)["step"] <= self.step]
                    file.write_text("".join(kept), encoding="utf-8")

    def finish(self):
        """Saves the model, draws the plot, and says what came of it."""
        self.bar.close()
        folder = self.directory / "model"

        def write(pairs):
            write_checkpoint(folder, self.model.config, pairs, torch.float32, self.model.source)
            if self.model.source is None:
                self.tokenizer.save(folder)

        fsdp.export(self.model, write)
        if not fsdp.is_first():
            return
        picture = plot.plot_run(self.directory)
        lines = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        rewards = [line["reward"] for line in lines if "reward" in line]
        solved = [(line["step"], line["eval/solved"]) for line in lines if "eval/solved" in line]
        print(f"\nreward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last of {self.step}")
        if solved:
            print(f"held-out problems solved ({self.cfg.solved}): {solved[0][1]:.1%} at step {solved[0][0]}, "
                  f"{solved[-1][1]:.1%} at step {solved[-1][0]}")  # fmt: skip
        print(f"plot     {picture}\nsamples  {self.directory / 'samples.jsonl'}\nmodel    {folder}   "
              f"(python sample.py --model {folder} {'--raw ' if self.model.source is None else ''}\"…\")")  # fmt: skip


SHOWN_GROUPS = 4  # groups of each rollout that go to samples.jsonl


def device_of(model) -> torch.device:
    return model.lm_head.weight.device


def choose_directory(cfg: Config) -> Path:
    """The run's directory: as asked, else runs/MODEL-DATA with the first free number (with --resume: the last taken)."""
    if cfg.output_dir:
        path = Path(cfg.output_dir)
        if (path / "metrics.jsonl").exists() and not cfg.resume:
            raise ValueError(f"{path} holds a run already: --resume it, or choose another --output_dir")
        return path
    name = re.sub(r"[^\w.-]+", "-", f"{Path(cfg.model).name}-{cfg.data.replace('.jsonl', '')}").strip("-")
    taken = [n for n in range(1, 10000) if (Path("runs") / f"{name}-{n}").exists()]
    number = max(taken, default=0) + (0 if cfg.resume and taken else 1)
    return Path("runs") / f"{name}-{number}"


def main():
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text())
        return
    try:
        cfg = config_from(sys.argv[1:])
        run = Run(cfg)
        train(cfg, run)
        run.finish()
        fsdp.shutdown()
    except (ValueError, RuntimeError, FloatingPointError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, FloatingPointError) and "reward" not in str(error):
            raise
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
