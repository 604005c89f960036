"""GRPO, top to bottom: sample a group of completions for each prompt, score them, compare within the group, update.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)                              over the G completions of a prompt
    L   = - sum_{i,t}  weight_{it} · min(w_it A_i, clip(w_it, 1-ε, 1+ε) A_i)      w_it = π(y_it) / π_old(y_it)

GRPO: Shao et al., arXiv:2402.03300; R1: arXiv:2501.12948. All the variants are in loss.py, one function each.

Lives here: the algorithm and the one Config. Not here: one optimizer step (learner.py), sampling (sample.py), rewards
(rewards.py), losses (loss.py), the network (model.py), processes and checkpoints (fsdp.py), text (data/).

    torchrun train.py                                           # a tiny model learns to sort, three minutes on a CPU
    torchrun train.py --model qwen3-0.6b                        # GSM8K, the five usual rewards
    torchrun --nproc_per_node 8 train.py --model qwen3-8b       # the same over eight GPUs
    python train.py --help

    B rows (completions), G completions a prompt, P prompts, K reward functions
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from types import SimpleNamespace

import torch

import data
import fsdp
import lora
import plan
import plot
from cli import check_choice, help_text, parse_flags
from cpu import fast_cpu_matmul, keep_freed_memory
from data.tokenizer import load_tokenizer
from journal import Journal, choose_directory
from learner import Row, learner_logprobs, optimizer_step
from loss import LossConfig, combine_rewards, flat_groups, group_advantages, kl_penalty, reward_metrics
from model import find_checkpoint, load_model, write_checkpoint
from rewards import load_rewards, score
from sample import Decoder, generate

# ---------------------------------------------------------------------------------------------------------------------
# Every knob, once: field, default, comment. Flags, --help and a run's config.json are made from these lines.


@dataclass
class Config:
    # What is trained, on what, for what
    model: str = "tiny"  # an alias (qwen3-0.6b, smollm2-135m-instruct, …), a directory or a hub id
    preset: str | None = None  # sort, gsm8k, article; defaults that flags override (default: sort for tiny, else gsm8k)
    data: str | None = None  # sort[:LENGTH], countdown, gsm8k[:DIRECTORY], FILE.jsonl[:TEST.jsonl]
    few_shot: int = 0  # worked examples before each gsm8k question, 0 to 3: a small model may need them for the format
    rewards: str | None = None  # name:weight,file.py:function:weight,… (default: the usual ones of the data)
    solved: str | None = None  # the reward that is above 0 where an answer is right (default: the data's)
    enable_thinking: bool | None = None  # passed to the chat template, where it has such a switch
    output_dir: str | None = None  # default: runs/MODEL-DATA, numbered
    resume: bool = False  # go on from the newest complete checkpoint of output_dir
    plan: bool = False  # only say how much memory it takes, what would fit, and end
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
    # Adapters (LoRA, QLoRA)
    lora_r: int = 0  # rank of the adapters; 0: full fine-tuning
    lora_alpha: float = 32.0  # they are scaled by lora_alpha / lora_r
    lora_dropout: float = 0.0  # of their inputs, in the learner's passes that carry gradients
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # names of linears, or re:EXPRESSION
    adapter: str | None = None  # start from this PEFT directory (its own r, alpha and targets)
    base: str = "keep"  # nf4: the frozen base in 4 bits
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
    max_grad_norm: float = 1.0  # gradients of a larger global norm are scaled down to it; 0: never
    # Machine
    device: str | None = None  # cpu or cuda (default: cuda where there is one)
    dtype: str | None = None  # compute type, float32 or bfloat16 (default: bfloat16 on cuda); masters are always fp32
    micro_batch_tokens: int = 4096  # tokens in one forward and backward pass; smaller takes less memory
    shared_prefix: bool = True  # the learner reads each prompt once for its whole group
    chunked_head: bool = True  # never hold all logits; false: the plain head, for comparison
    chunk_bytes: int = 256 << 20  # logits held at a time
    gradient_checkpointing: bool = False  # recompute activations instead of keeping them
    shard: str = "full"  # full, hybrid, none: how parameters are spread over ranks
    cpu_offload: bool = False  # master weights, gradients and AdamW's state live in CPU memory
    timeout: float = 600.0  # seconds a rank waits for the others
    # What is shown and kept
    eval_every: int = 50  # steps between evaluations; 0: never
    eval_problems: int = 64  # held-out problems, at most
    eval_samples: int = 4  # k of pass@k; 0: greedy only
    save_every: int = 100  # steps between checkpoints; 0: only the model at the end
    keep: int = 2  # checkpoints that stay, the newest ones
    print_every: int = 25  # steps between printed samples; 0: never

    @property
    def loss(self) -> LossConfig:
        knobs = {f.name: getattr(self, f.name) for f in fields(LossConfig)}
        return LossConfig(**knobs | ({"beta": 0.0} if self.kl_in_reward else {}))


PRESETS = {
    "sort": dict(
        data="sort", prompts_per_step=64, num_generations=8,
        entropy_coef=0.15, max_steps=350, learning_rate=2e-3,
        lr_scheduler_type="linear", warmup_ratio=0.03, min_lr_ratio=0.1, adam_beta2=0.99, eval_problems=256,
        eval_samples=0, print_every=50, save_every=0,
    ),
    "gsm8k": dict(data="gsm8k", warmup_ratio=0.02, enable_thinking=False),  # its prompt asks for reasoning by itself
    # The run of the well-known tutorials: a 4-bit Llama 3.2 3B with adapters, the five rewards, 250 steps.
    "article": dict(
        model="llama-3.2-3b-instruct", data="gsm8k", base="nf4", lora_r=32, lora_alpha=64.0, learning_rate=5e-6,
        prompts_per_step=1, num_generations=8, max_prompt_length=256, max_completion_length=200, max_steps=250,
        warmup_ratio=0.1, max_grad_norm=0.1,
    ),
}  # fmt: skip

# For each kind of data: its rewards, and the one that says whether an answer is right.
TASKS = {
    "sort": ("sort_distance,sort_inclusion_ordering,sort_exact", "sort_exact"),
    "countdown": ("countdown", "countdown"),
    "gsm8k": ("correctness,int,strict_format,soft_format,xmlcount", "gsm8k_number"),
}


def config_from(argv) -> Config:
    """Flags over preset over defaults. ValueError with the known names and the closest for anything unknown."""
    given = parse_flags(Config, argv)
    preset = given.get("preset") or ("sort" if given.get("model", "tiny") == "tiny" else "gsm8k")
    check_choice("preset", preset, PRESETS)
    cfg = Config(**(PRESETS[preset] | given | {"preset": preset}))
    task, _, option = cfg.data.partition(":")
    if task == "sort" and (option or "4").isdigit() and "max_completion_length" not in given:
        cfg.max_completion_length = int(option or 4) + 1  # the list and the end token
    complete(cfg)
    return cfg


def complete(cfg: Config):
    """Fills what depends on other knobs, and refuses what cannot work."""
    task = cfg.data.partition(":")[0]
    if not task.endswith(".jsonl"):
        check_choice("data", task, (*TASKS, "FILE.jsonl"))
    rewards, solved = TASKS.get(task, (None, None))
    cfg.rewards = cfg.rewards or rewards
    if cfg.rewards is None:
        raise ValueError(
            f"--data {cfg.data} needs --rewards: name:weight,… (`python rewards.py` lists the built-in ones)"
        )
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
    check_choice("base", cfg.base, ("keep", "nf4"))
    check_choice("shard", cfg.shard, ("full", "hybrid", "none"))
    if cfg.base == "nf4" and not (cfg.lora_r or cfg.adapter):
        raise ValueError(
            "--base nf4 is frozen, so something must be trained on it: --lora_r 16, or --adapter DIRECTORY"
        )
    if cfg.cpu_offload and (cfg.lora_r or cfg.adapter):
        raise ValueError("--cpu_offload is for what AdamW trains, and adapters are too small for it: leave it off")
    for name in ("prompts_per_step", "num_generations", "max_completion_length", "max_steps", "num_iterations",
                 "steps_per_generation", "micro_batch_tokens", "max_prompt_length", "chunk_bytes",
                 "kv_bytes", "keep"):  # fmt: skip
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name} is {getattr(cfg, name)}, but must be at least 1")
    for name in ("dynamic_sampling", "eval_every", "eval_problems", "eval_samples", "save_every", "print_every"):
        if getattr(cfg, name) < 0:
            raise ValueError(f"--{name} is {getattr(cfg, name)}, but must be at least 0")
    if cfg.temperature <= 0:
        raise ValueError(
            f"--temperature is {cfg.temperature}, but training needs one above 0: greedy groups are all alike"
        )
    if cfg.kl_in_reward and not cfg.beta:
        raise ValueError("--kl_in_reward takes beta · KL off the rewards, but --beta is 0")
    if cfg.loss_type == "vespo" and cfg.sampler_correction != "none":
        raise ValueError("--loss_type vespo weighs whole sequences itself and takes no --sampler_correction")
    if cfg.kl_in_reward and cfg.scale_rewards == "normalize_then_sum":
        raise ValueError(
            "--kl_in_reward changes the summed reward, which --scale_rewards normalize_then_sum does not form"
        )
    cfg.loss  # checks the loss's own names
    group_advantages(torch.zeros(cfg.num_generations), cfg.num_generations, cfg.scale_rewards)  # and the scale's


SHOWN_GROUPS = 4  # of each rollout, in samples.jsonl


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm


def train(cfg: Config, run: "Run", stop_asked=lambda: False):
    """The loop. What is global (problem numbers, denominators, norms, metrics) is the same for any number of ranks.

    It ends at max_steps or, with a checkpoint, after the step in which stop_asked() turns true.
    """
    model, optimizer = run.model, run.optimizer
    updates = cfg.num_iterations * cfg.steps_per_generation
    if cfg.eval_every and run.step == 0:
        run.journal.metrics(0, evaluate(run, cfg))
    while run.step < cfg.max_steps:
        clock = time.perf_counter()
        rows = collect(run, cfg)  # 1  take P problems  2  sample G completions of each  3  score them
        if updates > 1 or cfg.sampler_correction != "none" or cfg.kl_in_reward:
            learner_logprobs(model, rows, cfg, "old_logp")  # 4  else the ratio is 1 in value, and needs no pass
        if cfg.beta:
            with run.reference() as frozen:
                learner_logprobs(frozen, rows, cfg, "ref_logp")
        set_advantages(rows, cfg, run.weights)  # 5  compare within the group
        described = describe(run, rows)
        for update in range(min(updates, cfg.max_steps - run.step)):  # 6  update
            part = [row for row in rows if row.place // cfg.prompts_per_step == update % cfg.steps_per_generation]
            torch.manual_seed(hash((cfg.seed, run.step, run.world.rank)))  # dropout, the same after a resume
            metrics = described | optimizer_step(model, optimizer, part, cfg, run.step)
            optimizer.zero_grad(set_to_none=True)  # not to be held while sampling
            run.step += 1
            metrics["step_time"] = time.perf_counter() - clock
            if cfg.eval_every and (run.step % cfg.eval_every == 0 or run.step == cfg.max_steps):
                metrics |= evaluate(run, cfg)
            run.journal.metrics(run.step, metrics)
            clock = time.perf_counter()
        # Between rollouts, so that nothing of a rollout has to be saved: at the first chance after a multiple.
        stop = stop_asked()
        if stop or (cfg.save_every and run.step // cfg.save_every > (run.step - updates) // cfg.save_every):
            run.save()
        if stop:
            break
    fsdp.wait_for_save()


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
        # Every size-th, not fsdp.deal's runs: each of steps_per_generation's parts must be spread over the ranks.
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


def sample_rows(
    run: "Run", cfg: Config, problems: dict[int, dict], n: int, temperature: float, key=lambda i: i
) -> list[Row]:
    """n completions of each problem {index: problem}. Draws are keyed by the problem's index: no rank, no order."""
    with fsdp.unsharded(run.model, run.gathered) as plain, run.for_sampling(plain):
        groups = generate(
            plain, [problem["prompt_ids"] for problem in problems.values()], n,
            max_new_tokens=cfg.max_completion_length, temperature=temperature, top_k=cfg.top_k, top_p=cfg.top_p,
            min_p=cfg.min_p, stop_ids=run.tokenizer.stop_ids, seed=cfg.seed, keys=[key(i) for i in problems],
            max_batch=cfg.max_batch, kv_bytes=cfg.kv_bytes, decoder=run.decoder,
        )  # fmt: skip
    return [Row(problem, i, j, completion, run.tokenizer.decode(completion.tokens))
            for (i, problem), group in zip(problems.items(), groups) for j, completion in enumerate(group)]  # fmt: skip


