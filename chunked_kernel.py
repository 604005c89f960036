"""
The head: hidden states -> log-probs, entropy and their gradients, without ever holding all logits.

A language model's head turns N hidden states (N, D) into logits (N, V), and V is huge: 0.6 MB a token for
Qwen3-0.6B in fp32, four times that with softmax and gradients. Here C tokens at a time pass through one (C, V)
buffer, in which their logits become their gradient; only (N,) numbers and the gradients themselves are kept:

    z     = h W^T / tau                                      a matrix product                          (C, V)
    l     = z_y - lse,   lse = log sum_v exp(z_v)            the log-prob of the token y that was drawn   (C,)
    H     = lse - sum_v p_v z_v,   p = exp(z - lse)          the entropy                                  (C,)
    dL/dz = g (onehot_y - p) - k p (log p + H)               g = dL/dl, k = dL/dH; written over z      (C, V)
    dL/dh = (dL/dz) W / tau,   dL/dW += (dL/dz)^T h / tau    two products, dW summed in one fp32 buffer

Two doors, the same numbers:
  `chunked_logprobs`  l and H as ordinary differentiable tensors, for any loss. The backward pass recomputes z: four
                      products. With a frozen W it keeps the unit gradient (onehot - p) W / tau instead: two.
  `chunked_loss`      the loss is given as a function of a chunk's l and H, so the gradient is formed while z is still
                      there: three products. Only for losses that are sums over tokens.

The ideas: Liger Kernel (Hsu et al. 2024, arXiv:2410.10989), gradients in the forward pass; Cut Cross-Entropy (Wijmans
et al. 2024, arXiv:2411.09009); online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867).
What is NOT here: what the loss is (loss.py), which tokens count (train.py hands in only those).

    python bench.py head --quick        # time and peak memory beside the plain head, TRL's and Liger's

Legend: N unmasked completion tokens, C tokens of a chunk, V vocabulary, D width, tau temperature.
"""

import os

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # macOS, Windows: the torch row passes serve on every device
    HAS_TRITON = False

CHUNK_BYTES = 256 << 20  # default size of the logits buffer


def chunk_tokens(vocab, chunk_bytes=CHUNK_BYTES):
    """Tokens C whose fp32 logits (C, vocab) fit into `chunk_bytes`, at least one. Results do not depend on it."""
    return max(1, chunk_bytes // (4 * vocab))


# ---------------------------------------------------------------------------------------------------------------------
# The two doors


def chunked_logprobs(hidden, weight, targets, temperature=1.0, *, chunk=None):
    """Log-prob of each target and entropy of its distribution, both differentiable in hidden and weight.

    hidden (..., D), weight (V, D), targets (...) int64 -> logp (...), entropy (...), in fp32 (float64 for float64
    inputs). chunk: tokens at a time, None: as many as fit into CHUNK_BYTES. Gradients have their tensor's dtype.
    With a frozen weight a gradient that reaches `entropy` makes the backward pass recompute the logits.
    """
    chunk = _check(hidden, weight, targets, temperature, chunk)
    keep_unit = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
    logp, entropy = _LogProbs.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1), temperature, chunk, keep_unit
    )
    return logp.view(targets.shape), entropy.view(targets.shape)


def chunked_loss(hidden, weight, targets, token_loss, temperature=1.0, *, chunk=None):
    """The sum of `token_loss` over chunks of tokens, its gradient already formed when it returns.

    hidden (N, D), weight (V, D), targets (N,) int64, chunk as in `chunked_logprobs`.
    token_loss(logp, entropy, rows) -> scalar: the summed, already weighted loss of the tokens rows = slice(a, b), from
    their logp (C,) and entropy (C,), which it may differentiate through. It must be a sum over tokens: a loss that
    compares tokens of different chunks (a sequence's mean ratio) would silently depend on the chunk size.
    Returns (loss, logp (N,), entropy (N,)): loss differentiable in hidden and weight, the others detached.
    """
    chunk = _check(hidden, weight, targets, temperature, chunk)
    if hidden.dim() != 2:
        raise ValueError(f"chunked_loss takes hidden (N, D) and targets (N,), got hidden {tuple(hidden.shape)}")
    grads = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)

    head = _Head(hidden.detach(), weight.detach(), targets, temperature, chunk)
    dH = torch.empty_like(head.hidden) if grads and hidden.requires_grad else None
    dW = head.new_weight_gradient() if grads and weight.requires_grad else None
    logp, entropy = (torch.empty(len(targets), dtype=head.dtype, device=hidden.device) for _ in range(2))
    loss = torch.zeros((), dtype=head.dtype, device=hidden.device)

    for rows in head.chunks:
        logp[rows], entropy[rows], lse = head.statistics(rows)
        with torch.set_grad_enabled(grads):
            leaves = [x[rows].detach().requires_grad_(grads) for x in (logp, entropy)]
            part = token_loss(*leaves, rows)
        loss = loss + part.detach()
        if grads:
            g, k = torch.autograd.grad(part, leaves, allow_unused=True)
            dh = head.gradient(rows, lse, entropy[rows], g, k, dH is not None, dW)
            if dH is not None:
                dH[rows] = dh
    if grads:
        dW = dW if dW is None else dW.to(weight.dtype)
        loss = _HandOver.apply(hidden, weight, loss, dH, dW)
    return loss, logp, entropy


