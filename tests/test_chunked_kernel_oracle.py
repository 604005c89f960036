"""The chunked head beside TRL's and Liger's own, where they are installed."""

import pytest
import torch

from chunked_kernel import chunked_logprobs, chunked_loss

B, T, D, V = 3, 4, 8, 50


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(B, T, D, generator=generator), torch.randn(V, D, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(V, (B, T), generator=generator)


def test_trls_chunked_head():
    kernels = pytest.importorskip("trl.kernels", reason="trl is not installed")
    hidden, weight, targets = inputs()

    def loss(logp, entropy):
        return (logp.exp() + entropy * logp).sum()

    logp, entropy, *_ = kernels.ChunkedLogProbFunction.apply(
        hidden.view(-1, D), weight, None, targets.view(-1), 0.7, 16, None, 1.0, ("entropy",)
    )
    theirs = torch.autograd.grad(loss(logp, entropy), (hidden, weight))
    ours_logp, ours_entropy = chunked_logprobs(hidden, weight, targets, 0.7, chunk=5)
    torch.testing.assert_close(ours_logp.view(-1), logp)
    torch.testing.assert_close(ours_entropy.view(-1), entropy)
    for a, b in zip(torch.autograd.grad(loss(ours_logp, ours_entropy), (hidden, weight)), theirs):
        assert (a - b).abs().max() < 1e-4 * b.abs().max()  # TRL subtracts an fp32 mean logit from an fp32 log-sum-exp


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_ligers_chunked_grpo_loss(loss_type):
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="liger_kernel is not installed")
    hidden, weight, targets = inputs()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    old = chunked_logprobs(hidden, weight, targets, 0.7)[0].detach() + 0.3 * torch.arange(B * T).view(B, T).cos()
    head = liger.LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, epsilon_high=0.28, loss_type=loss_type, temperature=0.7
    )
    theirs, _ = head(hidden, weight, targets, mask.float(), advantages, old_per_token_logps=old)
    weights = mask / mask.sum(1, keepdim=True) / B if loss_type == "grpo" else mask / mask.sum()

    def token_loss(logp, entropy, rows):
        ratio, A = (logp - old[mask][rows]).exp(), advantages[:, None].expand(B, T)[mask][rows]
        return (-torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A) * weights[mask][rows]).sum()

    ours, _, _ = chunked_loss(hidden[mask], weight, targets[mask], token_loss, 0.7, chunk=2)
    torch.testing.assert_close(ours, theirs.squeeze())
    for a, b in zip(torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs.sum(), (hidden, weight))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