def score_rows(run: "Run", rows: list[Row], judge: bool = False):
    """Sets row.rewards, one value a reward function (and, to judge, the one that says whether an answer is right)."""
    if not rows:
        return
    texts = [
        row.text if isinstance(row.problem["prompt"], str) else [{"role": "assistant", "content": row.text}]
        for row in rows
    ]
    columns = {
        name: [row.problem[name] for row in rows] for name in rows[0].problem if name not in ("prompt", "prompt_ids")
    }
    values = score(
        run.rewards + run.judge * judge, [row.problem["prompt"] for row in rows], texts,
        [row.completion.tokens for row in rows], columns,
        trainer_state=SimpleNamespace(global_step=run.step, max_steps=run.cfg.max_steps),
        **({} if judge else dict(log_metric=run.log_metric, log_extra=run.log_extra)), timeout=run.cfg.reward_timeout,
    )  # fmt: skip
    for i, row in enumerate(rows):
        row.rewards = values[i]
        row.extra = {name: column[i] for name, column in run.user_columns.items() if len(column) == len(rows)}
    run.user_columns.clear()


def set_advantages(rows: list[Row], cfg: Config, weights: list[float]):
    """Sets each row's advantage; statistics that reach over groups reach over all ranks."""
    rewards = torch.stack([row.rewards for row in rows]) if rows else torch.zeros(0, len(weights))  # (B,K)
    if cfg.kl_in_reward:
        drift = [kl_penalty(row.old_logp[None], row.ref_logp[None], torch.ones(1, len(row.old_logp))) for row in rows]
        rewards = combine_rewards(rewards, weights) - cfg.beta * torch.cat([torch.zeros(0), *drift])  # (B,)
    everyone = [(row.index, row.sample, values) for row, values in zip(rows, rewards.tolist())]
    everyone = sorted(fsdp.gather_objects(everyone), key=lambda entry: entry[:2])
    rewards = torch.tensor([values for _, _, values in everyone])
    values = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards, weights if rewards.dim() == 2 else None)
    mine = {entry[:2]: value for entry, value in zip(everyone, values.tolist())}
    for row in rows:
        row.advantage = mine[row.index, row.sample]


