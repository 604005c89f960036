"""A step's seconds on paper: roofline times of a model on n GPUs, at efficiencies that are named and can be changed.

Of a rank, with N parameters, bytes and FLOP/s times their efficiencies:
    decode     the larger of (steps · 2 N + keys and values read) bytes / memory bandwidth and 2 N · tokens / FLOP/s
               steps = max(longest, rows · mean length / rows at once), rows at once from the memory that is left
    prefill    2 N · prompt tokens / FLOP/s, each prompt once
    gather     for sampling, once a step: the bf16 weights, 2 N bytes
    learner    8 N · tokens / FLOP/s (2 forward, 4 backward, 2 recomputed) beside, for every micro-batch, two gathers of
               the weights and the sum of the fp32 gradients, 4 N bytes; they overlap, so the longer of both counts
    optimizer  AdamW in fp32 reads four numbers and writes three of each parameter of its shard
A collective of b bytes is a ring over its n ranks, block by block: (n - 1) (b / n / bandwidth + latency). Where it
leaves the node, all the node's links feed it: min(NVLink, GPUs of a node · InfiniBand). "full" shards over all GPUs;
"hybrid" inside a node, whose gradients then meet those of the other nodes in an all-reduce, each GPU over its own link.

Not counted: rewards, attention's own FLOPs (small against 2 N below some ten thousand tokens), small messages, disks.
`python bench.py scale --paper` prints it.
"""

import math

import torch

from benchmarks.measure import cached_numbers
from model import Transformer

# Data sheets, SXM: dense bf16 TFLOP/s, memory TB/s, memory GB
GPUS = {"h100": (989, 3.35, 80), "h200": (989, 4.8, 141)}
ASSUMPTIONS = [
    ("tflops", None, "dense bf16 TFLOP/s of a GPU"),
    ("memory_tb", None, "TB/s of its memory"),
    ("memory_gb", None, "GB it has"),
    ("nvlink_gb", 450.0, "GB/s each way between GPUs of a node"),
    ("infiniband_gb", 50.0, "GB/s each way of a GPU's own link out of the node"),
    ("latency_us", 5.0, "of one hop of a collective"),
    ("node", 8, "GPUs of a node"),
    ("mfu", 0.4, "share of the FLOP/s that the learner and prefill reach"),
    ("decode_efficiency", 0.6, "share of the memory's bandwidth that decoding reaches"),
    ("link_efficiency", 0.8, "share of the links' bandwidth that collectives reach"),
    ("longest", 4.0, "the longest completion over the mean"),
    ("micro_batch_tokens", 16384, "in one forward and backward pass of a rank"),
    ("reserve_gb", 8.0, "activations, logits, fragments"),
]


def ring(ranks, size, bandwidth, latency):
    """Seconds of an all-gather or reduce-scatter of `size` bytes in all: n - 1 hops of a part each."""
    return (ranks - 1) * (size / ranks / bandwidth + latency)


def parameters(config):
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def step_cost(config, N, gpus, hybrid, a):
    """Seconds of each part of a step, and the memory of a GPU.

    N: parameters. a: ASSUMPTIONS and prompts, generations, prompt_tokens, new_tokens (a mean). A rank samples whole
    groups, so more GPUs than prompts do not help. Where what a GPU must hold leaves no room for a row, no step is
    possible, and only "GB a GPU" says what it would take.
    """
    G, prompt, mean = a.generations, a.prompt_tokens, a.new_tokens
    layers, token_bytes = config.num_hidden_layers, 2 * cached_numbers(config)  # bf16
    peak, memory = a.tflops * 1e12, a.memory_tb * 1e12
    node, latency = min(int(a.node), gpus), a.latency_us * 1e-6
    nvlink, infiniband = a.nvlink_gb * 1e9 * a.link_efficiency, a.infiniband_gb * 1e9 * a.link_efficiency
    shards = node if hybrid else gpus
    across = nvlink if shards <= node else min(nvlink, node * infiniband)

    def collective(size):  # a block at a time, as FSDP calls it
        return layers * ring(shards, size / layers, across, latency)

    groups = math.ceil(a.prompts / gpus)
    rows, held = groups * G, 2 * N + 16 * N / shards + a.reserve_gb * 1e9
    row_bytes = (prompt + a.longest * mean) * token_bytes
    fitting = int((a.memory_gb * 1e9 - held) // row_bytes)
    at_once = min(rows, max(fitting, 1))
    facts = {"GPUs": gpus, "shard": "hybrid" if hybrid else "full", "groups a rank": groups,
             "GB a GPU": (held + at_once * row_bytes) / 1e9,
             "rows at once": at_once if fitting > 0 else None}  # fmt: skip
    steps = max(a.longest * mean, rows * mean / at_once)
    read = steps * 2 * N + rows * mean * (prompt + mean / 2) * token_bytes
    tokens = rows * mean + groups * prompt  # each prompt once
    passes = max(1, math.ceil(tokens / a.micro_batch_tokens))
    talk = 2 * collective(2 * N) + collective(4 * N)
    if hybrid and gpus > node:
        talk += layers * 2 * ring(gpus // node, 4 * N / layers / node, infiniband, latency)
    parts = {
        "decode": max(read / (memory * a.decode_efficiency), 2 * N * rows * mean / (peak * a.mfu)),
        "prefill": 2 * N * groups * prompt / (peak * a.mfu),
        "gather": collective(2 * N),
        "learner": max(8 * N * tokens / (peak * a.mfu), passes * talk),
        "optimizer": 28 * N / shards / memory,  # fp32: reads weight, gradient, two moments; writes three
    }
    beside = {"links": passes * talk, "step": sum(parts.values()), "most": max(parts, key=parts.get)}
    return facts | (parts | beside if fitting > 0 else dict.fromkeys(parts | beside))
