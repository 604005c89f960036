"""Live against TRL 1.16: value, gradient and metrics of every loss it has, one micro-batch, fp32."""

import pytest
import torch

pytest.importorskip("trl", minversion="1.16", reason="compares with trl; pip install -r requirements-oracles.txt")

from check_loss import trl_loss  # noqa: E402
from loss import LossConfig, global_denominator, policy_loss, sampler_correction  # noqa: E402

NAMES = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo")
OPTIONS = {
    "plain": {},
    "epsilons": {"epsilon": 0.1, "epsilon_high": 0.4},
    "delta": {"delta": 1.5},
    "k3w": {"beta": 0.04},
    "k3": {"beta": 0.04, "kl": "k3"},
    "entropy": {"beta": 0.04, "top_entropy_quantile": 0.3},
    "off_policy": {"beta": 0.04, "off_policy_threshold": 0.02},
}


def rollout(seed):
    draw = torch.Generator().manual_seed(seed)
    logp = -2 * torch.rand(6, 7, generator=draw) - 0.1
    old, ref, sampler = (logp + scale * torch.randn(6, 7, generator=draw) for scale in (0.4, 0.4, 0.1))
    entropy = torch.rand(6, 7, generator=draw)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5, 0.0, -1.0])
    mask = torch.arange(7) < torch.tensor([7, 1, 3, 4, 5, 6])[:, None]
    return logp, old, ref, sampler, advantages, mask, entropy


def compare(cfg, logp, old, ref, advantages, mask, entropy, **rest):
    results = []
    for loss in (policy_loss, trl_loss):
        leaves = [logp.clone().requires_grad_(), entropy.clone().requires_grad_()]
        if loss is policy_loss:
            denominator = global_denominator(cfg, mask)
            value, metrics = loss(cfg, leaves[0], old, ref, advantages, mask, denominator, leaves[1], **rest)
            metrics = {name: (total / count).item() for name, (total, count) in metrics.items()}
        else:
            value, metrics = loss(cfg, leaves[0], old, ref, advantages, mask, leaves[1], **rest)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        results.append((value, gradients, metrics))
    (ours, our_gradients, our_metrics), (theirs, their_gradients, their_metrics) = results
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for a, b in zip(our_gradients, their_gradients):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for name, value in our_metrics.items():
        assert value == pytest.approx(their_metrics[name], abs=1e-5), name
    # what it logs besides are extremes over rows, which do not add up over micro-batches, and its entropy controller's
    assert set(their_metrics) - set(our_metrics) <= {
        "clip_ratio/low_min", "clip_ratio/high_max", "policy_loss", "entropy_coef"
    }  # fmt: skip
    assert our_gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", NAMES)
def test_value_gradient_and_metrics_are_trls(name, level, options):
    options = {"epsilon_high": 0.28} | options
    cfg = LossConfig(name, importance_sampling_level=level, max_completion_length=9, **options)
    logp, old, ref, _, advantages, mask, entropy = rollout(0)
    compare(cfg, logp, old, ref, advantages, mask, entropy)
    compare(cfg, logp, None, ref, advantages, mask, entropy)  # one update a rollout


@pytest.mark.parametrize("name", NAMES)
def test_levels_default_to_the_papers(name):
    cfg = LossConfig(name, epsilon_high=0.28, max_completion_length=9, beta=0.04)
    logp, old, ref, _, advantages, mask, entropy = rollout(1)
    compare(cfg, logp, old, ref, advantages, mask, entropy)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("name", NAMES[:-1])  # vespo refuses it here; in TRL it enters phi
def test_a_sampler_correction_enters_as_in_trl(name, mode):
    logp, old, ref, sampler, advantages, mask, entropy = rollout(2)
    correction = sampler_correction(old, sampler, mask, mode, cap=1.1)
    assert not correction.eq(1).all()
    for threshold in (None, 0.02):
        cfg = LossConfig(name, epsilon_high=0.28, max_completion_length=9, beta=0.04, off_policy_threshold=threshold)
        compare(cfg, logp, old, ref, advantages, mask, entropy, correction=correction, sampler_logp=sampler)


@pytest.mark.parametrize("name", ["dapo", "bnpo", "cispo", "vespo"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_where_weights_are_one_over_n_the_entropy_bonus_is_trls_too(name, beta):
    logp, old, ref, _, advantages, mask, entropy = rollout(3)
    cfg = LossConfig(name, epsilon_high=0.28, beta=beta, entropy_coef=0.1)
    compare(cfg, logp, old, ref, advantages, mask, entropy)