def _check(hidden, weight, targets, temperature, chunk):
    """One clear line for what could go wrong, then the chunk size."""
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden is {hidden.shape[-1]} wide, weight {weight.shape[1]}: (..., D) and (V, D) are needed")
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 {tuple(hidden.shape[:-1])}, one per hidden state, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    if targets.numel() and not (0 <= targets.min() and targets.max() < len(weight)):
        raise ValueError(
            f"targets must lie in 0..{len(weight) - 1}, got {targets.min().item()}..{targets.max().item()}; "
            "leave masked tokens out instead of marking them"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; score greedy samples at 1")
    if chunk is None:
        return chunk_tokens(len(weight))
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return chunk


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, keep_unit):
        ctx.set_materialize_grads(False)  # None, not zeros, tells the backward pass that nobody uses the entropy
        head = _Head(hidden, weight, targets, temperature, chunk)
        logp, entropy, lse = (torch.empty(len(targets), dtype=head.dtype, device=hidden.device) for _ in range(3))
        unit = torch.empty_like(hidden, dtype=head.dtype) if keep_unit else None
        for rows in head.chunks:
            logp[rows], entropy[rows], lse[rows] = head.statistics(rows)
            if keep_unit:  # dlogp/dhidden, the gradient but for its factor g
                one = torch.ones_like(lse[rows])
                unit[rows] = head.gradient(rows, lse[rows], entropy[rows], one, None, True, None)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy, unit)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, targets, lse, entropy, unit = ctx.saved_tensors
        if unit is not None and grad_logp is not None and grad_entropy is None:
            dH = torch.mul(unit, grad_logp.unsqueeze(-1), out=torch.empty_like(hidden))
            return dH, None, None, None, None, None

        head = _Head(hidden, weight, targets, ctx.temperature, ctx.chunk)
        dH = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dW = head.new_weight_gradient() if ctx.needs_input_grad[1] else None
        for rows in head.chunks:
            g, k = (None if x is None else x[rows] for x in (grad_logp, grad_entropy))
            head.logits(rows)
            dh = head.gradient(rows, lse[rows], entropy[rows], g, k, dH is not None, dW)
            if dH is not None:
                dH[rows] = dh
        return dH, None if dW is None else dW.to(weight.dtype), None, None, None, None


class _HandOver(torch.autograd.Function):
    """Gives gradients formed in the forward pass to autograd. The loss is linear in the incoming gradient, as any loss
    is; writing into .grad early instead would break loss scaling, accumulation order and FSDP's reduction."""

    @staticmethod
    def forward(ctx, hidden, weight, loss, dH, dW):
        ctx.save_for_backward(dH, dW)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grads = ctx.saved_tensors
        if grad != 1:  # in place (dW can be most of the memory), unless the graph is kept and may ask again
            scale = torch.mul if torch._C._autograd._get_current_graph_task_keep_graph() else torch.Tensor.mul_
            grads = [x if x is None else scale(x, grad) for x in grads]
        return *grads, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm both doors share: products by cuBLAS, MKL or oneDNN around two passes over the rows of the buffer

VOCAB_TILE = 4096  # entries of W that are cast at a time where W has another dtype than the products


