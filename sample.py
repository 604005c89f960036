"""Sampling: prompts (token ids) -> completions (token ids) with log-probs, by continuous batching over a KV cache.

    z = logits / temperature     l = z_y - logsumexp(z)     y = first i with  sum_{j<=i} exp(z_j) > u · sum_j exp(z_j)

Up to `max_batch` rows decode together. A row that finishes gives its slot to the next one of the queue; when the queue
is empty the last rows move into the gaps, so the batch is always dense. Each distinct prompt is prefilled once; its
keys and values are copied to all rows that continue it. A row starts from its prompt's last token, so prefill and
decode meet in one place: the first completion token is drawn like every other. A draw takes one uniform number, a
function of (seed, key, sample, position), so no batch size, order or number of processes changes what is drawn (on a
GPU the last digits of logits, and now and then a token, still depend on the batch).

A decode step reads every weight once and each row's keys and values once; all else is overhead. So a step is one
function of buffers that keep their places, and nothing in it waits for the device. On a CPU what counts is the number
of operators and how weights lie in memory (`packed_linears`); on CUDA it is the time to launch kernels, so a step is
recorded once for a number of rows and a length, and replayed (CUDA graphs, as gpt-fast and vLLM have them), in later
rollouts, too, where the caller keeps the `Decoder`.

Lives here, from the inside out (to read it from the outside, start at `generate`): the cache, the step, products on a
CPU, the rules of drawing, the loop, a chat on the command line. Not here: text (data/tokenizer.py), the network
(model.py), whose Transformer runs here unchanged but for its linear layers, what completions are worth (rewards.py).

    B rows decoding, P prompts, T tokens of a prompt, L tokens attended to, H query heads, K key/value heads, d width of
    a head, V vocabulary

Try it:  python sample.py --model smollm2-135m-instruct "What is a derivative?"
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as once
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Completion:
    tokens: list[int]  # the stop token included
    logprobs: list[float]  # one a token, at the temperature (at 1 when greedy), before any truncation
    finished: bool  # True: ended by a stop token; False: out of length


PREFILL_TOKENS = 8192  # of one prefill, padding included
# Decode steps between two looks for finished rows: one where looking is free, several where it means waiting for the
# device. A row then decodes a few tokens too many, which are cut.
LOOK_EVERY = {"cpu": 1, "cuda": 8}
# Kinds of device whose steps are recorded and replayed; elsewhere they run one by one, alike but for rounding: a replay
# has more rows and attends over more places.
RECORDED = {"cuda"}


def bucket(length: int) -> int:
    """Attention runs over multiples of 32 tokens. On a CPU the order in which a sum is formed depends on its length up
    to a vector's width; else a row's last digits, and now and then a token, would depend on its neighbours' lengths."""
    return -(-length // 32) * 32


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values


class Prefill:
    """The cache's side of a prefill: plain causal attention, whose keys and values are kept."""

    def __init__(self):
        self.keys, self.values = [], []  # one (P,T,K,d) a layer

    def positions(self, tokens):
        return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)

    def attend(self, layer, q, k, v):
        self.keys.append(k.contiguous())  # they may be parts of a joint product, which would be kept whole
        self.values.append(v.contiguous())
        T, grouped = q.shape[1], q.shape[2] != k.shape[2]
        q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, bucket(T) - T)) for x in (q, k, v))  # (P,heads,bucket(T),d)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[:, :, :T].transpose(1, 2)