def describe(run: "Run", rows: list[Row]) -> dict:
    """The rollout's metrics over all ranks, under TRL's names; its first groups go to samples.jsonl."""
    cfg, names = run.cfg, [reward.name for reward in run.rewards]
    facts = [(row.index, row.sample, row.rewards.tolist(), len(row.completion.tokens), row.completion.finished,
              len(row.problem["prompt_ids"])) for row in rows]  # fmt: skip
    facts = sorted(fsdp.gather_objects(facts), key=lambda fact: fact[:2])
    _, _, rewards, lengths, finished, prompts = zip(*facts)
    run.num_tokens += sum(lengths) + sum(prompts)
    ended = [length for length, done in zip(lengths, finished) if done] or [0]
    metrics = reward_metrics(torch.tensor(rewards), names, cfg.num_generations, run.weights) | {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - sum(finished) / len(finished),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "num_tokens": run.num_tokens,
    }
    logged = fsdp.gather_objects([(name, value) for name, values in run.user_metrics.items() for value in values])
    for name in dict.fromkeys(name for name, _ in logged):
        values = [value for other, value in logged if other == name]
        metrics[name] = sum(values) / len(values)
    entries = [
        {"step": run.step + 1, "prompt": row.problem["prompt"], "completion": row.text,
         "rewards": dict(zip(names, row.rewards.tolist())), "advantage": row.advantage} | row.extra
        for row in rows if row.place < SHOWN_GROUPS
    ]  # fmt: skip
    run.user_metrics.clear()
    run.journal.samples(fsdp.gather_objects(entries), show=bool(cfg.print_every) and run.step % cfg.print_every == 0)
    return metrics


