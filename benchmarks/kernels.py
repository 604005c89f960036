"""The head's row passes, Triton's and torch's, against float64: values, and gradients of everything that has one."""

import contextlib

import torch

import chunked_kernel
from benchmarks.guarded import attempt

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # what matters most comes first
# Largest error that rounding explains: of log-probs and entropies in nats; of gradients, ||error|| / ||gradient||.
LIMITS = {"bfloat16": {"nats": 1e-3, "gradient": 1e-2}, "float32": {"nats": 1e-4, "gradient": 1e-4}}


def row_passes(device):
    """Which of chunked_kernel.py's two implementations of a row pass run there; what it chooses itself comes first."""
    return ["triton", "torch"] if chunked_kernel._use_triton(torch.empty(1, device=device)) else ["torch"]


@contextlib.contextmanager
def row_pass(name):
    before = chunked_kernel._use_triton
    if name == "torch":
        chunked_kernel._use_triton = lambda z: False
    try:
        yield
    finally:
        chunked_kernel._use_triton = before


def kernels(size):
    """Log-probs, entropies and gradients of both row passes against float64: the worse of the two doors, with and
    without a gradient that reaches the entropy (a kernel each)."""
    for dtype_name, dtype in DTYPES.items():
        for frozen in (False, True):
            for name in row_passes(size.device):
                labels = {"dtype": dtype_name, "weight": "frozen" if frozen else "trained", "row passes": name}
                yield labels | attempt(lambda: head_errors(size, dtype, frozen, name, LIMITS[dtype_name]))


def head_errors(size, dtype, frozen, name, limits):
    V, D, N, tau = size.model["vocab_size"], size.model["hidden_size"], size.exact_tokens, 0.7
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": size.device}
    hidden, weight = torch.randn(N, D, **options), torch.randn(V, D, **options) / D**0.5
    targets = torch.randint(V, (N,), device=size.device)
    g, k = torch.randn(2, N, device=size.device)

    def plain(hidden, weight, loss):
        p = (hidden @ weight.T / tau).log_softmax(-1)
        logp, entropy = p.gather(1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1)
        return loss(logp, entropy, slice(None)), logp, entropy

    def by_logprobs(hidden, weight, loss):
        logp, entropy = chunked_kernel.chunked_logprobs(hidden, weight, targets, tau, chunk=N // 3)
        return loss(logp, entropy, slice(None)), logp, entropy

    def by_loss(hidden, weight, loss):
        return chunked_kernel.chunked_loss(hidden, weight, targets, loss, tau, chunk=N // 3)

    def outcome(head, dtype, loss):
        leaves = [hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_(not frozen)]
        value, logp, entropy = head(*leaves, loss)
        value.backward()
        return [logp.detach(), entropy.detach(), *(x.grad for x in leaves if x.requires_grad)]

    errors = {"log-prob, nats": [], "entropy, nats": [], "dH": []} | ({} if frozen else {"dW": []})
    losses = (lambda logp, entropy, rows: (g[rows] * logp).sum(),
              lambda logp, entropy, rows: (g[rows] * logp + k[rows] * entropy).sum())  # fmt: skip
    for loss in losses:
        exact = outcome(plain, torch.float64, loss)
        for door in (by_logprobs, by_loss):
            with row_pass(name):
                found = outcome(door, dtype, loss)
            for what, a, b in zip(errors, found, exact):
                difference = a.double() - b
                errors[what].append(difference.abs().max() if "nats" in what else difference.norm() / b.norm())
    worst = {what: torch.stack(values).max().item() for what, values in errors.items()}  # NaN stays NaN
    off = [what for what, error in worst.items() if not error < limits["nats" if "nats" in what else "gradient"]]
    return worst | ({"failed": "beyond rounding: " + ", ".join(off)} if off else {})
