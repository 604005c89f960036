"""loss.py against numbers worked out by hand, by enumeration, or by another implementation."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import loss
from loss import (
    LOSSES,
    LossConfig,
    bounded_exp,
    combine_rewards,
    entropy_keep,
    flat_groups,
    global_denominator,
    group_advantages,
    is_pointwise,
    kl_penalty,
    policy_loss,
    reward_metrics,
    sampler_correction,
    token_loss,
    token_weights,
)

ROOT = Path(loss.__file__).parent
NAMES = list(LOSSES)
POINTWISE = [name for name in NAMES if LOSSES[name].pointwise]


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, *expected, atol=1e-4):
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=atol, rtol=0)


def rollout(seed=0, lengths=(5, 1, 3, 4), dtype=torch.float64):
    """logp, old, ref, advantages, mask, entropy: ratios on both sides of every clip, for either sign of A."""
    draw = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    logp = -2 * torch.rand(shape, generator=draw, dtype=dtype) - 0.1
    old, ref = (logp + 0.4 * torch.randn(shape, generator=draw, dtype=dtype) for _ in range(2))
    entropy = torch.rand(shape, generator=draw, dtype=dtype)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=dtype)[: len(lengths)]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return logp, old, ref, advantages, mask, entropy


def config(name, **options):
    return LossConfig(name, epsilon_high=options.pop("epsilon_high", 0.28), max_completion_length=8, **options)


def loss_and_gradient(cfg, logp, old, ref, advantages, mask, denominator=None, **rest):
    logp = logp.clone().requires_grad_()
    denominator = global_denominator(cfg, mask) if denominator is None else denominator
    value, metrics = policy_loss(cfg, logp, old, ref, advantages, mask, denominator, **rest)
    return value.detach(), torch.autograd.grad(value, logp)[0], metrics


# ---------------------------------------------------------------------------------------------------------------------
# Advantages


def test_each_prompt_has_its_own_group():
    # a (G, P) layout read as (P, G) gave .4999 .4999 -1.4997 .4999 to the first prompt
    advantages = group_advantages(torch.tensor([1, 0, 0, 0, 1, 1, 1, 0.0]), 4)
    close(advantages, 1.4997, -0.4999, -0.4999, -0.4999, 0.4999, 0.4999, 0.4999, -1.4997)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_std_is_bessels_and_epsilon_outside_the_root(dtype):
    # the population's std would give 1.73165 and -.57722
    advantages = group_advantages(torch.tensor([1, 0, 0, 0], dtype=dtype), 4)
    close(advantages, 1.4997, -0.4999, -0.4999, -0.4999)
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_bf16_rewards_are_not_averaged_in_bf16():
    # in bf16 the mean of these is 1 and the advantages 0, 0, 0, 1.953
    rewards = torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16)
    close(group_advantages(rewards, 4), -0.48752, -0.48752, -0.48752, 1.46256)


@pytest.mark.parametrize("scale", ["group", "batch", "none", "rloo", "normalize_then_sum"])
def test_a_flat_group_gets_exactly_zero(scale):
    # the fp32 mean of eight 0.95 is not 0.95: its rounding error, divided by 1e-4, made advantages of 6e-4
    rewards = torch.tensor([0.95] * 8 + [1, 0, 0, 0, 1, 1, 0, 1.0])
    advantages = group_advantages(rewards, 8, scale)
    assert (advantages[:8] == 0).all() and (advantages[8:] != 0).all()


def test_every_scale_by_hand():
    rewards = torch.tensor([3.0, 1, 1, 1, 2, 0, 2, 0])
    close(group_advantages(rewards, 4, "none"), 1.5, -0.5, -0.5, -0.5, 1, -1, 1, -1)
    close(group_advantages(rewards, 4, "rloo"), 2, -2 / 3, -2 / 3, -2 / 3, 4 / 3, -4 / 3, 4 / 3, -4 / 3)
    close(group_advantages(rewards, 4, "raw"), 3, 1, 1, 1, 2, 0, 2, 0)
    close(group_advantages(rewards, 4, "max"), 3, 0, 0, 0, 2, 0, 2, 0)
    std = math.sqrt((3.0625 + 0.0625 * 3 + 0.5625 * 2 + 1.5625 * 2) / 7) + 1e-4  # around 1.25, ddof 1
    close(group_advantages(rewards, 4, "batch"), *(x / std for x in (1.5, -0.5, -0.5, -0.5, 1, -1, 1, -1)))
    close(group_advantages(torch.tensor([-3.0, -1, -2, -1]), 4, "max"), 0, -1, 0, -1)


def test_rewards_are_summed_then_normalised():
    f1, f2 = torch.tensor([1.0, 0, 1, 0]), torch.tensor([0.0, 1, 0, 1])
    rewards = torch.stack([f1, f2], dim=1)
    assert (group_advantages(rewards, 4, weights=[1.0, 1.0]) == 0).all()
    close(group_advantages(rewards, 4, weights=[1.0, 0.5]), 0.865726, -0.865726, 0.865726, -0.865726, atol=1e-6)

    metrics = reward_metrics(rewards, ["f1", "f2"], 4, [1.0, 1.0])
    assert metrics["frac_reward_zero_std"] == 1 and metrics["reward"] == 1 and metrics["reward_std"] == 0
    assert metrics["rewards/f1/std"] == pytest.approx(0.57735, abs=1e-5) and metrics["rewards/f2/mean"] == 0.5
    metrics = reward_metrics(rewards, ["f1", "f2"], 4, [1.0, 0.5])
    assert metrics["reward"] == 0.75 and metrics["frac_reward_zero_std"] == 0


def test_normalize_then_sum_keeps_what_the_sum_hides():
    # functions of very different size count alike; the result is standardised over the whole batch
    big, small = f64(100, 0, 0, 100, 300, 0), f64(0, 0.1, 0.1, 0, 0, 0.3)
    advantages = group_advantages(torch.stack([big, small], dim=1), 2, "normalize_then_sum", [1.0, 3.0])
    one = lambda a, b: f64(a - b, b - a) / 2 / (abs(a - b) / math.sqrt(2) + 1e-4)  # noqa: E731
    total = torch.cat([one(big[i], big[i + 1]) + 3 * one(small[i], small[i + 1]) for i in (0, 2, 4)])
    torch.testing.assert_close(advantages, (total - total.mean()) / (total.std() + 1e-4))
    assert advantages[0] < 0  # by their plain sum the first row would be the best of its group


def test_rows_without_a_reward_leave_the_statistics():
    nan = math.nan
    for scale in ("group", "batch", "none", "rloo"):
        # the second group lost a row: the others get what a group of three gets
        three = group_advantages(f64(1, 0, 0), 3, scale)
        close(group_advantages(f64(1, nan, 0, 0), 4, scale), three[0], 0, three[1], three[2], atol=1e-12)
    assert (group_advantages(f64(1, nan, nan, nan), 4) == 0).all()
    assert (group_advantages(f64(nan, nan), 2, "max") == 0).all()
    close(group_advantages(f64(2, nan), 2, "raw"), 2, 0)
    # a function that does not apply (NaN) counts as nothing, a row where none applies is no row of reward 0
    combined = combine_rewards(f64(1, nan, nan, nan, 2, 3).view(3, 2), [1.0, 10.0])
    assert combined[0] == 1 and combined[1].isnan() and combined[2] == 32
    assert flat_groups(f64(1, nan, nan, nan, 0, 1), 2).tolist() == [True, True, False]
    close(group_advantages(f64(1, nan, nan, nan, 0, 1).view(6, 1), 2, "normalize_then_sum")[:4], 0, 0, 0, 0)
    close(group_advantages(f64(nan, nan, 0, 5), 2, "normalize_then_sum"), 0, 0, -0.70701, 0.70701, atol=1e-4)
    metrics = reward_metrics(f64(1, nan, 0, nan).view(2, 2), ["a", "b"], 2)
    assert metrics["reward"] == 0.5 and "rewards/b/mean" not in metrics


def test_one_completion_a_prompt_has_nothing_to_compare_with():
    for scale in ("group", "batch", "none", "rloo", "normalize_then_sum"):  # it used to be NaN, or 0 for ever
        with pytest.raises(ValueError, match="1 a prompt"):
            group_advantages(torch.tensor([3.0]), 1, scale)
    assert group_advantages(torch.tensor([3.0]), 1, "raw").tolist() == [3.0]


def test_bad_groups_are_refused():
    with pytest.raises(ValueError, match="7 rewards do not fill groups of 4"):
        group_advantages(torch.zeros(7), 4)
    with pytest.raises(ValueError, match="unknown scale 'grup', did you mean 'group'"):
        group_advantages(torch.zeros(4), 4, "grup")


# ---------------------------------------------------------------------------------------------------------------------
# Weights and denominators


def test_each_loss_has_its_own_divisor():
    logp = torch.zeros(2, 4)
    mask, advantages = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]), torch.tensor([-1.0, -3.0])
    expected = {"grpo": 2.0, "dapo": 1.4, "bnpo": 1.4, "dr_grpo": 7 / 16, "gspo": 2.0, "luspo": 3.5}
    for name, value in expected.items():
        got, _, _ = loss_and_gradient(config(name), logp, None, None, advantages, mask)
        assert got.item() == pytest.approx(value, abs=1e-6), name
    with pytest.raises(ValueError, match="dr_grpo divides by max_completion_length"):
        loss_and_gradient(LossConfig("dr_grpo"), logp, None, None, advantages, mask)


def test_the_divisor_uses_the_final_mask():
    # a truncated completion was filtered out of the loss but stayed in the divisor: .3333 for 1.0
    logp, advantages = torch.zeros(2, 4), torch.tensor([-1.0, -1.0])
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]])
    assert loss_and_gradient(config("dapo"), logp, None, None, advantages, mask)[0] == 1.0
    assert loss_and_gradient(config("grpo"), logp, None, None, advantages, mask)[0] == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_tokens_is_a_differentiable_zero(name):
    logp, old, ref, advantages, mask, entropy = rollout()
    cfg = config(name, beta=0.04, entropy_coef=0.1, top_entropy_quantile=0.5, off_policy_threshold=0.1)
    nothing = torch.zeros_like(mask)
    value, gradient, metrics = loss_and_gradient(cfg, logp * math.nan, old, ref, advantages, nothing, entropy=entropy)
    assert value == 0 and (gradient == 0).all()
    assert all(math.isfinite(total) and math.isfinite(count) for total, count in metrics.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_add_up(name, parts):
    # a loss divided by the micro-batch's own tokens gives every split of a step another gradient
    logp, old, ref, advantages, mask, entropy = rollout(dtype=torch.float32)
    cfg = config(name, beta=0.04, entropy_coef=0.1, top_entropy_quantile=0.5, off_policy_threshold=0.1)
    keep, denominator = entropy_keep(cfg, entropy, mask), global_denominator(cfg, mask)
    whole, gradient, metrics = loss_and_gradient(
        cfg, logp, old, ref, advantages, mask, denominator, entropy=entropy, keep=keep
    )
    pieces = [
        loss_and_gradient(cfg, *(x[rows] for x in (logp, old, ref, advantages, mask)), denominator,
                          entropy=entropy[rows], keep=keep[rows])
        for rows in torch.arange(4).chunk(parts)
    ]  # fmt: skip
    torch.testing.assert_close(sum(value for value, _, _ in pieces), whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat([g for _, g, _ in pieces]), gradient, atol=1e-6, rtol=0)
    for metric, (total, count) in metrics.items():
        torch.testing.assert_close(sum(m[metric][0] for *_, m in pieces), total, atol=1e-5, rtol=0)
        assert sum(m[metric][1] for *_, m in pieces) == count


# ---------------------------------------------------------------------------------------------------------------------
# Variants


@pytest.mark.parametrize(
    "ratio, advantage, delta, value, slope",
    [
        (1.5, 1, None, -1.28, 0.0),
        (1.5, -1, None, 1.5, 1.5),
        (0.5, 1, None, -0.5, -0.5),
        (0.5, -1, None, 0.8, 0.0),
        (5.0, -1, None, 5.0, 5.0),
        (5.0, -1, 2.0, 2.0, 0.0),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "bnpo", "dapo", "gspo", "luspo"])
def test_the_four_quadrants_of_clipping(name, ratio, advantage, delta, value, slope):
    # clip bounds exchanged for A < 0 is the classic mistake; delta caps the unclipped side
    cfg = config(name, delta=delta)
    logp = f64(-0.7).view(1, 1)
    got, gradient, metrics = loss_and_gradient(
        cfg, logp, logp - math.log(ratio), None, f64(advantage), torch.ones(1, 1, dtype=torch.bool)
    )
    assert got.item() == pytest.approx(value) and gradient.item() == pytest.approx(slope)
    assert metrics["clip_ratio/low_mean"][0] == (ratio < 0.8 and advantage < 0)
    assert metrics["clip_ratio/high_mean"][0] == (ratio > 1.28 and advantage > 0)


def test_the_other_variants_by_hand():
    mask = torch.ones(1, 1, dtype=torch.bool)

    def at(name, ratio, advantage, **options):
        logp = f64(-0.7).view(1, 1)
        cfg = config(name, **options)
        value, slope, _ = loss_and_gradient(cfg, logp, logp - math.log(ratio), None, f64(advantage), mask)
        return [value.item(), slope.item()]

    assert at("reinforce", 2.0, 3.0) == pytest.approx([2.1, -3.0])
    assert at("unclipped", 2.0, 3.0) == pytest.approx([-6.0, -6.0])
    assert at("cispo", 2.0, 3.0, epsilon_high=5.0) == pytest.approx([2 * 3 * 0.7, -6.0])
    assert at("cispo", 7.0, -3.0, epsilon_high=5.0) == pytest.approx([-5 * 3 * 0.7, 15.0])  # the cap is 5, not 1 + 5
    s, t = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-1.05 * 0.5))
    assert at("sapo", 1.5, 1.0) == pytest.approx([-4 * s, -4 * s * (1 - s) * 1.5])
    assert at("sapo", 1.5, -1.0) == pytest.approx([4 / 1.05 * t, 4 * t * (1 - t) * 1.5])
    phi = math.exp(3 + 2 * math.log(1.5) - 3 * 1.5)  # k = 2, lambda = 3 for A >= 0
    assert at("vespo", 1.5, 1.0) == pytest.approx([phi * 0.7, -phi])
    phi = math.exp(2 + 3 * math.log(1.5) - 2 * 1.5)  # k = 3, lambda = 2 for A < 0
    assert at("vespo", 1.5, -1.0) == pytest.approx([-phi * 0.7, phi])


def test_a_sequence_ratio_is_the_geometric_mean_and_carries_its_gradient():
    logp, old, _, _, mask, _ = rollout(lengths=(4, 2))
    logp = old + 0.02 * torch.sign(logp - old)  # inside the clip
    s = (((logp - old) * mask).sum(1) / mask.sum(1)).exp()
    advantages = f64(1.5, -2.0)
    value, gradient, _ = loss_and_gradient(config("gspo"), logp, old, None, advantages, mask)
    torch.testing.assert_close(value, (-s * advantages).mean())
    torch.testing.assert_close(gradient, ((-s * advantages / mask.sum(1) / 2)[:, None] * mask))
    value, gradient, _ = loss_and_gradient(config("luspo"), logp, old, None, advantages, mask)  # times the length
    torch.testing.assert_close(gradient, ((-s * advantages / 2)[:, None] * mask))
    same = config("grpo", importance_sampling_level="sequence")
    assert loss_and_gradient(same, logp, old, None, advantages, mask)[0] == loss_and_gradient(
        config("gspo"), logp, old, None, advantages, mask
    )[0]


def test_on_policy_the_ratio_is_one_and_the_gradient_the_policy_gradient():
    # with one update a rollout the loss is about 0 and still trains: a flat loss curve is no fault
    logp, _, _, _, mask, _ = rollout(lengths=(3, 3))
    advantages = f64(1.0, -1.0)
    for name in ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "sapo", "cispo", "unclipped", "vespo", "luspo"):
        cfg = config(name, epsilon_high=5.0)
        _, expected, _ = loss_and_gradient(config("reinforce"), logp, None, None, advantages, mask)
        value, gradient, metrics = loss_and_gradient(cfg, logp, None, None, advantages, mask)
        factor = {"dr_grpo": 6 / 16, "luspo": 3}.get(name, 1)
        torch.testing.assert_close(gradient, expected * factor)
        if name not in ("cispo", "vespo", "sapo"):
            assert abs(value) < 1e-12
        assert all(total == 0 for key, (total, _) in metrics.items() if "clip" in key)


def test_old_logprobs_stay_those_of_the_rollout():
    # with old = logp.detach() in every update the ratio is 1 for ever and nothing is ever clipped
    weights = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    advantages, mask, cfg = f64(1.0, -1.0), torch.ones(2, 1), config("dapo")
    old = weights.log_softmax(-1)[:, :1].detach()
    clipped = []
    for _ in range(2):
        value, metrics = policy_loss(cfg, weights.log_softmax(-1)[:, :1], old, None, advantages, mask, 2)
        (gradient,) = torch.autograd.grad(value, weights)
        weights = (weights - 5 * gradient).detach().requires_grad_()
        clipped.append(metrics["clip_ratio/region_mean"][0].item())
    assert clipped == [0, 2] and abs((weights.log_softmax(-1)[:, :1] - old).exp() - 1).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3w"])
def test_log_ratios_of_a_thousand_stay_finite(name, kl):
    # exp(1000) is inf, and inf * 0 in the gradient NaN
    old = torch.full((2, 4), -1.0)
    far = torch.tensor([1000.0, -1000.0, 0.0, 1000.0]).expand(2, 4)
    cfg = config(name, beta=0.04, kl=kl)
    for sign in (1, -1):
        for ref in (old, old - sign * far, old + 2 * sign * far):
            value, gradient, metrics = loss_and_gradient(
                cfg, old + sign * far, old, ref, torch.tensor([1.0, -1.0]), torch.ones(2, 4)
            )
            assert value.isfinite() and gradient.isfinite().all()
            assert all(total.isfinite() for total, _ in metrics.values())


def test_a_bounded_exponential_still_pulls_back():
    x = f64(-1000.0, -3.0, 19.9, 20.1, 1000.0).requires_grad_()
    y = bounded_exp(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y[:3], x[:3].exp())
    torch.testing.assert_close(slope[:3], x[:3].exp())
    assert y[3] < y[4] < 1e12 and slope[3] == slope[4] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("name", NAMES)
def test_masked_places_may_hold_anything(name):
    logp, old, ref, advantages, mask, entropy = rollout()
    cfg = config(name, beta=0.04, entropy_coef=0.1, top_entropy_quantile=0.5, off_policy_threshold=0.1)
    correction = None if name == "vespo" else torch.rand(mask.shape, dtype=torch.float64)
    clean = loss_and_gradient(cfg, logp, old, ref, advantages, mask, entropy=entropy, correction=correction)
    for junk in (math.nan, math.inf, -math.inf):
        dirty = [torch.where(mask, x, junk) for x in (logp, old, ref, entropy)]
        dirt = None if correction is None else torch.where(mask, correction, junk)
        value, gradient, metrics = loss_and_gradient(
            cfg, *dirty[:3], advantages, mask, entropy=dirty[3], correction=dirt
        )
        assert value == clean[0] and torch.equal(gradient, clean[1]) and metrics == clean[2]
    assert (clean[1][~mask] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# KL


@pytest.mark.parametrize(
    "kl, ref_above, ref_below", [("k1", 1, 1), ("k2", -0.5, 0.5), ("k3", -0.648721, 0.393469)]
)
def test_kl_is_differentiated_in_the_policy_alone(kl, ref_above, ref_below):
    for d, slope in ((0.5, ref_above), (-0.5, ref_below)):
        ref = f64(-1.0 + d).view(1, 1).requires_grad_()
        logp = f64(-1.0).view(1, 1).requires_grad_()
        cfg = config("dapo", beta=1.0, kl=kl)
        value, _ = policy_loss(cfg, logp, None, ref, f64(0), torch.ones(1, 1), 1)
        value.backward()
        assert logp.grad.item() == pytest.approx(slope, abs=1e-6) and ref.grad is None


def test_expected_gradients_of_the_kl_estimators():
    # averaged over all three tokens the policy could have drawn: what the estimators do to a policy in training
    ref = f64(0.2, 0.5, 0.3).log()

    def expected(kl):
        logits = f64(1.0, 0.0, -1.0).requires_grad_()
        log_p = logits.log_softmax(-1)
        cfg = config("dapo", beta=1.0, kl=kl)
        value, metrics = policy_loss(cfg, log_p[:, None], None, ref[:, None], f64(0, 0, 0), torch.ones(3, 1), 1)
        # token i stands for a draw of probability p_i, so weigh its row's gradient by p_i
        p = log_p.detach().exp()
        (slope,) = torch.autograd.grad(value, log_p, retain_graph=True)
        return torch.autograd.grad(log_p, logits, slope * p)[0]

    logits = f64(1.0, 0.0, -1.0).requires_grad_()
    log_p = logits.log_softmax(-1)
    (reverse,) = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - log_p)).sum(), logits)
    assert (reverse - forward).abs().max() > 0.05
    torch.testing.assert_close(expected("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected("k2"), reverse)
    torch.testing.assert_close(expected("k3w"), reverse)
    torch.testing.assert_close(expected("k3"), forward)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_beta_there_is_no_reference(level):
    logp, old, ref, advantages, mask, _ = rollout()
    cfg = config("grpo", importance_sampling_level=level)
    value, gradient, metrics = loss_and_gradient(cfg, logp, old, None, advantages, mask)
    assert "kl" not in metrics
    with pytest.raises(ValueError, match="beta is 0.04, so the loss needs ref_logp"):
        loss_and_gradient(config("grpo", beta=0.04), logp, old, None, advantages, mask)
    _, _, metrics = loss_and_gradient(config("grpo", beta=0.04, kl="k1"), logp, old, ref, advantages, mask)
    torch.testing.assert_close(metrics["kl"][0], (logp - ref)[mask].sum())
    assert metrics["kl"][1] == mask.sum()


def test_kl_in_the_reward():
    old, ref, mask = f64(-1, -2, math.nan).view(1, 3), f64(-1.5, -1, -1).view(1, 3), torch.tensor([[1, 1, 0]])
    close(kl_penalty(old, ref, mask), 0.5 - 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Masks, corrections, metrics


def test_entropy_keeps_the_top_share_of_all_tokens():
    entropy = torch.arange(11.0).view(1, 11)
    mask = torch.ones(1, 11, dtype=torch.bool)
    for top in (1.0, 0.9, 0.7, 0.5, 0.25, 0.1, 0.0):
        keep = entropy_keep(config("dapo", top_entropy_quantile=top), entropy, mask)
        assert torch.equal(keep, entropy >= torch.quantile(entropy, 1 - top))
    assert keep.sum() == 1
    # 1 - 0.7 is 0.30000000000000004, which dropped every token of entropy 0
    certain = torch.tensor([[0.0] * 4 + [1.0] * 7])
    assert entropy_keep(config("dapo", top_entropy_quantile=0.7), certain, mask).all()
    cfg = config("dapo", top_entropy_quantile=0.25)
    threshold = 0.75 * 9  # interpolated between 6 and 7
    keep = entropy_keep(cfg, entropy, mask & (entropy < 10))
    assert torch.equal(keep, mask & (entropy >= threshold) & (entropy < 10))
    # the other ranks' entropies move the threshold
    assert entropy_keep(cfg, entropy, mask, gathered=torch.full((100,), 20.0)).sum() == 0
    assert entropy_keep(cfg, entropy, torch.zeros_like(mask)).sum() == 0


def test_without_keep_the_loss_keeps_its_own_batchs_top_tokens():
    logp, old, ref, advantages, mask, entropy = rollout()
    cfg = config("dapo", top_entropy_quantile=0.3, beta=0.04)
    keep = entropy_keep(cfg, entropy, mask)
    own = loss_and_gradient(cfg, logp, old, ref, advantages, mask, entropy=entropy)
    given = loss_and_gradient(cfg, logp, old, ref, advantages, mask, keep=keep)
    assert own[0] == given[0] and torch.equal(own[1], given[1])
    # a dropped token keeps its KL, and its place in the denominator
    _, kl_alone, _ = loss_and_gradient(config("dapo", beta=0.04), logp, old, ref, advantages * 0, mask)
    torch.testing.assert_close(own[1][mask & ~keep], kl_alone[mask & ~keep])
    with pytest.raises(ValueError, match="needs entropy or keep"):
        loss_and_gradient(cfg, logp, old, ref, advantages, mask)


def test_the_entropy_bonus_takes_the_variants_weights():
    logp, old, _, advantages, mask, entropy = rollout()
    for name in ("grpo", "dapo", "dr_grpo", "luspo"):
        entropy = entropy.clone().requires_grad_()
        cfg = config(name, entropy_coef=0.1)
        value, metrics = policy_loss(cfg, logp, old, None, advantages, mask, global_denominator(cfg, mask), entropy)
        (slope,) = torch.autograd.grad(value, entropy)
        torch.testing.assert_close(slope, -0.1 * token_weights(cfg, mask.double(), global_denominator(cfg, mask)))
        torch.testing.assert_close(metrics["entropy"][0], entropy[mask].sum())
    with pytest.raises(ValueError, match="needs entropy"):
        loss_and_gradient(cfg, logp, old, None, advantages, mask)


def test_off_policy_rows_are_dropped_only_where_the_advantage_is_negative():
    mask = torch.tensor([[1, 1, 0]] * 4).bool()
    logp = torch.zeros(4, 3, dtype=torch.float64)
    sampler = torch.tensor([[0.2, 0.4, 9.0]] * 3 + [[0.1, 0.2, 9.0]], dtype=torch.float64)  # means .3 and .15
    advantages = f64(-1, 1, 0, -1)
    cfg = config("dapo", off_policy_threshold=0.2)
    for given in ({"old": sampler}, {"old": logp, "sampler_logp": sampler}):
        old = given.pop("old")
        _, gradient, _ = loss_and_gradient(cfg, logp, old, None, advantages, mask, **given)
        assert [bool(row.any()) for row in gradient] == [False, True, False, True]
    assert is_pointwise(config("dapo")) and not is_pointwise(cfg)


def test_sampler_correction():
    old, sampler = f64(-1, -1, -1, -1).view(1, 4), f64(-1.5, -3, -0.5, math.nan).view(1, 4)
    mask = torch.tensor([[1, 1, 1, 1]])
    w = [math.exp(0.5), math.exp(2), math.exp(-0.5), 1.0]
    close(sampler_correction(old, sampler, mask, "token_truncate", 3.0)[0], w[0], 3.0, w[2], 1.0, atol=1e-12)
    close(sampler_correction(old, sampler, mask, "token_mask", 3.0)[0], w[0], 0.0, w[2], 1.0, atol=1e-12)
    close(sampler_correction(old, sampler, mask, "sequence_truncate", 3.0)[0], 3, 3, 3, 3, atol=1e-12)
    close(sampler_correction(old, sampler, mask, "sequence_mask", 3.0)[0], 0, 0, 0, 0, atol=1e-12)
    mask = torch.tensor([[1, 0, 1, 1]])  # a masked token leaves the product, and is 1
    close(sampler_correction(old, sampler, mask, "token_mask", 3.0)[0], w[0], 1.0, w[2], 1.0, atol=1e-12)
    close(sampler_correction(old, sampler, mask, "sequence_truncate", 3.0)[0], 1, 1, 1, 1, atol=1e-12)
    with pytest.raises(ValueError, match="unknown sampler correction 'mask'.*token_mask"):
        sampler_correction(old, sampler, mask, "mask")


def test_the_correction_scales_the_policy_term_alone():
    logp, old, ref, advantages, mask, _ = rollout()
    correction = torch.rand(mask.shape, dtype=torch.float64)
    for name in ("grpo", "gspo", "cispo"):
        cfg = config(name, beta=0.04)
        _, kl_alone, _ = loss_and_gradient(cfg, logp, old, ref, advantages * 0, mask)
        _, plain, _ = loss_and_gradient(cfg, logp, old, ref, advantages, mask)
        _, corrected, _ = loss_and_gradient(cfg, logp, old, ref, advantages, mask, correction=correction)
        if name != "gspo":  # where each token has a term of its own
            torch.testing.assert_close(corrected - kl_alone, (plain - kl_alone) * correction)
        assert not torch.allclose(corrected, plain)
    with pytest.raises(ValueError, match="vespo .* takes no sampler correction"):
        loss_and_gradient(config("vespo"), logp, old, ref, advantages, mask, correction=correction)


def test_metrics_count_tokens_or_rows():
    logp, old, _, advantages, mask, _ = rollout()
    w = (logp - old).exp()
    low = (w < 0.8) & (advantages[:, None] < 0) & mask
    high = (w > 1.28) & (advantages[:, None] > 0) & mask
    assert low.any() and high.any()
    _, _, metrics = loss_and_gradient(config("dapo"), logp, old, None, advantages, mask)
    assert metrics["clip_ratio/low_mean"] == (low.sum(), mask.sum())
    assert metrics["clip_ratio/high_mean"] == (high.sum(), mask.sum())
    assert metrics["clip_ratio/region_mean"] == (low.sum() + high.sum(), mask.sum())
    far = logp - 0.5 * advantages.sign()[:, None]  # every row is clipped, two on either side
    _, _, metrics = loss_and_gradient(config("gspo"), logp, far, None, advantages, mask)
    assert metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == (2, 4)
    assert metrics["clip_ratio/region_mean"] == (4, 4)
    _, _, metrics = loss_and_gradient(config("cispo"), logp, old, None, advantages, mask)
    assert metrics["cispo_clip_ratio"] == (((w > 0.28) & (advantages[:, None] > 0) & mask).sum(), mask.sum())


# ---------------------------------------------------------------------------------------------------------------------
# Through the head


def test_the_head_at_a_temperature():
    # log-probs at 1 while the sampler drew at .7 make the first ratio of a rollout something else than 1
    from chunked_kernel import chunked_logprobs

    weight = torch.tensor([[2.0], [1.0], [0.0]])
    logp, _ = chunked_logprobs(torch.ones(3, 1), weight, torch.arange(3), 0.7)
    close(logp, -0.260118, -1.688690, -3.117261, atol=1e-5)


@pytest.mark.parametrize(
    "name, value, dx, dw",
    [
        ("grpo", -0.85159197, 0.38955732, 0.85106232),
        ("dapo", -0.71751047, 0.39976989, 0.36918218),
        ("dr_grpo", -0.20927389, 0.11659955, 0.10767814),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_known_losses_and_gradients_through_a_head(name, value, dx, dw, dtype):
    # numbers of an independent implementation, which agree with Liger 0.8.5
    x = torch.arange(1, 49, dtype=dtype).sin().view(3, 4, 4).requires_grad_()
    w = torch.arange(1, 29, dtype=dtype).cos().view(7, 4).requires_grad_()
    ids = (3 * torch.arange(12) % 7).view(3, 4, 1)
    logp = (x @ w.T + 0.1 * torch.arange(7, dtype=dtype)).log_softmax(-1).gather(-1, ids).squeeze(-1)
    close(logp[0].detach(), -2.938128, -4.975189, -1.597812, -4.170201, atol=1e-5)
    k = torch.arange(12, dtype=dtype).view(3, 4)
    old, ref = (logp + 0.3 * k.cos()).detach(), (logp + 0.2 * k.sin()).detach()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    advantages = torch.tensor([1, -0.5, 2], dtype=dtype)
    cfg = config(name, beta=0.04, kl="k3")
    got, _ = policy_loss(cfg, logp, old, ref, advantages, mask, global_denominator(cfg, mask))
    assert got.item() == pytest.approx(value, abs=1e-6)
    for times in (1, 3):  # the gradient is linear in the incoming one
        gradients = torch.autograd.grad(times * got, [x, w], retain_graph=True)
        assert [g.norm().item() for g in gradients] == pytest.approx([times * dx, times * dw], abs=2e-6)


@pytest.mark.parametrize("name", POINTWISE)
def test_token_loss_is_policy_loss_chunk_by_chunk(name):
    logp, old, ref, advantages, mask, entropy = rollout()
    cfg = config(name, beta=0.04, entropy_coef=0.1, top_entropy_quantile=0.5, delta=1.2)
    denominator, keep = global_denominator(cfg, mask), entropy_keep(cfg, entropy, mask)
    correction = torch.rand(mask.shape, dtype=torch.float64)
    for kept_old in (old, None):
        leaves = [logp.clone().requires_grad_(), entropy.clone().requires_grad_()]
        whole, metrics = policy_loss(
            cfg, leaves[0], kept_old, ref, advantages, mask, denominator, leaves[1], keep, correction
        )
        expected = torch.autograd.grad(whole, leaves)
        flat = [x if x is None else x[mask] for x in (kept_old, ref, advantages[:, None].expand_as(mask))]
        weights = token_weights(cfg, mask.double(), denominator)[mask]
        chunk_loss = token_loss(cfg, *flat, weights, keep[mask], correction[mask])
        for size in (1, 3, 100):
            leaves = [logp[mask].requires_grad_(), entropy[mask].requires_grad_()]
            spans = [slice(a, a + size) for a in range(0, 13, size)]
            value = sum(chunk_loss(leaves[0][rows], leaves[1][rows], rows) for rows in spans)
            torch.testing.assert_close(value, whole)
            torch.testing.assert_close(torch.autograd.grad(value, leaves), tuple(g[mask] for g in expected))
        flat_old = logp[mask] if flat[0] is None else flat[0]
        again = loss.policy_metrics(
            cfg, logp[mask], flat_old, flat[1], flat[2], torch.ones(13), entropy[mask]
        )  # train.py's, of the flat log-probs the head gives back
        assert {k: (pytest.approx(a.item()), b.item()) for k, (a, b) in metrics.items()} == {
            k: (a.item(), b.item()) for k, (a, b) in again.items()
        }


def test_whole_rows_do_not_go_through_chunks():
    flat = torch.zeros(3)
    for name in ("gspo", "luspo", "vespo"):
        assert not is_pointwise(config(name))
    for options in ({"importance_sampling_level": "sequence"}, {"off_policy_threshold": 0.1}):
        with pytest.raises(ValueError, match="needs whole rows"):
            token_loss(config("grpo", **options), flat, None, flat, flat)
    with pytest.raises(ValueError, match="chunks need keep"):
        token_loss(config("grpo", top_entropy_quantile=0.2), flat, None, flat, flat)


# ---------------------------------------------------------------------------------------------------------------------
# Names, shapes, a user's own file, --check


def test_bad_names_and_shapes_are_one_clear_line():
    for options, message in [
        ({"loss_type": "dappo"}, "unknown loss 'dappo', did you mean 'dapo'.*grpo"),
        ({"kl": "k4"}, "unknown kl 'k4'.*k3w"),
        ({"importance_sampling_level": "seq"}, "unknown importance_sampling_level 'seq'.*sequence"),
        ({"top_entropy_quantile": 20}, "top_entropy_quantile 20 is not between 0 and 1"),
        ({"loss_type": "nowhere.py:mine"}, "there is no file 'nowhere.py'"),
    ]:
        with pytest.raises(ValueError, match=message):
            LossConfig(**options)
    with pytest.raises(ValueError, match="unknown aggregate"):
        loss.register("mine", aggregate="token")
    with pytest.raises(ValueError, match="'grpo' is built in"):
        loss.register("grpo", aggregate="tokens")(lambda logp, old_logp, advantages, mask, cfg: -logp)
    assert LossConfig(epsilon=0.1).epsilon_high == 0.1
    # (B,) against (B, T) with B == T broadcasts to nonsense without a sound
    square = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"needs a mask of that shape and advantages \(3,\)"):
        policy_loss(LossConfig(), square, None, None, torch.zeros(3, 1), square, 1)


MINE = """
from loss import importance_ratio, register