class KVCache:
    """Keys and values of all decoding rows, and one decode step's attention over them.

    A layer is (rows,K,capacity,d). Row r holds lengths[r] tokens. Capacity grows by half when the longest row reaches
    it, but not past `limit`: memory follows what is used, and copying stays a constant share.
    """

    def __init__(self, config, rows: int, capacity: int, limit: int, like: torch.Tensor):
        self.K, self.d = config.num_key_value_heads, config.head_dim
        self.rows, self.capacity, self.limit = rows, 0, bucket(limit)
        self.keys, self.values = ([like.new_zeros(rows, self.K, 0, self.d)] * config.num_hidden_layers for _ in "kv")
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.grow(capacity)

    def insert(self, rows: list[int], keys, values):
        """Rows take a prefilled prompt: keys, values one (T,K,d) a layer."""
        rows, length = torch.tensor(rows, device=self.lengths.device), keys[0].shape[0]
        self.grow(length + 1)
        for x, new in zip(self.keys + self.values, keys + values):
            x[:, :, :length].index_copy_(0, rows, new.transpose(0, 1).expand(len(rows), -1, -1, -1))
        self.lengths[rows] = length

    def move(self, source: list[int], target: list[int]):
        """Rows `source` take the places of rows `target`."""
        source, target = torch.tensor([source, target], device=self.lengths.device)
        for x in (*self.keys, *self.values, self.lengths):
            x.index_copy_(0, target, x[source])

    def grow(self, needed: int):
        """Makes room for `needed` tokens a row. Keys and values then lie elsewhere."""
        if needed <= self.capacity:
            return
        before, self.capacity = self.capacity, max(bucket(needed), min(bucket(self.capacity * 3 // 2), self.limit))
        self.seen, self.views = None, []
        for store in (self.keys, self.values):
            for layer, x in enumerate(store):  # one at a time: never two whole caches
                store[layer] = x.new_zeros(self.rows, self.K, self.capacity, self.d)
                store[layer][:, :, :before] = x
        self.places = torch.arange(self.rows * self.K * self.capacity, device=self.lengths.device)
        self.places = self.places.view(self.rows, self.K, self.capacity)

    def begin_step(self, B: int, L: int):
        """Before a forward of rows [:B], none of which reads more than L tokens: what its layers share."""
        lengths = self.lengths[:B, None]  # (B,1)
        self.new = self.places[:B].gather(2, lengths[..., None].expand(-1, self.K, -1)).flatten()  # (B*K,)
        hidden = self.places[0, 0, :L] > lengths  # (B,L)
        self.mask = self.keys[0].new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]  # (B,1,1,L)
        if self.seen != (B, L):  # the same for many steps, and views cost as much as a small product
            self.seen = B, L
            self.views = [[x.view(-1, self.d) for x in kv] + [x[:B, :, :L] for x in kv]
                          for kv in zip(self.keys, self.values)]  # fmt: skip

    def positions(self, tokens):
        return self.lengths[: len(tokens), None]

    def attend(self, layer, q, k, v):
        """q (B,1,H,d), k, v (B,1,K,d) -> (B,1,H,d). The heads that share keys stand where a sequence's queries usually
        do, so keys are never expanded: on CPUs as fast as plain products in fp32, three times as fast in bf16."""
        key_store, value_store, keys, values = self.views[layer]  # (rows*K*capacity,d) twice, (B,K,L,d) twice
        key_store.index_copy_(0, self.new, k.reshape(-1, self.d))
        value_store.index_copy_(0, self.new, v.reshape(-1, self.d))
        grouped = q.view(len(q), self.K, -1, self.d)  # (B,K,H/K,d)
        return F.scaled_dot_product_attention(grouped, keys, values, self.mask).view(q.shape)


# ---------------------------------------------------------------------------------------------------------------------
# One decode step


class Decoder:
    """Rows [:B] of up to `rows`, their newest tokens, and the step that gives each its next one.

    Whoever keeps it from one rollout to the next keeps its buffers, and on CUDA the steps recorded over them.
    """

    def __init__(self):
        self.form, self.rows, self.limit, self.max_new_tokens = None, 0, 0, 0

    def prepare(self, model, rules: dict, rows: int, capacity: int, limit: int, max_new_tokens: int):
        """For a rollout of up to `rows` rows, none longer than `limit`, drawn by `rules`. What an earlier one left is
        used again where it is large enough, and its records where the weights lie where they lay."""
        self.model, self.rules = model, rules
        config, like = model.config, model.model.embed_tokens.weight
        form = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, like.dtype, like.device
        large_enough = rows <= self.rows and limit <= self.limit and max_new_tokens <= self.max_new_tokens
        if form != self.form or not large_enough:
            self.form, self.rows, self.limit = form, rows, limit
            self.max_new_tokens = max(max_new_tokens, self.max_new_tokens)
            self.cache = self.u = self.records = None  # before there are new ones
            recorded, integers = like.device.type in RECORDED, dict(dtype=torch.long, device=like.device)
            # A record holds addresses, so where there are records the cache never grows.
            self.cache = KVCache(config, rows, limit if recorded else capacity, limit, like)
            self.last, self.written, self.alive = (torch.zeros(rows, **integers) for _ in range(3))
            self.u = torch.zeros(rows, self.max_new_tokens, dtype=torch.float64, device=like.device)
            self.logprobs = torch.zeros(rows, device=like.device)
            # Kind of step -> its record, or None after a first one that was not recorded; and what they were made from.
            self.records, self.recorded_from = {} if recorded else None, None
            return
        if self.records and self.recorded_from != addresses(model):
            self.records.clear()
        for x in (*self.cache.keys, *self.cache.values, self.cache.lengths, self.last, self.alive):
            x.zero_()  # an earlier rollout may have been interrupted, or have left NaN

    def start(self, slots: list[int], last: list[int], u):
        """Rows `slots` begin, their prompts' keys and values inserted: each with its last token and its own random
        numbers u, one a token."""
        self.last[slots] = torch.tensor(last, device=self.last.device)
        self.u[slots, : u.shape[1]] = torch.from_numpy(u).to(self.u.device)
        self.written[slots] = 0
        self.alive[slots] = 1

    def move(self, source: list[int], target: list[int], B: int):
        """Rows `source` take the places of `target`, after which only rows [:B] are alive."""
        if source:
            self.cache.move(source, target)
            for x in (self.last, self.written, self.u):
                x[target] = x[source]
        self.alive[B:] = 0
        self.cache.lengths[B:] = 0

    def step(self, B: int, L: int):
        """One token for each of rows [:B]. Depends on B, L and what the buffers hold; a dead row among them computes
        something over its first place, and stays as it is."""
        self.cache.begin_step(B, L)
        hidden = self.model(self.last[:B, None], cache=self.cache)
        logits = self.model.lm_head(hidden[:, 0])  # (B,V)
        u = self.u[:B].gather(1, self.written[:B, None].clamp(max=self.u.shape[1] - 1))[:, 0]
        ids, logprobs = draw(logits, u, **self.rules)
        self.last[:B] = ids
        self.logprobs[:B] = logprobs
        for count in (self.cache.lengths, self.written):
            count[:B].add_(self.alive[:B])

    def advance(self, B: int, longest: int, count: int):
        """`count` tokens for rows [:B], the longest having `longest` after the first -> ids, log-probs (B,count)."""
        self.cache.grow(longest + count - 1)
        drawn = []
        for i in range(count):
            if self.records is None:
                self.step(B, bucket(longest + i))
            else:
                self.replay(B, longest + i)
            drawn.append((self.last[:B].clone(), self.logprobs[:B].clone()))
        return [torch.stack(x, 1) for x in zip(*drawn)]

    def replay(self, B: int, L: int):
        """A step by a record for more rows, a power of two or all, and more tokens, a quarter of one: few records for
        all sizes, since on a GPU what is idle costs little. The first step of a kind runs as it is: it makes what
        libraries make at their first call, which must not happen while recording. The second one is recorded, then
        replayed."""
        quarter = max(32, (1 << (L - 1).bit_length()) // 8)
        B, L = min(self.rows, 1 << (B - 1).bit_length()), min(self.cache.capacity, -(-L // quarter) * quarter)
        kind = B, L, *self.rules.values()
        if kind not in self.records:
            self.records[kind] = None
            return self.step(B, L)
        if self.records[kind] is None:
            self.recorded_from = addresses(self.model)
            earlier = next(filter(None, self.records.values()), None)
            self.records[kind] = record(lambda: self.step(B, L), earlier and earlier.pool())
        self.records[kind].replay()


def addresses(model) -> list:
    """What a record of a model's step holds on to: where tensors lie, and the numbers and switches of its modules."""
    fixed = torch.Tensor, int, float, str, type(None)
    return [(type(module), key, value.data_ptr() if isinstance(value, torch.Tensor) else value)
            for module in model.modules() for part in (vars(module), module._parameters, module._buffers)
            for key, value in part.items() if isinstance(value, fixed)]  # fmt: skip


def record(step, pool):
    """What this returns repeats at `.replay()` what `step` launches, on the same addresses; `step` itself changes
    nothing meanwhile. Records with one pool have their intermediate results in the same memory: one at a time."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread, such as NCCL's watchdog, may call CUDA meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph


# ---------------------------------------------------------------------------------------------------------------------
# Products on a CPU


@once
def packed_type(dtype: torch.dtype) -> torch.dtype | None:
    """The type in which oneDNN multiplies weights of dtype on this CPU, found by trying: bfloat16 needs instructions
    that not every CPU has, and fp32 is then seven times as fast as torch's emulation. None: no packing here."""
    ops = torch.ops.mkldnn
    if torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise"):
        x, weight = torch.linspace(-1, 1, 5 * 64).view(5, 64), torch.linspace(-1, 2, 96 * 64).sin().view(96, 64)
        for candidate in {torch.float32: [torch.float32], torch.bfloat16: [dtype, torch.float32]}.get(dtype, []):
            a, b = x.to(candidate), weight.to(candidate)
            try:
                y = ops._linear_pointwise(a, ops._reorder_linear_weight(b, 32), None, "none", [], "")
            except RuntimeError:
                continue
            if torch.allclose(y.double(), a.double() @ b.double().T, rtol=8 * torch.finfo(candidate).eps, atol=1e-5):
                return candidate
    return None


def product(linears):
    """x -> the outputs of linear layers side by side, as one product with packed weights. None where that can't be: on
    another device, or for layers that are more than a linear (an adapter folded in by lora.py's `merged` is not)."""
    weights = [x.weight if type(x) is nn.Linear else getattr(x, "folded", None) for x in linears]
    if any(w is None or w.device.type != "cpu" for w in weights) or len({w.dtype for w in weights}) > 1:
        return None
    ops, dtype, packed = torch.ops.mkldnn, weights[0].dtype, packed_type(weights[0].dtype)
    if packed is None:
        return None
    # Laid out for 32 rows always: a layout for one row rounds differently, and is slower for two.
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    weight = ops._reorder_linear_weight(weight.detach().to(packed), 32)
    bias = None if linears[0].bias is None else torch.cat([x.bias.detach() for x in linears]).to(packed)
    if packed == dtype:
        return lambda x: ops._linear_pointwise(x, weight, bias, "none", [], "")
    return lambda x: ops._linear_pointwise(x.to(packed), weight, bias, "none", [], "").to(dtype)


def short_norm(norm):
    """model.py's RMSNorm in fp32 in four operators; on a CPU F.rms_norm is ten."""
    if norm.weight.device.type != "cpu" or norm.weight.dtype != torch.float32:
        return None
    eps = torch.tensor(norm.eps)

    def forward(x, weight=norm.weight):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (...,1)
        return (x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)

    return forward


def joint_qkv(attention):
    """model.py's Attention.qkv with one product, one norm and one rotation, for q and k are treated alike."""
    multiply, d = product([attention.q_proj, attention.k_proj, attention.v_proj]), attention.head_dim
    H, K, norm = attention.q_proj.out_features // d, attention.k_proj.out_features // d, None
    if hasattr(attention.q_norm, "weight"):
        norm = short_norm(attention.q_norm) or (lambda x, w: F.rms_norm(x, (d,), None, attention.q_norm.eps) * w)
        weights = torch.cat([attention.q_norm.weight.expand(H, d), attention.k_norm.weight.expand(K, d)])  # (H+K,d)

    def qkv(x, cos, sin):
        y = multiply(x).view(*x.shape[:2], H + 2 * K, d)
        qk = y[:, :, : H + K]
        if norm:
            qk = norm(qk, weights)
        qk = (qk * cos).add_(qk.roll(d // 2, -1).mul_(sin))
        return qk[:, :, :H], qk[:, :, H:], y[:, :, H + K :]

    return multiply and qkv


def joint_gated(mlp):
    """model.py's MLP.gated with one product."""
    multiply = product([mlp.gate_proj, mlp.up_proj])

    def gated(x):
        gate, up = multiply(x).chunk(2, -1)
        return F.silu(gate).mul_(up)

    return multiply and gated


@contextmanager
def packed_linears(model: nn.Module):
    """For a rollout, linear layers on the CPU multiply weights laid out once for oneDNN instead of at each call, and
    those that read the same input in one product; norms take fewer operators.

    At a batch of 32 that halves a decode step where oneDNN has the better kernels, and gives a row the same result
    whatever rows share its batch, which torch's default does not. Costs one more copy of the weights meanwhile. Layers
    on another device, or that are more than plain linears, stay as they are.
    """
    changed, inside = [], set()
    try:
        for module in model.modules():  # a module comes before the layers inside it
            if hasattr(module, "qkv"):
                name, make, parts = "qkv", joint_qkv, [module.q_proj, module.k_proj, module.v_proj]
            elif hasattr(module, "gated"):
                name, make, parts = "gated", joint_gated, [module.gate_proj, module.up_proj]
            elif hasattr(module, "eps"):
                name, make, parts = "forward", short_norm, []
            elif isinstance(module, nn.Linear) and module not in inside:
                name, make, parts = "forward", lambda linear: product([linear]), []
            else:
                continue
            if (function := make(module)) is not None:
                setattr(module, name, function)
                changed.append((module, name))
                inside.update(parts)
        yield
    finally:
        for module, name in changed:
            delattr(module, name)


# ---------------------------------------------------------------------------------------------------------------------
# The sampling rules


def truncate(z, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """z (B,V) logits at the temperature -> the same with -inf where cut, by top-k, then top-p, then min-p.

    top_k (0: off) keeps the k largest (and all that equal the k-th); top_p the fewest whose mass reaches p (Holtzman
    et al., arXiv:1904.09751); min_p what has at least min_p times the largest probability (arXiv:2407.01082).
    """
    if 0 < top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = z.sort(descending=True)
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)  # the mass before it is enough
        z = torch.empty_like(z).scatter_(-1, order, ordered)
    if min_p > 0:
        z = z.masked_fill(z < z.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    return z


def pick(weights, u, block: int = 128):
    """weights (B,V) >= 0 unnormalised, u (B,) float64 in [0,1) -> (ids (B,), totals (B,) float64).

    The inverse of the cumulative distribution: one random number a row instead of V. Summed by blocks, then scanned in
    float64 over the blocks and inside one block only, which is faster than scanning V numbers and loses nothing: fp32
    sums over a large vocabulary would. A token of weight 0 does not advance the sum, so it is never the first past it.
    Rows that are not finite get some id; their total is not finite either.
    """
    B, V = weights.shape
    blocks = (F.pad(weights, (0, -V % block)) if V % block else weights).view(B, -1, block)
    ends = blocks.sum(-1).double().cumsum(-1)  # (B,V/block)
    target = u[:, None] * ends[:, -1:]  # below the total, rounded or not, since u <= 1 - 2^-53
    at = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)  # (B,1), clamped for NaN
    target -= F.pad(ends, (1, 0)).gather(1, at)
    inside = blocks.gather(1, at[..., None].expand(-1, -1, block))[:, 0].double().cumsum(-1)  # (B,block)
    # A block's fp32 sum and float64 scan differ in the last digits; a target between them is the block's last token.
    target = torch.minimum(target, inside[:, -1:] * (1 - 2**-53))
    ids = at * block + torch.searchsorted(inside, target, right=True)
    return ids[:, 0].clamp_(max=V - 1), ends[:, -1]


def draw(logits, u, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """logits (B,V), overwritten; u (B,) float64 -> (ids (B,), log-probs (B,) fp32 at the temperature, not truncated).

    Temperature 0 takes the largest logit, and its log-prob at temperature 1. All in fp32. Few passes over (B,V), and
    one new buffer of that size: each costs as much as a layer of a small model.
    """
    z = logits.float()
    if temperature not in (0, 1):  # the maximum goes first: a tiny temperature must not overflow
        z.sub_(z.amax(-1, keepdim=True)).div_(temperature)
    weights = z.softmax(-1)  # its sum is 1 but for rounding, so the sum is taken again
    ids, total = pick(weights, u)
    if temperature == 0:
        ids = z.argmax(-1)
    elif (0 < top_k < z.shape[-1]) or top_p < 1 or min_p > 0:
        ids, _ = pick(truncate(z, top_k, top_p, min_p).softmax(-1), u)
    return ids, (weights.gather(1, ids[:, None])[:, 0].log() - total.log()).float()


def uniforms(seed: int, key: int, sample: int, count: int) -> np.ndarray:
    """(count,) float64 in [0,1): number `position` of the stream is a function of (seed, key, sample, position) alone.

    Philox is a block cipher over a counter (Salmon et al., 2011): (seed, key) is the cipher's key, and the sample
    stands in the counter's highest word, which no stream ever reaches by counting.
    """
    word = (1 << 64) - 1
    counter = np.array([0, 0, 0, sample & word], dtype=np.uint64)
    philox = np.random.Philox(key=np.array([int(seed) & word, int(key) & word], dtype=np.uint64), counter=counter)
    return np.random.Generator(philox).random(count)


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def check_request(model, prompts, n, max_new_tokens, temperature, top_k, top_p, min_p, max_batch, keys):
    V, longest = model.config.vocab_size, model.config.max_position_embeddings
    for name, value, good, wanted in [
        ("n", n, n >= 1, "at least 1"),
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "0 (greedy) or more"),
        ("top_k", top_k, top_k is None or top_k >= -1, "the number to keep; 0, -1 or None: all"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0, at most 1"),
        ("min_p", min_p, 0 <= min_p <= 1, "from 0 to 1"),
        ("max_batch", max_batch, max_batch is None or max_batch >= 1, "at least 1, or None"),
    ]:
        if not good:
            raise ValueError(f"{name} is {value}, but must be {wanted}")
    if keys is not None and len(keys) != len(prompts):
        raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: one a prompt is needed")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty: there is nothing to continue")
        if not (0 <= min(prompt) and max(prompt) < V):
            raise ValueError(f"prompt {i} has token ids from {min(prompt)} to {max(prompt)}; the vocabulary has {V}")
        if len(prompt) + max_new_tokens > longest:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens, with max_new_tokens {max_new_tokens} more than the "
                             f"{longest} this model reads")  # fmt: skip


@torch.no_grad()
def generate(model, prompts, n=1, *, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop_ids=(),
             seed=0, keys=None, max_batch=None, kv_bytes=2 << 30, on_token=None,
             decoder: Decoder | None = None) -> list[list[Completion]]:  # fmt: skip
    """n completions of each prompt, as [prompt][n]. prompts: lists of token ids.

    temperature 0 is greedy; top_k 0, None or -1 is off; truncation after temperature: top-k, top-p, min-p.
    keys         one int a prompt (default its index): draws are a function of (seed, key, sample, position).
    max_batch    rows decoding together at most (default: what kv_bytes allows).
    kv_bytes     memory for their keys and values: as many rows as fit in it at full length, but at least one.
    on_token     called as on_token(prompt, sample, id) for each token, in order within a row.
    decoder      a Decoder() of the caller's: memory for keys and values stays allocated in it, and on CUDA the next
                 call over the same weights, changed in place or not, replays the steps that this one recorded.
    ValueError for a request that makes no sense; FloatingPointError where logits are not finite.
    """
    check_request(model, prompts, n, max_new_tokens, temperature, top_k, top_p, min_p, max_batch, keys)
    if not prompts:
        return []
    was_training = model.training
    model.eval()
    config, like, decoder = model.config, model.lm_head.weight, decoder or Decoder()
    longest, late = max(map(len, prompts)), LOOK_EVERY.get(like.device.type, 8) - 1  # what a row may run past its end
    limit = max(longest + max_new_tokens + late, decoder.limit)
    numbers = 2 * bucket(limit) * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    fitting = max(1, kv_bytes // (numbers * like.itemsize))  # rows, at their ends
    slots = min(len(prompts) * n, fitting, max_batch or sys.maxsize)
    keys = range(len(prompts)) if keys is None else keys
    rules = dict(temperature=temperature, top_k=top_k or 0, top_p=top_p, min_p=min_p)
    try:
        rows, capacity = min(max(slots, decoder.rows), fitting), longest + min(max_new_tokens, 64)
        with packed_linears(model):
            decoder.prepare(model, rules, rows, capacity, limit, max_new_tokens)
            return Rollout(model, prompts, n, max_new_tokens, stop_ids, seed, keys, slots, on_token, decoder).run()
    finally:
        model.train(was_training)


class Rollout:
    """The rows of one `generate` call. A row is (prompt, sample); it waits in the queue, then decodes in a slot."""

    def __init__(self, model, prompts, n, max_new_tokens, stop_ids, seed, keys, slots, on_token, decoder):
        self.model, self.prompts, self.max_new_tokens = model, [tuple(p) for p in prompts], max_new_tokens
        self.stop_ids, self.seed, self.keys, self.on_token = set(stop_ids), seed, keys, on_token
        self.decoder = decoder
        self.device = model.model.embed_tokens.weight.device
        self.completions = [[Completion([], [], False) for _ in range(n)] for _ in prompts]
        self.queue = deque((p, s) for p in range(len(prompts)) for s in range(n))
        self.waiting = Counter(self.prompts[p] for p, _ in self.queue)  # rows of the queue that begin with this prompt
        self.prefilled = {}  # prompt -> keys and values, one (T,K,d) a layer, while rows of the queue need them
        self.slots: list[tuple[int, int] | None] = [None] * slots

    def run(self) -> list[list[Completion]]:
        self.refill(list(range(len(self.slots))))
        while self.slots:
            written = [len(self.completions[p][s].tokens) for p, s in self.slots]
            longest = max(len(self.prompts[p]) + tokens for (p, _), tokens in zip(self.slots, written))
            count = min(LOOK_EVERY.get(self.device.type, 8), self.max_new_tokens - min(written))
            tokens, logprobs = (x.tolist() for x in self.decoder.advance(len(self.slots), longest, count))  # (B,count)
            if gaps := [i for i, row in enumerate(self.slots) if self.extend(*row, tokens[i], logprobs[i])]:
                self.refill(gaps)
        return self.completions

    def extend(self, prompt: int, sample: int, tokens, logprobs) -> bool:
        """Appends new tokens to a row; True when that completed it."""
        completion = self.completions[prompt][sample]
        for token, logprob in zip(tokens, logprobs):
            if not math.isfinite(logprob):
                raise FloatingPointError(f"the logits are not finite (NaN or inf) at token {len(completion.tokens)} of "
                                         f"sample {sample} of prompt {prompt}")  # fmt: skip
            completion.tokens.append(token)
            completion.logprobs.append(logprob)
            completion.finished = token in self.stop_ids
            if self.on_token:
                self.on_token(prompt, sample, token)
            if completion.finished or len(completion.tokens) == self.max_new_tokens:
                return True
        return False

    def refill(self, gaps: list[int]):
        """Gives the gaps to the next rows of the queue; without enough of those, the last rows move into them."""
        new = {slot: self.queue.popleft() for slot in gaps[: len(self.queue)]}
        if new:
            self.start(new)
        gaps = set(gaps[len(new) :])
        B = len(self.slots) - len(gaps)
        target = sorted(slot for slot in gaps if slot < B)
        source = [slot for slot in range(B, len(self.slots)) if slot not in gaps]
        if gaps:
            self.decoder.move(source, target, B)
            for t, s in zip(target, source):
                self.slots[t] = self.slots[s]
            del self.slots[B:]

    def start(self, new: dict[int, tuple[int, int]]):
        """Slots begin new rows, from their prompts' keys and values; several new prompts are prefilled at a time."""
        slots_of = defaultdict(list)  # prompt -> the slots that start from it
        for slot, row in new.items():
            self.slots[slot] = row
            slots_of[self.prompts[row[0]]].append(slot)
        prompts = sorted(slots_of, key=len)
        while prompts:
            count = max(1, PREFILL_TOKENS // len(prompts[-1]))
            batch, prompts = prompts[-count:], prompts[:-count]
            if missing := [prompt for prompt in batch if prompt not in self.prefilled]:
                self.prefill(missing)
            for prompt in batch:
                self.decoder.cache.insert(slots_of[prompt], *self.prefilled[prompt])
                self.waiting[prompt] -= len(slots_of[prompt])
                if not self.waiting[prompt]:
                    del self.prefilled[prompt]
        u = [uniforms(self.seed, self.keys[p], s, self.max_new_tokens) for p, s in new.values()]
        self.decoder.start(list(new), [self.prompts[p][-1] for p, _ in new.values()], np.stack(u))

    def prefill(self, prompts: list[tuple]):
        """Keys and values of all but the last token of each prompt, in one right-padded batch."""
        tokens = torch.zeros(len(prompts), max(1, max(map(len, prompts)) - 1), dtype=torch.long)  # (P,T)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt) - 1] = torch.tensor(prompt[:-1])
        cache = Prefill()
        self.model(tokens.to(self.device), cache=cache)
        for i, prompt in enumerate(prompts):
            T = len(prompt) - 1
            self.prefilled[prompt] = [k[i, :T] for k in cache.keys], [v[i, :T] for v in cache.values]


# ---------------------------------------------------------------------------------------------------------------------
# On the command line


def main():
    from cpu import fast_cpu_matmul, keep_freed_memory
    from data.tokenizer import StreamDecoder, load_tokenizer
    from lora import load_adapter, merge_adapter
    from model import find_checkpoint, load_model

    parser = argparse.ArgumentParser(description="Answer a prompt, or chat, with streaming.")
    parser.add_argument("prompt", nargs="?", help="without it: a chat, one line a turn, ended by an empty line")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="an alias, a directory or a hub id")
    parser.add_argument("--adapter", help="a directory with PEFT's two files, put onto the model")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on CPU, bfloat16 on CUDA")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU on this machine; use cpu")
    if args.device.startswith("cuda:"):
        torch.cuda.set_device(args.device)  # steps are recorded on the current device
    fast_cpu_matmul()
    keep_freed_memory()
    place = find_checkpoint(args.model)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    prepare = partial(load_adapter, directory=args.adapter) if args.adapter else None
    model = load_model(place, device=args.device, dtype=getattr(torch, dtype), prepare=prepare)
    if args.adapter:
        merge_adapter(model)
    tokenizer = load_tokenizer(place)
    messages = [{"role": "system", "content": args.system}] if args.system else []

    def answer(ids, seed) -> str:
        stream, text = StreamDecoder(tokenizer), []

        def show(piece):
            text.append(piece)
            print(piece, end="", flush=True)

        rules = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=seed)
        generate(model, [ids], max_new_tokens=args.max_new_tokens, stop_ids=tokenizer.stop_ids,
                 on_token=lambda prompt, sample, token: show(stream.push(token)), **rules)  # fmt: skip
        show(stream.flush())
        print()
        return "".join(text)

    for turn in range(1 if args.prompt else sys.maxsize):
        text = args.prompt or input("> ").strip()
        if not text:
            return
        messages.append({"role": "user", "content": text})
        ids = tokenizer.encode(text) if args.raw else tokenizer.encode_chat(messages)
        messages.append({"role": "assistant", "content": answer(ids, args.seed + turn)})


if __name__ == "__main__":
    try:
        main()
    except (EOFError, KeyboardInterrupt):
        pass
    except (ValueError, RuntimeError, FloatingPointError) as error:
        sys.exit(f"sample.py: {error}")