class _Head:
    """A head over `chunks` of tokens, with one logits buffer for them all.

    Logits, sums and gradients are fp32 (float64 for float64). So are the products, but for bf16 on CUDA: its
    tensor cores multiply bf16 and sum in fp32. A CPU's bf16 product would round its output, so W is upcast.
    """

    def __init__(self, hidden, weight, targets, temperature, chunk):
        self.hidden, self.weight, self.targets, self.scale = hidden, weight, targets, 1 / temperature
        factors = torch.promote_types(hidden.dtype, weight.dtype)
        self.dtype = torch.promote_types(factors, torch.float32)
        self.product_dtype = factors if hidden.is_cuda and factors == torch.bfloat16 else self.dtype
        # chunks of equal size: 256 + 256 tokens multiply faster than 441 + 71
        self.chunks = list(_slices(len(hidden), chunk))
        rows = max((rows.stop - rows.start for rows in self.chunks), default=0)
        self.buffer = torch.empty(rows, len(weight), dtype=self.dtype, device=hidden.device)

    def new_weight_gradient(self):
        new = torch.empty if self.chunks else torch.zeros  # the first chunk writes, the others add
        return new(self.weight.shape, dtype=self.dtype, device=self.weight.device)

    def logits(self, rows):
        """Fill the buffer with hidden W^T / tau of these tokens: (C, V)."""
        h = self.hidden[rows].to(self.product_dtype)
        z = self.buffer[: len(h)]
        for cols, w in self._weight_tiles():
            _addmm(z[:, cols], h, w.t(), beta=0, alpha=self.scale)  # the temperature rides on the product
        return z

    def statistics(self, rows):
        """logp, entropy and log-sum-exp (C,) of these tokens; their logits stay in the buffer for `gradient`."""
        z = self.logits(rows)
        return (_statistics_triton if _use_triton(z) else _statistics_torch)(z, self.targets[rows])

    def gradient(self, rows, lse, entropy, g, k, want_hidden, dW):
        """Overwrite the logits in the buffer by g dlogp/dz + k dH/dz (None: 0). Returns dhidden (C, D) or None, and
        adds these tokens' part to dW (V, D) unless that is None."""
        h = self.hidden[rows].to(self.product_dtype)
        g = torch.zeros_like(lse) if g is None else g
        row_pass = _gradient_triton if _use_triton(self.buffer) else _gradient_torch
        dz = row_pass(self.buffer[: len(h)], self.targets[rows], lse, entropy, g, k, self.product_dtype)
        dh = torch.zeros(h.shape, dtype=self.dtype, device=h.device) if want_hidden else None
        for cols, w in self._weight_tiles():
            if want_hidden:
                _addmm(dh, dz[:, cols], w, alpha=self.scale)
            if dW is not None:
                _addmm(dW[cols], dz[:, cols].t(), h, beta=int(rows.start > 0), alpha=self.scale)
        return dh

    def _weight_tiles(self):
        """W (V, D) in the products' dtype: as it is, or upcast piece by piece, so that no second W is ever held."""
        if self.weight.dtype == self.product_dtype:
            yield slice(None), self.weight
            return
        tile = torch.empty(VOCAB_TILE, self.weight.shape[1], dtype=self.product_dtype, device=self.weight.device)
        for cols in _slices(len(self.weight), VOCAB_TILE):
            yield cols, tile[: cols.stop - cols.start].copy_(self.weight[cols])