@register("right", aggregate="tokens", pointwise=True)
def right(logp, old_logp, advantages, mask, cfg):
    return -(logp - old_logp).exp() * advantages

@register("my_gspo", aggregate="sequences", pointwise=True)  # wrong: it needs whole rows
def mine_too(logp, old_logp, advantages, mask, cfg):
    d = ((logp - old_logp) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return -(logp - logp.detach() + d.detach()).exp() * advantages

@register("rows", aggregate="tokens")
def rows(logp, old_logp, advantages, mask, cfg):
    return -importance_ratio(logp, old_logp, mask, cfg) * (advantages - advantages.mean())

@register("lengths", aggregate="tokens")
def lengths(logp, old_logp, advantages, mask, cfg):
    return -logp.mean(-1, keepdim=True) * advantages

@register("data", aggregate="tokens")
def data(logp, old_logp, advantages, mask, cfg):
    return -logp.data * logp * advantages

@register("empty", aggregate="tokens")
def empty(logp, old_logp, advantages, mask, cfg):
    return -(logp * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True) * advantages

@register("flat", aggregate="tokens")
def flat(logp, old_logp, advantages, mask, cfg):
    return -(logp * mask).sum(-1) * advantages[:, 0]
"""


@pytest.fixture
def my_loss(tmp_path, monkeypatch):
    (tmp_path / "my_loss.py").write_text(MINE)
    yield str(tmp_path / "my_loss.py")
    for name in set(LOSSES) - set(NAMES):
        del LOSSES[name]


def test_a_users_loss_is_used_by_file_and_name(my_loss):
    logp, old, _, advantages, mask, _ = rollout()
    mine, theirs = LossConfig(f"{my_loss}:right"), LossConfig("unclipped")
    assert is_pointwise(mine) and LOSSES[f"{my_loss}:right"].aggregate == "tokens"
    assert loss_and_gradient(mine, logp, old, None, advantages, mask)[0] == loss_and_gradient(
        theirs, logp, old, None, advantages, mask
    )[0]
    assert LossConfig(f"{my_loss}:mine_too") and LossConfig(f"{my_loss}:my_gspo")  # by either name
    with pytest.raises(ValueError, match="registers no loss 'wrong', only: .*right"):
        LossConfig(f"{my_loss}:wrong")
    with pytest.raises(ValueError, match=r"made \(4,\) terms of \(4, 5\) log-probs"):
        loss_and_gradient(LossConfig(f"{my_loss}:flat"), logp, old, None, advantages, mask)


@pytest.mark.parametrize(
    "name, columns",
    [
        ("right", ""), ("my_gspo", "chunks"), ("rows", "empty split"), ("lengths", "padding"), ("data", "gradient"),
        ("empty", "empty"), ("flat", "gradient masked empty padding split logprobs"),
    ],
)  # fmt: skip
def test_check_finds_what_is_wrong_with_a_loss(my_loss, name, columns):
    import check_loss

    cells, failures = check_loss.check(f"{my_loss}:{name}", [c for c in check_loss.CHECKS if c != "TRL"])
    assert [f.split(": ")[1] for f in failures] == columns.split()


@pytest.mark.parametrize("name", NAMES)
def test_check_passes_every_variant(name):
    import check_loss

    cells, failures = check_loss.check(name, [c for c in check_loss.CHECKS if c != "TRL"])
    assert not failures and all(cell != "-" for cell in cells[:-1]) and (cells[-1] != "-") == LOSSES[name].pointwise


def test_check_on_the_command_line(my_loss):
    # a GSPO declared pointwise would be silently wrong, evaluated on chunks: the tool says so, and exits with 1
    def check(name):
        command = [sys.executable, "loss.py", "--check", name]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    wrong = check(f"{my_loss}:my_gspo")
    assert wrong.returncode == 1 and "FAILED" in wrong.stdout and "chunks" in wrong.stdout.splitlines()[-1]
    unknown = check("grop")
    assert unknown.returncode == 1 and unknown.stderr.count("\n") == 1 and "did you mean 'grpo'" in unknown.stderr


def test_check_says_when_trl_is_not_there(monkeypatch, capsys):
    import check_loss

    def nothing(name):
        raise check_loss.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(check_loss.importlib.metadata, "version", nothing)
    monkeypatch.setattr(sys, "argv", ["loss.py", "--check", "grpo"])
    with pytest.raises(SystemExit) as stop:
        check_loss.main()
    assert stop.value.code == 0 and "skipped: trl not installed" in capsys.readouterr().out
