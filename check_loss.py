"""
Is this loss right?  `python loss.py --check [NAME | my_loss.py:my_variant]` asks, for every variant or the one named:

    gradient   autograd equals finite differences in fp64, with whatever the variant detaches held still
    masked     NaN and inf in masked places reach neither the loss nor the gradient
    empty      a row, or a batch, without an unmasked token (a truncated completion, filtered out) adds exactly 0
    padding    more padding changes nothing
    split      the gradients of 2 and 4 micro-batches add up to that of 1
    logprobs   chunked_logprobs, whatever the chunk, equals full logits in fp64
    chunks     chunked_loss does too: only for variants declared pointwise, and it is this declaration that it verifies
    TRL        TRL 1.16's own value and gradient, for the variants it has, where it is installed

each with the options of LossConfig that change the loss. It prints the largest error of each, relative to the largest
value where that exceeds 1, and exits with 1 if one is too large. Sizes are tiny: seconds on a CPU.

What does not live here: the losses (loss.py), the head (chunked_kernel.py), regression tests (tests/).
"""

import argparse
import importlib.metadata
import math
import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from chunked_kernel import chunked_logprobs, chunked_loss
from loss import LOSSES, LossConfig, entropy_keep, find_loss, global_denominator, is_pointwise, level
from loss import policy_loss, token_loss, token_weights

TEMPERATURE = 0.7
CHUNKS = (1, 4, 64)
OPTIONS = (
    {},
    {"importance_sampling_level": "sequence"},
    {"delta": 1.3},
    {"beta": 0.04},
    {"beta": 0.04, "importance_sampling_level": "sequence"},
    {"beta": 0.04, "kl": "k1"},
    {"beta": 0.04, "kl": "k2"},
    {"beta": 0.04, "kl": "k3"},
    {"entropy_coef": 0.1},
    {"top_entropy_quantile": 0.5},
    {"off_policy_threshold": 0.05},
)


class Case(NamedTuple):
    """One small rollout in fp64: B = 4 rows of 5, 1, 3 and 4 tokens, a head of D = 6, V = 13."""

    hidden: torch.Tensor  # (B, T, D)
    weight: torch.Tensor  # (V, D)
    targets: torch.Tensor  # (B, T)
    mask: torch.Tensor  # (B, T) bool
    advantages: torch.Tensor  # (B,)
    logp: torch.Tensor  # (B, T), as entropy, old_logp, ref_logp
    entropy: torch.Tensor
    old_logp: torch.Tensor
    ref_logp: torch.Tensor


def make_case():
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    hidden, weight = normal(4, 5, 6), normal(13, 6)
    targets = torch.randint(13, (4, 5), generator=draw)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 4])[:, None]
    logp, entropy = full_head(hidden, weight, targets)
    # ratios on both sides of every clip, for either sign of the advantage
    old_logp, ref_logp = logp + 0.4 * normal(4, 5), logp + 0.4 * normal(4, 5)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)
    return Case(hidden, weight, targets, mask, advantages, logp, entropy, old_logp, ref_logp)


def full_head(hidden, weight, targets):
    """Log-probs and entropies from all logits at once: the reference of both doors."""
    log_p = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def loss_of(cfg, case, logp, entropy, rows=slice(None)):
    """policy_loss of some rows; denominator and kept tokens are always those of the whole case."""
    keep = entropy_keep(cfg, case.entropy, case.mask) if cfg.top_entropy_quantile < 1 else None
    loss, _ = policy_loss(
        cfg, logp[rows], case.old_logp[rows], case.ref_logp[rows], case.advantages[rows], case.mask[rows],
        global_denominator(cfg, case.mask), entropy[rows], None if keep is None else keep[rows],
    )  # fmt: skip
    return loss