def _slices(n, size):
    """range(n) as slices of at most `size`, all as long as each other (or one shorter)."""
    count = -(-n // size)
    for i in range(count):
        yield slice(n * i // count, n * (i + 1) // count)


def _addmm(out, a, b, beta=1, alpha=1.0):
    """out = beta out + alpha a @ b, summed in out's dtype: bf16 factors do not round their product to bf16 first."""
    out_dtype = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out, **out_dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The two row passes in torch


def _cached_rows(z):
    """Blocks of rows whose scratch stays in cache (4 MB) and adds nothing to speak of to the buffer's size."""
    return list(_slices(len(z), max(1, min(2**20 // z.shape[1], len(z) // 32))))


def _statistics_torch(z, targets):
    """z (C, V), targets (C,) -> logp, entropy, lse (C,), from x = z - max, so that large logits lose no digits:
    logp = x_y - log S,  H = log S - A/S,  with S = sum e^x, A = sum e^x x."""
    logp, entropy, lse = torch.empty(3, len(z), dtype=z.dtype, device=z.device)
    blocks = _cached_rows(z)
    scratch = z.new_empty(2, max(rows.stop - rows.start for rows in blocks), z.shape[1])
    for rows in blocks:
        shifted, e = scratch[:, : rows.stop - rows.start]
        top = z[rows].amax(-1, keepdim=True)
        torch.sub(z[rows], top, out=shifted)
        S = torch.exp(shifted, out=e).sum(-1)
        A = e.mul_(shifted).sum(-1)
        logp[rows] = shifted.gather(1, targets[rows, None]).squeeze(1) - S.log()
        entropy[rows] = S.log() - A / S
        lse[rows] = top.squeeze(1) + S.log()
    return logp, entropy, lse


def _gradient_torch(z, targets, lse, entropy, g, k, dtype):
    """z (C, V) -> g (onehot - p) - k p (log p + H), over z; in `dtype` (CUDA without Triton: a copy in bf16)."""
    if k is None:
        z.sub_(lse[:, None]).exp_().mul_(-g[:, None])
    else:
        for rows in _cached_rows(z):  # -p (g + k (log p + H)); p needs a scratch of its own
            log_p = z[rows].sub_(lse[rows, None])
            p = log_p.exp()
            log_p.add_(entropy[rows, None]).mul_(k[rows, None]).add_(g[rows, None]).mul_(p).neg_()
    z[torch.arange(len(z), device=z.device), targets] += g
    return z.to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The two row passes in Triton: each reads a row of z from memory once, and the second writes it once.
#
# Statistics, online: blocks x of a row arrive one after the other. Relative to the maximum m so far, keep
#       S = sum e^(x - m)        A = sum e^(x - m) (x - m)
# When the maximum rises from m to m', with d = m - m' <= 0, each old term gains a factor e^d, and x - m' = (x - m) + d:
#       S' = e^d S               A' = e^d (A + d S)
# At the end of the row, since sum p = 1:
#       lse = m + log S          H = lse - sum p x = log S - A/S          logp = x_y - lse
# Starting at m = -1e30 instead of -inf keeps d S = 0 where S = 0 (-inf 0 would be NaN); lanes past V hold -1e30 too.
#
# Gradient: with dlse/dx = p,
#       dlogp/dx_v = [v = y] - p_v
#       dH/dx_v    = p_v - d(sum_u p_u x_u)/dx_v = p_v - p_v (1 + x_v - sum_u p_u x_u) = -p_v (log p_v + H)
#   (by x_v = log p_v + lse and sum p x = lse - H). 1 - p is formed in fp32 even where the result is stored in bf16.
# A bf16 row goes into the memory of its own fp32 row: element v is read at byte 4v and written at byte 2v. A barrier
# between a block's reads and its writes is all it takes, because later blocks are read further right still.
# One program a row, offsets in 64 bits: C V passes 2^31 at 14,000 tokens.

if HAS_TRITON:

    @triton.jit
    def _statistics_kernel(z, targets, logp, entropy, lse, V, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        z += row * V
        m, S, A = -1e30, 0.0, 0.0
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(z + cols, mask=cols < V, other=-1e30)
            higher = tl.maximum(m, tl.max(x, 0))
            d = m - higher
            e = tl.exp(x - higher)
            A = tl.exp(d) * (A + d * S) + tl.sum(e * (x - higher), 0)
            S = tl.exp(d) * S + tl.sum(e, 0)
            m = higher
        x_y = tl.load(z + tl.load(targets + row))
        tl.store(logp + row, x_y - m - tl.log(S))
        tl.store(entropy + row, tl.log(S) - A / S)
        tl.store(lse + row, m + tl.log(S))

    @triton.jit
    def _gradient_kernel(
        z, out, targets, lse, entropy, g, k, V, out_stride, HAS_K: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        z += row * V
        out += row * out_stride
        y, row_lse, row_g = tl.load(targets + row), tl.load(lse + row), tl.load(g + row)
        if HAS_K:
            row_H, row_k = tl.load(entropy + row), tl.load(k + row)
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            log_p = tl.load(z + cols, mask=cols < V, other=0.0) - row_lse
            p = tl.exp(log_p)
            dz = row_g * (tl.where(cols == y, 1.0, 0.0) - p)
            if HAS_K:
                dz -= row_k * p * (log_p + row_H)
            tl.debug_barrier()
            tl.store(out + cols, dz.to(out.dtype.element_ty), mask=cols < V)


BLOCK, NUM_WARPS = 4096, 8  # 16 fp32 a thread


def _use_triton(z):
    """On CUDA; with TRITON_INTERPRET=1 (set before this file is imported) on CPU tensors too, as the tests do."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return HAS_TRITON and z.dtype == torch.float32 and (z.is_cuda or interpreted)


def _statistics_triton(z, targets):
    """As `_statistics_torch`, in one read of z."""
    logp, entropy, lse = torch.empty(3, len(z), device=z.device)
    _statistics_kernel[(len(z),)](
        z, targets.contiguous(), logp, entropy, lse, z.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return logp, entropy, lse


def _gradient_triton(z, targets, lse, entropy, g, k, dtype):
    """As `_gradient_torch`, in one read and one write; a bf16 result lies in the front half of each row of z."""
    V = z.shape[1]
    dz = z if dtype == z.dtype else z.view(dtype)[:, :V]  # (C, V), row stride 2 V
    entropy, k, has_k = (lse, lse, False) if k is None else (entropy, k.contiguous(), True)
    _gradient_kernel[(len(z),)](
        z, dz, targets.contiguous(), lse, entropy, g.contiguous(), k, V, dz.stride(0), has_k, BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return dz