def evaluate(run: "Run", cfg: Config) -> dict:
    """Held-out problems, each once over all ranks: greedy, and the share solved in one of eval_samples draws."""
    problems = {i: run.test[i] for i in fsdp.deal(len(run.test), run.world)}
    entries = []
    for n, temperature in [(1, 0.0), (cfg.eval_samples, cfg.temperature)]:
        # Keys that no training uses.
        rows = sample_rows(run, cfg, problems, n, temperature, key=lambda i: -1 - i) if n else []
        score_rows(run, rows, judge=True)
        entries += [(row.index, temperature > 0, row.rewards.tolist(), len(row.completion.tokens)) for row in rows]
    entries = fsdp.gather_objects(entries)
    greedy = torch.tensor([rewards for _, sampled, rewards, _ in entries if not sampled])  # (problems, K+1)
    if not len(greedy):
        return {}
    names = [reward.name for reward in run.rewards]
    metrics = {f"eval/rewards/{name}/mean": value for name, value in zip(names, greedy[:, :-1].nanmean(0).tolist())}
    metrics["eval/reward"] = combine_rewards(greedy[:, :-1], run.weights).nanmean().item()
    metrics["eval/solved"] = (greedy[:, -1] > 0).float().mean().item()
    metrics["eval/mean_length"] = sum(length for _, sampled, _, length in entries if not sampled) / len(greedy)
    if cfg.eval_samples:
        solved = defaultdict(bool)
        for index, sampled, rewards, _ in entries:
            solved[index] |= sampled and rewards[-1] > 0
        metrics[f"eval/pass@{cfg.eval_samples}"] = sum(solved.values()) / len(solved)
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# A run: what it is made of