def value_and_gradients(function, *inputs):
    """[f(x), df/dx, ...], zeros where the function does not use an input."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*inputs)
    gradients = torch.autograd.grad(value, inputs, allow_unused=True)
    return [value.detach()] + [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients)]


def case_gradients(cfg, case):
    return value_and_gradients(lambda logp, entropy: loss_of(cfg, case, logp, entropy), case.logp, case.entropy)


def difference(got, expected):
    """Largest difference, relative to the largest expected value where that exceeds 1; inf for a NaN."""
    worst = 0.0
    for a, b in zip(got, expected):
        error = (a.double() - b.double()).abs().max().item() / max(1.0, b.abs().max().item())
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


# ---------------------------------------------------------------------------------------------------------------------
# The checks: (cfg, case) -> error, or None where it does not apply


class HoldDetached(TorchFunctionMode):
    """Gives back, call for call, what .detach() and no_grad blocks gave the first time: constants to autograd,
    which finite differences would otherwise differentiate (cispo's clipped weight, vespo's phi)."""

    def __init__(self):
        super().__init__()
        self.tape, self.position = [], None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.detach and torch.is_grad_enabled():
            return result
        if self.position is None:
            self.tape.append(result)
            return result
        self.position += 1
        return self.tape[self.position - 1]


def check_gradient(cfg, case):
    _, *gradients = case_gradients(cfg, case)
    hold, step, worst = HoldDetached(), 1e-6, 0.0
    draw = torch.Generator().manual_seed(1)
    with hold:
        loss_of(cfg, case, case.logp, case.entropy)
    for _ in range(3):  # along random directions
        along = [torch.randn(g.shape, generator=draw, dtype=g.dtype) for g in gradients]
        values = []
        for sign in (1, -1):
            logp, entropy = (x + sign * step * v for x, v in zip((case.logp, case.entropy), along))
            hold.position = 0
            with hold:
                values.append(loss_of(cfg, case, logp, entropy))
        slope = (values[0] - values[1]) / (2 * step)
        worst = max(worst, difference([slope], [sum((g * v).sum() for g, v in zip(gradients, along))]))
    return worst


def check_masked(cfg, case):
    junk = torch.tensor([math.nan, math.inf, -math.inf, 1e30, math.nan], dtype=torch.float64).expand(4, 5)
    names = ("logp", "entropy", "old_logp", "ref_logp")
    dirty = case._replace(**{n: torch.where(case.mask, getattr(case, n), junk) for n in names})
    return difference(case_gradients(cfg, dirty), case_gradients(cfg, case))


def check_empty(cfg, case):
    last = torch.arange(4)[:, None] == 3
    without, _, _ = case_gradients(cfg, case._replace(mask=case.mask & ~last))
    alone = loss_of(cfg, case._replace(mask=case.mask & ~last), case.logp, case.entropy, slice(3))
    nothing = case_gradients(cfg, case._replace(mask=torch.zeros_like(case.mask)))
    return difference([without, *nothing], [alone] + [torch.zeros(())] * 3)


def check_padding(cfg, case):
    names = ("logp", "entropy", "old_logp", "ref_logp", "mask")
    wide = {n: torch.nn.functional.pad(getattr(case, n), (0, 3)) for n in names}
    value, *wide_gradients = case_gradients(cfg, case._replace(**wide))
    return difference([value] + [g[:, :5] for g in wide_gradients], case_gradients(cfg, case))


def check_split(cfg, case):
    def parts(size):
        return value_and_gradients(
            lambda logp, entropy: sum(loss_of(cfg, case, logp, entropy, slice(i, i + size)) for i in range(0, 4, size)),
            case.logp,
            case.entropy,
        )

    return max(difference(parts(2), parts(4)), difference(parts(1), parts(4)))


def check_head(cfg, case, loss):
    """loss(hidden, weight, chunk) in fp32, for every chunk size, against full logits in fp64."""
    whole = lambda hidden, weight: loss_of(cfg, case, *full_head(hidden, weight, case.targets))  # noqa: E731
    expected = value_and_gradients(whole, case.hidden, case.weight)
    single = case.hidden.float(), case.weight.float()
    return max(difference(value_and_gradients(partial(loss, chunk=chunk), *single), expected) for chunk in CHUNKS)


def check_logprobs(cfg, case):
    mask = case.mask

    def loss(hidden, weight, chunk):
        flat = chunked_logprobs(hidden[mask], weight, case.targets[mask], TEMPERATURE, chunk=chunk)
        return loss_of(cfg, case, *(torch.zeros(mask.shape).masked_scatter(mask, x) for x in flat))

    return check_head(cfg, case, loss)


def check_chunks(cfg, case):
    if not is_pointwise(cfg):
        return None
    mask = case.mask
    keep = entropy_keep(cfg, case.entropy, mask)[mask] if cfg.top_entropy_quantile < 1 else None
    weights = token_weights(cfg, mask, global_denominator(cfg, mask))
    advantages = case.advantages[:, None].expand_as(mask)
    term = token_loss(cfg, *(x[mask].float() for x in (case.old_logp, case.ref_logp, advantages, weights)), keep)

    def loss(hidden, weight, chunk):
        return chunked_loss(hidden[mask], weight, case.targets[mask], term, TEMPERATURE, chunk=chunk)[0]

    return check_head(cfg, case, loss)


def trl_loss(cfg, logp, old_logp, ref_logp, advantages, mask, entropy, correction=None, sampler_logp=None):
    """TRL 1.16's GRPOTrainer._compute_loss on these log-probs, one micro-batch. -> (loss, metrics: name -> float)

    Around the method stands only what it reads: no model, and an accelerator of one process.
    """
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        loss_type="grpo" if cfg.loss_type == "gspo" else cfg.loss_type,
        importance_sampling_level=level(cfg),
        epsilon_low=cfg.epsilon, epsilon_high=cfg.epsilon_high, beta=cfg.beta,
        top_entropy_quantile=cfg.top_entropy_quantile, off_policy_mask_threshold=cfg.off_policy_threshold,
        entropy_coef=cfg.entropy_coef, _entropy_bonus_enabled=cfg.entropy_coef != 0, use_adaptive_entropy=False,
        max_completion_length=cfg.max_completion_length, current_gradient_accumulation_steps=1, aux_loss_enabled=False,
        use_vllm=correction is not None, vllm_importance_sampling_correction=True,
        args=SimpleNamespace(
            delta=cfg.delta, use_bias_correction_kl=cfg.kl == "k3w", steps_per_generation=1,
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
            vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        ),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": mask.new_zeros(len(mask), 1), "prompt_mask": mask.new_zeros(len(mask), 1),
        "completion_ids": mask.long(), "completion_mask": mask.to(logp.dtype), "advantages": advantages,
        "old_per_token_logps": old_logp, "ref_per_token_logps": ref_logp, "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": correction, "sampling_per_token_logps": sampler_logp,
    }  # fmt: skip
    loss = trainer._compute_loss(None, {name: x for name, x in inputs.items() if x is not None})
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def check_trl(cfg, case):
    # TRL has no k1 and k2, and its entropy bonus is a mean over tokens whatever the variant (design, see policy_loss)
    if cfg.kl in ("k1", "k2") or cfg.entropy_coef or not in_trl(cfg.loss_type):
        return None

    # fp32 as TRL runs: its entropy threshold is always fp32, and would cut off an fp64 entropy equal to it
    case = case._replace(**{n: x.float() for n, x in case._asdict().items() if x.dtype == torch.float64})

    def theirs(logp, entropy):
        return trl_loss(cfg, logp, case.old_logp, case.ref_logp, case.advantages, case.mask, entropy)[0]

    return difference(case_gradients(cfg, case), value_and_gradients(theirs, case.logp, case.entropy))


def in_trl(name):
    return name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "gspo", "cispo", "sapo", "vespo")


CHECKS = {  # name -> (check, largest error that passes, what a failure usually means)
    "gradient": (check_gradient, 1e-6, "what shall carry no gradient must be .detach()ed or made under no_grad"),
    "masked": (check_masked, 1e-12, "multiply by the mask, or leave masked places as they come"),
    "empty": (check_empty, 1e-12, "a mean over a row needs mask.sum(-1).clamp(min=1)"),
    "padding": (check_padding, 1e-12, "a mean over a row must use the mask, not the row's length"),
    "split": (check_split, 1e-12, "a row's terms may depend on that row alone"),
    "logprobs": (check_logprobs, 1e-5, "passes for any loss, so look at chunked_kernel.py"),
    "chunks": (check_chunks, 1e-5, "registered pointwise, but do its terms depend on one token each?"),
    "TRL": (check_trl, 1e-5, "differs from TRL 1.16"),
}


def check(name, columns):
    """Run the checks `columns` on one variant. -> (cells of the table, messages of what failed)"""
    case, cells, failures = make_case(), [], []
    for column in columns:
        function, largest, hint = CHECKS[column]
        worst, failed = None, None
        for options in OPTIONS:
            cfg = LossConfig(name, epsilon_high=0.28, max_completion_length=8, **options)
            try:
                error = function(cfg, case)
            except Exception as problem:  # a forker's code may do anything: report it, and go on with the table
                error, failed = math.inf, failed or (options, f"{type(problem).__name__}: {problem}")
            if error is not None:
                worst = error if worst is None else max(worst, error)
                if error > largest:
                    failed = failed or (options, f"off by {error:.1e}, at most {largest:.0e} passes")
        cells.append("-" if worst is None else f"{worst:.0e}".replace("0e+00", "0") + (" !" if failed else ""))
        if failed:
            options = "".join(f", {key}={value}" for key, value in failed[0].items())
            failures.append(f"{name}{options}: {column}: {failed[1]} ({hint})")
    return cells, failures


def main():
    parser = argparse.ArgumentParser(prog="loss.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", nargs="?", const="all", metavar="NAME", required=True,
                        help="a loss, or my_loss.py:my_variant; nothing: all losses")  # fmt: skip
    chosen = parser.parse_args().check
    try:
        names = list(LOSSES) if chosen == "all" else [chosen]
        find_loss(names[0])
    except ValueError as problem:
        sys.exit(f"loss.py: {problem}")

    columns = list(CHECKS)
    try:
        version = importlib.metadata.version("trl")
        skipped = None if version.startswith("1.16.") else f"trl {version} installed, 1.16 is what it knows"
    except importlib.metadata.PackageNotFoundError:
        skipped = "trl not installed"
    if skipped:
        columns.remove("TRL")

    width = max(len(name) for name in names)
    print(f"{'':{width}}  pointwise  " + "  ".join(f"{column:<8}" for column in columns))
    failures = []
    for name in names:
        cells, failed = check(name, columns)
        failures += failed
        declared = "yes" if find_loss(name).pointwise else "no"
        row = "  ".join(f"{cell:<8}" for cell in cells)
        print(f"{name:{width}}  {declared:<9}  {row}  {'FAILED' if failed else 'ok'}")
    if skipped:
        print(f"TRL: skipped: {skipped}")
    print("\n".join(["", *failures] if failures else [f"{len(names)} checked, nothing wrong"]))
    sys.exit(1 if failures else 0)
