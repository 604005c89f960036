"""
Rewards to advantages, log-probs to loss: every GRPO variant, in plain PyTorch.

What lives here: advantages, importance ratios, the variants' per-token terms, KL estimators, token weights and their
denominator, metrics. What does not: logits (chunked_kernel.py), reward functions (rewards.py), ranks and micro-batches
(train.py). Nothing here knows whether the head is chunked.

    loss = sum_it weight_it * (term_it * off_policy_i * keep_it * correction_it + beta * KL_it - entropy_coef * H_it)

`term` is the variant, GRPO's (2402.03300) being -min(w A, clip(w, 1-eps, 1+eps) A) with w = pi/pi_old; `weight` is
1/(B n_i), 1/N, 1/(B L) or 1/B, counted over the whole optimizer step, so that cutting a step into micro-batches or
spreading it over ranks leaves the gradient unchanged.

To add a variant, write one function, here or in a file of your own; --loss_type takes its name, or my_loss.py:mine

    @register("mine", aggregate="tokens", pointwise=True)
    def mine(logp, old_logp, advantages, mask, cfg):
        return -importance_ratio(logp, old_logp, mask, cfg) * advantages

Try:  python loss.py --check          (all variants; or --check grpo, --check my_loss.py:mine)

Legend: B sequences, G completions a prompt, P prompts, T tokens, N unmasked completion tokens, C tokens of a chunk,
K reward functions, n_i unmasked tokens of row i, L max_completion_length. logp, old_logp, ref_logp, entropy and mask
are (B, T) and already shifted: [i, t] belongs to completion token t.
"""

import difflib
import importlib.util
import math
import os
import sys
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch

ADVANTAGE_EPS = 1e-4  # outside the root, as in TRL
EXP_BOUND = 20.0  # largest exponent: e^20 times e^20 is still far inside fp32
AGGREGATES = ("sequences", "tokens", "constant", "sum")
SCALES = ("group", "batch", "none", "rloo", "raw", "max", "normalize_then_sum")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3w")
LEVELS = ("token", "sequence")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def check_name(kind, name, choices):
    """ValueError, with the choices and the closest of them, unless `name` is one of them."""
    if name not in choices:
        close = difflib.get_close_matches(str(name), choices, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {kind} {name!r}{hint} (choices: {', '.join(choices)})")


def at_least_fp32(x):
    """Integers and half precision become fp32, fp64 stays: bf16's mean of 1, 1, 1 and 1.0078 is 1."""
    return x if x.dtype == torch.float64 else x.float()


# ---------------------------------------------------------------------------------------------------------------------
# Rewards -> advantages


def combine_rewards(rewards_per_func, weights=None):
    """r = sum_k w_k R_k. (B, K) with NaN where a function does not apply, weights (K,) or None for ones -> (B,).

    A missing value counts as nothing; a row without any value is NaN, not 0.
    """
    rewards_per_func = at_least_fp32(rewards_per_func)
    weights = 1.0 if weights is None else torch.as_tensor(weights).to(rewards_per_func)
    missing = rewards_per_func.isnan().all(dim=1)
    return (rewards_per_func * weights).nansum(dim=1).masked_fill(missing, math.nan)


def flat_groups(rewards, group_size):
    """(B,) -> (P,) bool: groups whose rewards are all equal (or missing), which teach nothing."""
    groups = rewards.view(-1, group_size)
    highest = groups.masked_fill(groups.isnan(), -math.inf).amax(dim=1)
    lowest = groups.masked_fill(groups.isnan(), math.inf).amin(dim=1)
    return highest <= lowest


def nanstd(x, dim=None):
    """Bessel's standard deviation of what is not NaN, its dim kept; 0 for fewer than two values."""
    keep = dim is not None
    count = (~x.isnan()).sum(dim=dim, keepdim=keep)
    squares = (x - x.nanmean(dim=dim, keepdim=keep)).square().nansum(dim=dim, keepdim=keep)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def group_advantages(rewards, group_size, scale="group", weights=None):
    """Advantages of groups of `group_size` consecutive rows. (B,), or (B, K) with weights (K,) -> (B,).

    r is the weighted sum of the K rewards; rows without any reward (NaN) leave the statistics and get 0.
      group  (r - mean_g) / (std_g + 1e-4)              GRPO, 2402.03300
      batch  (r - mean_g) / (std_all + 1e-4)            PPO Lite, 2508.08221
      none   r - mean_g                                 Dr. GRPO, 2503.20783
      rloo   r - mean of the group's others             RLOO, 2402.14740
      raw    r                                          REINFORCE without a baseline
      max    r where r is its group's maximum, else 0   only the best answers count
      normalize_then_sum  each function group-normalised, weighted, summed, standardised over the batch (2601.05242)
    A group whose values are all equal gets exactly 0 (but for raw and max): the fp32 mean of eight rewards of 0.95 is
    not 0.95, which would make advantages of 6e-4. `batch` and `normalize_then_sum` need the rewards of all ranks.

    ValueError: unknown scale, rows that do not fill groups, one completion a prompt where a baseline is needed.
    """
    check_name("scale", scale, SCALES)
    rewards = at_least_fp32(rewards)
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not fill groups of {group_size}")
    if group_size == 1 and scale not in ("raw", "max"):
        raise ValueError(
            f"scale {scale!r} compares the completions of a prompt, but there is 1 a prompt and every advantage "
            f"would be 0: use at least 2, or scale 'raw'"
        )
    if scale == "normalize_then_sum":
        rewards = rewards.view(len(rewards), -1)  # (B, K)
        columns = [group_advantages(column, group_size) for column in rewards.unbind(dim=1)]
        rewards = torch.stack(columns, dim=1).masked_fill(rewards.isnan(), math.nan)
    if rewards.dim() == 2:
        rewards = combine_rewards(rewards, weights)

    groups = rewards.view(-1, group_size)  # (P, G)
    missing = groups.isnan()
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    if scale == "raw":
        advantages = groups
    elif scale == "max":
        best = groups.masked_fill(missing, -math.inf).amax(dim=1, keepdim=True)
        advantages = groups.where(groups == best, 0.0)
    elif scale == "none":
        advantages = centred
    elif scale == "rloo":
        n = (~missing).sum(dim=1, keepdim=True)
        advantages = centred * n / (n - 1).clamp(min=1)  # r - (sum - r)/(n - 1)
    elif scale == "group":
        advantages = centred / (nanstd(groups, dim=1) + ADVANTAGE_EPS)
    elif scale == "batch":
        advantages = centred / (nanstd(groups) + ADVANTAGE_EPS)
    else:  # normalize_then_sum
        advantages = (groups - groups.nanmean()) / (nanstd(groups) + ADVANTAGE_EPS)

    if scale not in ("raw", "max"):
        advantages = advantages.masked_fill(flat_groups(rewards, group_size)[:, None], 0.0)
    return advantages.masked_fill(missing, 0.0).view(-1)


def reward_metrics(rewards_per_func, names, group_size, weights=None):
    """TRL's reward statistics as floats, from all ranks' rewards (B, K). What has no value at all is left out."""
    total = combine_rewards(rewards_per_func, weights)
    metrics = {"frac_reward_zero_std": flat_groups(total, group_size).float().mean().item()}
    for name, column in [*zip(names, at_least_fp32(rewards_per_func).unbind(dim=1)), (None, total)]:
        if not column.isnan().all():
            metrics[f"rewards/{name}/mean" if name else "reward"] = column.nanmean().item()
            metrics[f"rewards/{name}/std" if name else "reward_std"] = nanstd(column).item()
    return metrics


def kl_penalty(old_logp, ref_logp, mask):
    """sum_t m (old - ref), (B,): what --kl_in_reward subtracts, times beta, from each reward (as RLHF's PPO did)."""
    return (old_logp - ref_logp).masked_fill(~mask.bool(), 0.0).sum(dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Variants


class Variant(NamedTuple):
    terms: Callable  # (logp, old_logp, advantages, mask, cfg) -> per-token terms
    aggregate: str
    pointwise: bool

    def __call__(self, *args):
        return self.terms(*args)


LOSSES = {}  # name -> Variant


def register(name, aggregate, pointwise=False):
    """Make variant(logp, old_logp, advantages, mask, cfg) -> per-token terms a loss type called `name`.

    logp, old_logp and mask (0.0 or 1.0) are (B, T), advantages (B, 1); masked places hold zeros. Terms are (B, T), or
    (B, 1) to be spread over the row. aggregate: "sequences" 1/(B n_i), "tokens" 1/N, "constant" 1/(B L), "sum" 1/B.
    pointwise: a token's term depends on that token alone (at token-level ratios), so that all arguments may also be
    (C,), tokens of a chunk: the faster of the head's two doors. `python loss.py --check` verifies the claim.
    """
    check_name("aggregate", aggregate, AGGREGATES)

    def add(function):
        if name in LOSSES and LOSSES[name].terms.__module__ == __name__ != function.__module__:
            raise ValueError(f"loss {name!r} is built in: register yours under another name")
        LOSSES[name] = Variant(function, aggregate, pointwise)
        return function

    return add


def find_loss(name):
    """The Variant called `name`, or the one that a file of yours registers: "my_loss.py:my_variant"."""
    path, _, variant = name.rpartition(":")
    if name not in LOSSES and path.endswith(".py"):
        if not os.path.isfile(path):
            raise ValueError(f"loss {name!r}: there is no file {path!r}")
        spec = importlib.util.spec_from_file_location(path, path)
        sys.modules[path] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        mine = {n: v for n, v in LOSSES.items() if v.terms.__module__ == path}
        mine |= {v.terms.__name__: v for v in mine.values()}
        if variant not in mine:
            raise ValueError(
                f"{path} registers no loss {variant!r}, only: {', '.join(sorted(mine)) or 'none'} "
                f"(a loss is a function under @register({variant!r}, aggregate=...))"
            )
        LOSSES[name] = mine[variant]
    check_name("loss", name, LOSSES)
    return LOSSES[name]


@dataclass
class LossConfig:
    loss_type: str = "dapo"  # a name in LOSSES, or my_loss.py:my_variant
    epsilon: float = 0.2  # clip the ratio below 1 - epsilon
    epsilon_high: float | None = None  # clip it above 1 + this (None: epsilon); for cispo it is the cap itself
    delta: float | None = None  # cap of the unclipped ratio, for A < 0 (INTELLECT-2, 2505.07291)
    beta: float = 0.0  # weight of the KL to the reference model
    kl: str = "k3w"  # estimator: k1, k2, k3, k3w
    importance_sampling_level: str | None = None  # token, sequence; None: sequence for gspo and luspo, else token
    top_entropy_quantile: float = 1.0  # share of tokens, of highest entropy, whose policy term is kept
    entropy_coef: float = 0.0  # weight of the entropy bonus
    off_policy_threshold: float | None = None  # drop a row if A < 0 and its mean sampler_logp - logp exceeds this
    max_completion_length: int | None = None  # L of dr_grpo

    def __post_init__(self):
        find_loss(self.loss_type)
        check_name("kl", self.kl, KL_ESTIMATORS)
        if self.importance_sampling_level is not None:
            check_name("importance_sampling_level", self.importance_sampling_level, LEVELS)
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise ValueError(f"top_entropy_quantile {self.top_entropy_quantile} is not between 0 and 1")
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon


def level(cfg):
    """What the importance ratio is taken over: "token" or "sequence"."""
    default = "sequence" if cfg.loss_type in ("gspo", "luspo") else "token"
    return cfg.importance_sampling_level or default


def is_pointwise(cfg):
    """Whether each token's term depends on that token alone: then chunked_loss may evaluate it chunk by chunk.

    Sequence ratios and the off-policy mask need whole rows, so they go through chunked_logprobs whatever the variant.
    """
    return find_loss(cfg.loss_type).pointwise and level(cfg) == "token" and cfg.off_policy_threshold is None


def bounded_exp(x):
    """e^x up to x = 20, its tangent beyond: finite in value and gradient, and the gradient keeps its sign."""
    bounded = x.clamp(max=EXP_BOUND)
    return bounded.exp() * (1 + x - bounded)


def importance_ratio(logp, old_logp, mask, cfg):
    """w = pi/pi_old. Token level: e^d, shaped as logp. Sequence level: exp(mean_t d), (B, 1): GSPO, 2507.18071."""
    d = logp - old_logp
    if level(cfg) == "sequence":
        d = (d * mask).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return bounded_exp(d)


@register("luspo", aggregate="sum")  # 2602.05261: GSPO times the sequence's length
@register("gspo", aggregate="sequences")  # 2507.18071: one ratio a sequence
@register("dapo", aggregate="tokens", pointwise=True)  # 2503.14476: every token counts alike
@register("dr_grpo", aggregate="constant", pointwise=True)  # 2503.20783: no length bias
@register("bnpo", aggregate="tokens", pointwise=True)  # TRL's name: its N is per micro-batch, ours per step, as dapo's
@register("grpo", aggregate="sequences", pointwise=True)  # 2402.03300
def clipped(logp, old_logp, advantages, mask, cfg):
    """-min(min(w, delta) A, clip(w) A): PPO's surrogate (1707.06347), with dual clip where delta is set."""
    w = importance_ratio(logp, old_logp, mask, cfg)
    inside = w.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high)
    return -torch.minimum(w.clamp(max=cfg.delta or math.inf) * advantages, inside * advantages)


@register("cispo", aggregate="tokens", pointwise=True)
def cispo(logp, old_logp, advantages, mask, cfg):
    """MiniMax-M1, 2506.13585: clip the weight, not the token, so that every token keeps a gradient."""
    w = importance_ratio(logp, old_logp, mask, cfg).clamp(max=cfg.epsilon_high).detach()
    return -w * advantages * logp


@register("sapo", aggregate="sequences", pointwise=True)
def sapo(logp, old_logp, advantages, mask, cfg):
    """2511.20347: a sigmoid in place of the clip; it decays a little faster for A <= 0. Its slope at w = 1 is A."""
    w = importance_ratio(logp, old_logp, mask, cfg)
    tau = torch.where(advantages > 0, 1.0, 1.05).to(w)
    return -(4 / tau) * torch.sigmoid(tau * (w - 1)) * advantages


def vespo_weight(logp, old_logp, advantages, mask):
    """phi = W^k exp(lambda (1 - W)), (B, 1), no gradient, with W the ratio of whole sequences; phi(1) = 1."""
    d = (logp - old_logp).detach().clamp(-EXP_BOUND, EXP_BOUND)
    s = (d * mask).sum(dim=-1, keepdim=True).clamp(math.log(1e-8), EXP_BOUND)  # log W
    k = torch.where(advantages >= 0, 2.0, 3.0).to(s)
    lam = torch.where(advantages >= 0, 3.0, 2.0).to(s)
    return (lam + k * s - lam * s.exp()).exp()


@register("vespo", aggregate="tokens")
def vespo(logp, old_logp, advantages, mask, cfg):
    """2602.10693: REINFORCE with a smooth weight phi of the sequence's ratio, small on either side of 1."""
    return -vespo_weight(logp, old_logp, advantages, mask) * advantages * logp


@register("reinforce", aggregate="tokens", pointwise=True)
def reinforce(logp, old_logp, advantages, mask, cfg):
    """-A log pi: the plain policy gradient, right only while the policy is still the one that sampled."""
    return -advantages * logp


@register("unclipped", aggregate="tokens", pointwise=True)
def unclipped(logp, old_logp, advantages, mask, cfg):
    """-w A: importance sampling without a trust region."""
    return -importance_ratio(logp, old_logp, mask, cfg) * advantages


# ---------------------------------------------------------------------------------------------------------------------
# What is added to, or taken out of, the terms


def kl_terms(cfg, logp, old_logp, ref_logp, mask):
    """Estimates of KL(pi || ref) at each token, from samples of the policy (Schulman, "Approximating KL Divergence").

    With q = ref - logp:   k1 = -q     k2 = q^2/2     k3 = e^q - q - 1     k3w = w k3 (TRL's default since 1.16)

    All but k2 are unbiased as numbers (on policy, w = 1). As losses they are not the same: autograd differentiates the
    estimate and forgets that the samples came from the policy too. What the expected on-policy gradient really is:
        k1   0: E[grad log pi] = 0, so k1 in the loss does nothing but add noise (subtracted from the reward it works)
        k2   the gradient of the reverse KL, KL(pi || ref), which is what one wants
        k3   the gradient of the forward KL, KL(ref || pi)
        k3w  the reverse KL's again: the gradient through w restores what was forgotten, so w is not detached.
    w is not clipped, and is taken at the level of the variant's ratio.
    """
    q = ref_logp - logp
    if cfg.kl == "k1":
        return -q
    if cfg.kl == "k2":
        return q.square() / 2
    k3 = bounded_exp(q) - q - 1
    return k3 if cfg.kl == "k3" else importance_ratio(logp, old_logp, mask, cfg) * k3


def off_policy_mask(logp, sampler_logp, advantages, mask, threshold):
    """(B, 1) bool: False drops a row, if A < 0 and mean_t (sampler - logp) > threshold (DeepSeek-V3.2, 2512.02556)."""
    drift = ((sampler_logp - logp.detach()) * mask).sum(dim=-1, keepdim=True)
    return (advantages >= 0) | (drift / mask.sum(dim=-1, keepdim=True).clamp(min=1) <= threshold)


def entropy_keep(cfg, entropy, mask, gathered=None):
    """(B, T) bool: the tokens among the `top_entropy_quantile` share of highest entropy (2506.01939).

    The threshold is the linearly interpolated (1 - top_entropy_quantile) quantile of `gathered`, the entropies of all
    unmasked tokens of the step on all ranks, flat; None: of this batch alone.
    """
    mask = mask.bool()
    values = (entropy[mask] if gathered is None else gathered).float().sort().values  # torch.quantile stops at 16M
    if not len(values):
        return mask
    at = round((1 - cfg.top_entropy_quantile) * (len(values) - 1), 6)  # 1 - 0.7 is 0.30000000000000004
    threshold = torch.lerp(values[math.floor(at)], values[math.ceil(at)], at % 1)
    return (entropy.float() >= threshold) & mask


def sampler_correction(old_logp, sampler_logp, mask, mode="token_truncate", cap=3.0):
    """(B, T) factors pi_old/pi_sampler, where the sampler's numerics differ from the learner's (TRL's modes).

    truncate: ratios above cap become cap (truncated importance sampling). mask: they become 0. Of each token, or of the
    whole sequence (the product). 1 where the sampler gave no log-prob (NaN), and in masked places.
    """
    check_name("sampler correction", mode, CORRECTIONS)
    d = (old_logp - sampler_logp).masked_fill(~mask.bool(), 0.0).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        d = d.sum(dim=1, keepdim=True).expand_as(old_logp)
    w = bounded_exp(d)
    return w.clamp(max=cap) if mode.endswith("truncate") else w.masked_fill(w > cap, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# The loss


def global_denominator(cfg, mask):
    """This rank's count, an int64 scalar: N for "tokens", B for the rest. train.py: max(all ranks' sum, 1)."""
    if find_loss(cfg.loss_type).aggregate == "tokens":
        return mask.bool().sum()
    return torch.tensor(mask.shape[0], device=mask.device)


def token_weights(cfg, mask, denominator):
    """(B, T): what each token's term is multiplied by, 0 in masked places. Both doors of the head use it.

    denominator: B or N of the whole step, over all micro-batches and ranks (global_denominator, summed).
    """
    mask = at_least_fp32(mask)
    denominator = denominator + (denominator == 0)  # a step without a token: 0/1, not 0/0
    aggregate = find_loss(cfg.loss_type).aggregate
    if aggregate == "sequences":
        return mask / (mask.sum(dim=-1, keepdim=True).clamp(min=1) * denominator)
    if aggregate == "constant":
        if not cfg.max_completion_length:
            raise ValueError(f"{cfg.loss_type} divides by max_completion_length, which is {cfg.max_completion_length}")
        return mask / (denominator * cfg.max_completion_length)
    return mask / denominator  # "tokens": N, "sum": B


def token_terms(cfg, logp, old_logp, ref_logp, advantages, mask, entropy, keep, correction, sampler_logp=None):
    """The bracket of the header's equation, before weights: the one function behind both doors.

    All (B, T) with advantages (B, 1), or, for a pointwise cfg, all (C,). Masked places must already be filled.
    """
    if cfg.beta and ref_logp is None:
        raise ValueError(f"beta is {cfg.beta}, so the loss needs ref_logp")
    if cfg.entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef is {cfg.entropy_coef}, so the loss needs entropy")
    if correction is not None and cfg.loss_type == "vespo":
        raise ValueError("vespo weighs whole sequences itself and takes no sampler correction: switch one of them off")
    terms = find_loss(cfg.loss_type)(logp, old_logp, advantages, mask, cfg)
    if terms.shape not in (logp.shape, logp.shape[:1] + (1,)):
        raise ValueError(f"loss {cfg.loss_type!r} made {tuple(terms.shape)} terms of {tuple(logp.shape)} log-probs")
    if cfg.off_policy_threshold is not None:
        sampler_logp = old_logp if sampler_logp is None else sampler_logp
        terms = terms * off_policy_mask(logp, sampler_logp, advantages, mask, cfg.off_policy_threshold)
    if keep is not None:
        terms = terms * keep
    if correction is not None:
        terms = terms * correction
    if cfg.beta:
        terms = terms + cfg.beta * kl_terms(cfg, logp, old_logp, ref_logp, mask)
    if cfg.entropy_coef:
        terms = terms - cfg.entropy_coef * entropy
    return terms


def fill(mask, *tensors):
    """Zeros in masked places, before any exp: 0 * inf and 0 * NaN are NaN, in the gradient too. None stays None."""
    return [None if x is None else torch.where(mask.bool(), x, 0.0) for x in tensors]


def policy_loss(cfg, logp, old_logp, ref_logp, advantages, mask, denominator, entropy=None, keep=None, correction=None,
                sampler_logp=None):
    """The loss of a micro-batch from its log-probs (the door for any variant). -> (loss, metrics)

    logp (B, T) carries the gradient (and entropy, for the bonus); advantages (B,). old_logp None: logp.detach(), one
    update a rollout. ref_logp None: allowed when beta is 0. denominator: the whole step's, see token_weights. keep:
    entropy_keep of the whole step; None with top_entropy_quantile < 1: of this batch. correction: sampler_correction.
    sampler_logp: what the off-policy mask compares logp with; None: old_logp. Masked places may hold anything.
    The entropy bonus takes the variant's own token weights, for all tokens (TRL: a mean over the kept tokens).
    Without an unmasked token the loss is a differentiable 0. metrics: see policy_metrics.
    """
    if mask.shape != logp.shape or advantages.shape != logp.shape[:1]:
        raise ValueError(
            f"logp {tuple(logp.shape)} needs a mask of that shape and advantages {tuple(logp.shape[:1])}, "
            f"got {tuple(mask.shape)} and {tuple(advantages.shape)}"
        )
    logp, entropy = fill(mask, logp, entropy)
    old_logp = logp if old_logp is None else old_logp
    old_logp, ref_logp, sampler_logp, correction = [
        x if x is None else x.detach() for x in fill(mask, old_logp, ref_logp, sampler_logp, correction)
    ]
    if cfg.top_entropy_quantile < 1 and keep is None:
        if entropy is None:
            raise ValueError(f"top_entropy_quantile is {cfg.top_entropy_quantile}, so the loss needs entropy or keep")
        keep = entropy_keep(cfg, entropy.detach(), mask)
    mask = mask.to(logp.dtype)
    column = advantages[:, None]
    terms = token_terms(cfg, logp, old_logp, ref_logp, column, mask, entropy, keep, correction, sampler_logp)
    loss = (terms * token_weights(cfg, mask, denominator)).sum()
    return loss, policy_metrics(cfg, logp, old_logp, ref_logp, advantages, mask, entropy)


def token_loss(cfg, old_logp, ref_logp, advantages, weights, keep=None, correction=None):
    """The same loss, chunk by chunk: what chunked_kernel.chunked_loss calls (the door for pointwise variants).

    Everything is flat, one value for each of the N unmasked tokens: old_logp, ref_logp (None as in policy_loss),
    advantages (its row's), weights (token_weights[mask]), keep, correction. -> f(logp, entropy, rows), the summed,
    weighted loss of tokens rows = slice(a, b), whose logp and entropy are (C,).
    """
    if not is_pointwise(cfg):
        raise ValueError(f"{cfg.loss_type} as configured needs whole rows: use chunked_logprobs and policy_loss")
    if cfg.top_entropy_quantile < 1 and keep is None:
        raise ValueError(f"top_entropy_quantile is {cfg.top_entropy_quantile}: chunks need keep, see entropy_keep")

    def chunk_loss(logp, entropy, rows):
        old, ref, kept, corrected = [None if x is None else x[rows] for x in (old_logp, ref_logp, keep, correction)]
        old = logp.detach() if old is None else old
        mask = torch.ones_like(logp)
        terms = token_terms(cfg, logp, old, ref, advantages[rows], mask, entropy, kept, corrected)
        return (terms * weights[rows]).sum()

    return chunk_loss


@torch.no_grad()
def policy_metrics(cfg, logp, old_logp, ref_logp, advantages, mask, entropy=None):
    """TRL's names -> (sum, count), tensors, so that micro-batches and ranks add up. Shapes as policy_loss, or, for a
    pointwise cfg, all (N,).

    entropy, kl: means over tokens. clip_ratio/low_mean (A < 0, w < 1 - eps), /high_mean (A > 0, w > 1 + eps_high),
    /region_mean (either), cispo_clip_ratio: over tokens, or over rows at sequence level. vespo/phi_seq_mean: over rows.
    """
    logp, old_logp, ref_logp, entropy = fill(mask, logp, old_logp, ref_logp, entropy)
    old_logp = logp if old_logp is None else old_logp
    mask = mask.to(logp.dtype)
    advantages = advantages[:, None] if logp.dim() == 2 else advantages

    def mean(x):
        by_row = x.shape != logp.shape
        return (x.sum() if by_row else (x * mask).sum()), (mask.new_tensor(len(x)) if by_row else mask.sum())

    metrics = {}
    if entropy is not None:
        metrics["entropy"] = mean(entropy)
    if cfg.beta and ref_logp is not None:
        metrics["kl"] = mean(kl_terms(cfg, logp, old_logp, ref_logp, mask))
    terms = find_loss(cfg.loss_type).terms
    w = importance_ratio(logp, old_logp, mask, cfg)
    if terms is clipped:
        low = (w < 1 - cfg.epsilon) & (advantages < 0)
        high = (w > 1 + cfg.epsilon_high) & (advantages > 0)
        metrics["clip_ratio/low_mean"] = mean(low.to(w))
        metrics["clip_ratio/high_mean"] = mean(high.to(w))
        metrics["clip_ratio/region_mean"] = mean((low | high).to(w))
    elif terms is cispo:
        metrics["cispo_clip_ratio"] = mean(((w > cfg.epsilon_high) & (advantages > 0)).to(w))
    elif terms is vespo:
        metrics["vespo/phi_seq_mean"] = mean(vespo_weight(logp, old_logp, advantages, mask))
    return metrics


def main():
    """--check. It lives elsewhere because a user's file registers with the module `loss`, not with this script."""
    import check_loss

    check_loss.main()


if __name__ == "__main__":
    main()