class Run:
    """Everything the loop needs, set up once."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.world = world = fsdp.setup(cfg.device, cfg.timeout)
        cfg.device = world.device.type
        cfg.dtype = cfg.dtype or ("bfloat16" if cfg.device == "cuda" else "float32")
        fast_cpu_matmul()
        keep_freed_memory()
        settings = {"max_completion_length": cfg.max_completion_length}
        self.rewards, self.judge = load_rewards(cfg.rewards, **settings), load_rewards(cfg.solved, **settings)
        self.weights = [reward.weight for reward in self.rewards]
        place = find_checkpoint(cfg.model)
        self.tokenizer = load_tokenizer(place)
        self.train, test = data.load_data(cfg.data, cfg.seed, cfg.few_shot)
        template = {} if cfg.enable_thinking is None else {"enable_thinking": cfg.enable_thinking}
        fit = dict(truncate=cfg.truncate_prompts, **template)
        self.train, dropped = data.fit_prompts(self.train, self.tokenizer, cfg.max_prompt_length, **fit)
        self.test, dropped_test = data.fit_prompts(
            test[: cfg.eval_problems], self.tokenizer, cfg.max_prompt_length, **fit
        )

        torch.manual_seed(cfg.seed)

        chosen = [choose_directory(cfg.output_dir, cfg.model, cfg.data, cfg.resume)] if fsdp.is_first() else []
        self.directory = fsdp.gather_objects(chosen)[0]
        checkpoint = fsdp.latest_checkpoint(self.directory) if cfg.resume else None
        start_adapter = self.directory / "start_adapter"  # checkpoints hold what is trained, not where it started from
        adapter = start_adapter if checkpoint and start_adapter.exists() else cfg.adapter
        self.adapted = bool(cfg.lora_r or adapter)
        if cfg.resume and not checkpoint and any((self.directory / name).exists() for name in ("model", "adapter")):
            raise ValueError(f"{self.directory} is a finished run without checkpoints: choose another --output_dir")

        self.memory_before, memory = plan.peak_memory(cfg.device), plan.device_memory(cfg.device)
        sizes, planned = plan.find_config(place), replace(cfg, adapter=str(adapter) if adapter else None)
        self.plan = plan.estimate(sizes, planned, world.size).within(memory)
        # What stays between rollouts, so that steps recorded in one are replayed in the next; None: nothing does.
        self.gathered, self.decoder = ({}, Decoder()) if self.plan.kept else (None, None)
        if fsdp.is_first() and not self.plan.fits(memory):
            print(plan.answer(sizes, planned, world.size, memory))

        def prepare(model):  # in this order, see fsdp.shard
            if adapter:
                lora.load_adapter(model, adapter, base=cfg.base)
            elif cfg.lora_r:
                targets = cfg.lora_targets
                targets = targets.removeprefix("re:") if targets.startswith("re:") else targets.split(",")
                lora.add_lora(model, cfg.lora_r, cfg.lora_alpha, targets, cfg.lora_dropout, base=cfg.base)
            model.model.checkpointing = cfg.gradient_checkpointing
            fsdp.shard(model, world, cfg.shard, getattr(torch, cfg.dtype), cfg.cpu_offload)

        home = "cpu" if cfg.cpu_offload else world.device
        self.model = load_model(place, device=home, prepare=prepare)
        longest = self.model.config.max_position_embeddings
        if cfg.max_prompt_length + cfg.max_completion_length > longest:
            raise ValueError(
                f"--max_prompt_length {cfg.max_prompt_length} and --max_completion_length {cfg.max_completion_length} "
                f"together pass the {longest} tokens that {cfg.model} reads"
            )
        # Two contexts: the model that training started from, and the form of the model that samples fastest.
        self.reference, self.for_sampling = partial(lora.reference, self.model), nullcontext
        if self.adapted and cfg.dtype == "float32" and cfg.device == "cpu":
            self.for_sampling = lora.merged  # one product a layer, not three; bf16 would round small changes away
        if cfg.beta and not self.adapted:
            frozen = load_model(place, device=home, prepare=prepare).requires_grad_(False)
            frozen.load_state_dict(self.model.state_dict())  # `tiny` is random: the copy must be of this one
            self.reference = lambda: nullcontext(frozen)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        betas = (cfg.adam_beta1, cfg.adam_beta2)
        self.optimizer = torch.optim.AdamW(
            trained, lr=cfg.learning_rate, betas=betas, weight_decay=cfg.weight_decay, fused=True
        )

        self.step = self.next_problem = self.num_tokens = 0
        if cfg.adapter and not checkpoint:
            with self.reference():
                lora.save_adapter(self.model, start_adapter)
        if checkpoint:
            state = fsdp.load_checkpoint(checkpoint, self.model, self.optimizer)
            self.step, self.next_problem, self.num_tokens = state["step"], state["next_problem"], state["num_tokens"]
        self.journal = Journal(self.directory, asdict(cfg), fsdp.is_first(), self.step, cfg.max_steps)
        self.user_metrics, self.user_columns = defaultdict(list), {}
        if cfg.resume:
            nothing = f"nothing complete to resume in {self.directory}: starting at step 0"
            self.journal.say(f"resuming {checkpoint}" if checkpoint else nothing)
        self.announce(dropped + dropped_test)

    def announce(self, dropped: int):
        """What is about to happen, and how large it is."""
        cfg, count = self.cfg, sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        defaults = {f.name: f.default for f in fields(Config)}
        chosen = {
            k: v for k, v in asdict(cfg).items() if v != defaults[k] and k not in ("model", "data", "rewards", "preset")
        }
        size = f"{len(self.train):,} problems" if hasattr(self.train, "__len__") else "endless problems"
        self.journal.say(
            f"{cfg.model}: {count:,} parameters, {trained:,} of them trained, "
            f"computing in {cfg.dtype} on {self.world.size} x {cfg.device}, "
            f"with up to {plan.gib(self.plan.total)} on each (--plan tells of what)\n"
            f"{cfg.data}: {size} to train on, {len(self.test)} held out"
            + (f", {dropped} dropped for prompts above {cfg.max_prompt_length} tokens" if dropped else "")
            + f"\nrewards: {cfg.rewards}; solved: {cfg.solved} above 0\n"
            f"each step: {cfg.prompts_per_step} prompts x {cfg.num_generations} completions of at most "
            f"{cfg.max_completion_length} tokens; {cfg.max_steps} steps; "
            f"head: {'chunked' if cfg.chunked_head else 'plain'}\n"
            f"preset {cfg.preset}: "
            + " ".join(f"{k}={v}" for k, v in chosen.items())
            + f"\nwriting to {self.directory}\n"
            "With one update a rollout, no KL and no entropy bonus the loss stays near 0 however much is learned "
            "(a group's advantages sum to 0): watch the reward and grad_norm."
        )

    def is_flat(self, group: list[Row]) -> bool:
        total = combine_rewards(torch.stack([row.rewards for row in group]), self.weights)
        return bool(flat_groups(total, len(group))[0])

    def log_metric(self, name: str, value: float):
        self.user_metrics[name].append(value)

    def log_extra(self, column: str, values: list):
        self.user_columns[column] = values

    def save(self):
        state = {"step": self.step, "next_problem": self.next_problem, "num_tokens": self.num_tokens}
        directory = self.directory / "checkpoints" / f"step_{self.step:06d}"
        fsdp.save_checkpoint(directory, self.model, self.optimizer, state, self.cfg.keep, background=True)

    def finish(self):
        """Saves the model or its adapter, draws the plot, and says what came of it."""
        built_in = self.model.source is None
        if self.adapted:
            folder = self.directory / "adapter"
            lora.save_adapter(self.model, folder)
        else:
            folder = self.directory / "model"

            def write(pairs):
                write_checkpoint(folder, self.model.config, pairs, torch.float32, self.model.source)
                if built_in:
                    self.tokenizer.save(folder)

            fsdp.export(self.model, write)
        peak = max(fsdp.gather_objects([plan.peak_memory(self.cfg.device) - self.memory_before]))
        planned = plan.gib(self.plan.total)
        self.journal.say(f"memory: {plan.gib(peak)} at most on a rank; planned for rows of full length: {planned}")
        picture = plot.plot_run(self.directory) if fsdp.is_first() else None
        command = (
            f"python sample.py --model {self.cfg.model} --adapter {folder}"
            if self.adapted
            else f"python sample.py --model {folder}"
        )
        self.journal.last_words(self.cfg.solved, picture, folder, f'{command}{" --raw" if built_in else ""} "…"')


def resume_command(argv: list[str], directory) -> str:
    """What was typed, as far as a process can tell, with what makes it go on."""
    resume = ["--output_dir", str(directory), "--resume"]  # a later flag overrides an earlier one
    return shlex.join([*fsdp.launcher(), *argv, *([] if argv[-3:] == resume else resume)])


def main():
    if {"-h", "--help"} & set(sys.argv[1:]):
        presets = "\n".join(
            f"  {name}: " + " ".join(f"--{k} {v}" for k, v in preset.items()) for name, preset in PRESETS.items()
        )
        usage = "usage: torchrun train.py [--name value] …   (- and _ are alike; --flag and --no-flag for yes and no)"
        print(f"{__doc__.splitlines()[0]}\n\n{usage}\n{help_text(Config)}\n\nPresets\n{presets}")
        return
    try:
        cfg = config_from(sys.argv[1:])
        if cfg.plan:
            rank, ranks = fsdp.launched()
            if rank == 0:
                print(plan.answer(plan.find_config(cfg.model), cfg, ranks, plan.device_memory(cfg.device)))
            return
        run = Run(cfg)
        with fsdp.stop_signals() as stop_asked:  # also while the model is written
            with run.journal:
                train(cfg, run, stop_asked)
            if run.step >= cfg.max_steps:
                run.finish()
        if run.step < cfg.max_steps:
            run.journal.say(f"stopped after step {run.step}; to go on:\n{resume_command(sys.argv, run.directory)}")
        fsdp.shutdown()
    except (ValueError, FloatingPointError, OSError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
