"""One optimizer step: rows (completions with advantages) -> micro-batches -> the loss's gradient -> new weights.

    gradient = sum over micro-batches and ranks of  grad  sum_{i,t} weight_{it} · term_{it},  weights counted once

Lives here: cutting a step into micro-batches, laying rows out for the model with each group's prompt read once, the
heads that turn hidden states into log-probs or a loss, the learner's passes. Not here: where rows come from (train.py),
what a term or a weight is (loss.py), how a head avoids holding all logits (chunked_kernel.py).

    B rows (completions), P prompts, R tokens of the longest completion, N completion tokens that count, D width,
    V vocabulary, K reward functions; `cfg` is train.py's Config

Try it:  pytest tests/test_learner.py
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

import fsdp
from chunked_kernel import chunk_tokens, chunked_logprobs, chunked_loss
from loss import (entropy_keep, global_denominator, is_pointwise, policy_loss, policy_metrics, sampler_correction,
                  token_loss, token_weights)  # fmt: skip
from model import Prefix
from sample import Completion


@dataclass
class Row:
    """One completion and all that becomes of it. The rows of a group stand together, groups in the order of `index`."""

    problem: dict
    index: int  # the problem's number, counted over the whole run and all ranks
    sample: int  # which of the group's G
    completion: Completion
    text: str
    rewards: torch.Tensor | None = None  # (K,)
    extra: dict | None = None  # what reward functions logged beside it
    advantage: float = 0.0
    place: int = 0  # of its group in the rollout, over all ranks
    counts: bool = True  # False: its tokens are masked
    old_logp: torch.Tensor | None = None  # (n,) each, n = its tokens
    ref_logp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    keep: torch.Tensor | None = None  # bool


# ---------------------------------------------------------------------------------------------------------------------
# Rows -> what the model reads


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


def cut(rows: list[Row], cfg) -> list[list[Row]]:
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
            shared = i > 0 and cfg.shared_prefix
            cost = len(row.completion.tokens) + (0 if shared else prompt)
            if not batches or cost > room or (room < whole <= cfg.micro_batch_tokens):
                batches.append([])
                room = cfg.micro_batch_tokens - (prompt if shared else 0)  # what a split group goes on with in the next
            batches[-1].append(row)
            room -= cost
    most = max(fsdp.gather_objects([len(batches)]))
    return batches + [[] for _ in range(most - len(batches))]


def pack(rows: list[Row], cfg, device) -> MicroBatch:
    """A row's input is its prompt's last token and all completion tokens but the last, so that position t predicts
    completion token t; the rest of the prompt is its group's prefix, or with shared_prefix off stands before it."""
    if not rows:  # one token that counts for nothing: the same forward and backward, a gradient of zero
        zero = torch.zeros(1)
        rows = [Row({"prompt_ids": [0]}, -1, 0, Completion([0], [0.0], True), "", counts=False,
                    old_logp=zero, ref_logp=zero, keep=zero)]  # fmt: skip
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


def logprob_head(mb: MicroBatch, cfg):
    """A head that gives the counted tokens' log-probs and entropies, (N,) each."""

    def head(hidden, weight):
        hidden = hidden.flatten(0, 1)[mb.at]  # (N,D): only what counts enters the head
        if cfg.chunked_head:
            chunk = chunk_tokens(len(weight), cfg.chunk_bytes)
            return chunked_logprobs(hidden, weight, mb.targets, cfg.temperature, chunk=chunk)
        logp = ((hidden @ weight.T).float() / cfg.temperature).log_softmax(-1)  # (N,V)
        return logp.gather(1, mb.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    return head


def loss_head(mb: MicroBatch, cfg, denominator: int, differences: list):
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
            spread = [
                torch.zeros(mb.mask.shape, dtype=x.dtype, device=x.device).masked_scatter(mb.mask, x)
                for x in (logp, entropy)
            ]
            loss, metrics = policy_loss(loss_cfg, spread[0], mb.old_logp, mb.ref_logp, mb.advantages, mb.mask,
                                        denominator, spread[1], mb.keep, correction, mb.sampler_logp)  # fmt: skip
        policy = logp.detach() if mb.old_logp is None else flat(mb.old_logp)  # the one that sampled
        differences.append((policy - flat(mb.sampler_logp)).abs())
        return loss, metrics

    return head


@torch.no_grad()
def learner_logprobs(model, rows: list[Row], cfg, name: str):
    """Sets each row's <name> and entropy, (n,), by the learner's own forward, without dropout."""
    was_training = model.training
    model.eval()
    try:
        for batch in cut(rows, cfg):
            mb = pack(batch, cfg, cfg.device)
            values = model(mb.tokens, prefix=mb.prefix, head=logprob_head(mb, cfg))
            for field_name, x in zip((name, "entropy"), values):
                x = torch.zeros(mb.mask.shape, device=x.device).masked_scatter(mb.mask, x.float()).cpu()  # (B,R)
                for row, line in zip(batch, x):
                    setattr(row, field_name, line[: len(row.completion.tokens)])
    finally:
        model.train(was_training)


def keep_high_entropy(model, rows: list[Row], cfg):
    """Sets row.keep: which tokens are among the step's top_entropy_quantile, over all micro-batches and ranks."""
    learner_logprobs(model, rows, cfg, "unused_logp")
    counted = [row.entropy for row in rows if row.counts]
    everyone = torch.tensor(fsdp.gather_objects(torch.cat(counted).tolist() if counted else []))
    for row in rows:
        row.keep = entropy_keep(cfg.loss, row.entropy, torch.ones_like(row.entropy), everyone)


def optimizer_step(model, optimizer, rows: list[Row], cfg, step: int) -> dict:
    """One update from this rank's rows; the denominator is counted over all micro-batches and ranks before the first
    backward, so that how a step is cut never changes its gradient. Returns the step's metrics, alike on all ranks."""
    if cfg.top_entropy_quantile < 1:
        keep_high_entropy(model, rows, cfg)
    batches = cut(rows, cfg)
    packed = [pack(batch, cfg, cfg.device) for batch in batches]
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
    norm = fsdp.clip_grad_norm(model, cfg.max_grad_norm or math.inf)
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


def learning_rate(cfg, step: int) -> float:
    """Of optimizer step `step`, counted from 0: it rises to its peak at the last warm-up step, and falls to the floor
    at the last step of all."""
    warmup = math.ceil(cfg.warmup_ratio * cfg.max_steps)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    done = (step + 1 - warmup) / max(cfg.max_steps - warmup, 1)
    fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[cfg.lr_scheduler_type]
    return cfg.learning_rate * (1 - (1 - cfg.min_lr_ratio) * fall)
