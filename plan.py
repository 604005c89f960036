"""Will it fit: the memory that a run takes on each rank, from config.json and flags alone, before anything is loaded.

    total = what is always there + max(peak while sampling, peak while learning + what stays of sampling)

The phases take turns: one needs gathered weights, keys and values, the other activations, logits and gradients. The
peak of a phase is the largest of a few moments, a moment is a sum of parts, and a part is a product of sizes with the
reason beside it. On CUDA what recorded decode steps hold on to stays while learning, where there is room for it. Where
the total is too much, `advice` finds flags of train.py that help, by doing the sum again.

Lives here: the arithmetic, and a table of published sizes, so that no network is needed. Not here: the files that hold
what is counted. tests/test_plan.py measures them on a CPU: within 8 %. On CUDA the formulas assume fused norms and
fused attention, and have not been measured.

    python plan.py --model qwen3-8b --gpus 8 --memory 80 --beta 0.04          # one plan; any flag of train.py
    python plan.py --model qwen3-0.6b qwen3-8b llama-3.1-70b --gpus 1 8 64    # a table, and what would fit
    python plan.py --model qwen3-0.6b --batch 2 4 8 16 32 64                  # without and with the chunked head

All in bytes. B rows, P prompts, S tokens of a prefix, T of a completion, M of a micro-batch without padding, N that
count; D width, F width of the MLP, V vocabulary, Q and K widths of all query heads and all key heads together
"""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from model import ALIASES, TINY, ModelConfig, Transformer, read_json
from sample import LOOK_EVERY, PREFILL_TOKENS, RECORDED, bucket, packed_type

GIB = 2**30
OUTSIDE = 2 * GIB  # of a GPU that no tensor ever gets: CUDA, cuBLAS, NCCL, fragments. An allowance, not a measurement.

# alias without -instruct: what config.json says of KEYS
KEYS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")  # fmt: skip
PUBLISHED = {
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-3b": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3.1-70b": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "smollm2-360m": ("llama", 960, 2560, 32, 15, 5, 64, 49152, True),
}


def find_config(name: str) -> ModelConfig:
    """Of `tiny`, a directory, an alias or a hub id: its config.json where that is on this machine, else PUBLISHED's.
    ValueError with the known names where there is neither; nothing is downloaded."""
    if name == "tiny":
        return ModelConfig.from_dict(TINY)
    if Path(name).is_dir():
        return ModelConfig.from_dict(read_json(Path(name) / "config.json"))
    repo = ALIASES.get(name.lower(), name)
    if repo.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache

        if isinstance(cached := try_to_load_from_cache(repo, "config.json"), str):
            return ModelConfig.from_dict(read_json(Path(cached)))
    alias = repo.split("/")[-1].lower().removesuffix("-instruct")
    if alias not in PUBLISHED:
        raise ValueError(f"model {name!r}: its sizes are not known here; pass a directory with its config.json, or one "
                         f"of: tiny, {', '.join(PUBLISHED)}")  # fmt: skip
    return ModelConfig.from_dict(dict(zip(KEYS, PUBLISHED[alias])))


# ---------------------------------------------------------------------------------------------------------------------
# Sizes that everything below multiplies


class Sizes(NamedTuple):
    """Numbers of parameters, as they are counted on the meta device. NF4 weights are in none but `nf4`."""

    total: int
    root: int  # embedding, last norm and head: what FSDP gathers once
    block: int  # the largest block
    trained: int
    trained_root: int
    trained_block: int
    nf4: int
    folded: int  # weights with an adapter
    packed: int  # weights of plain linears and the head, what sample.packed_linears lays out again
    ranks: int  # sum of r over the adapters of a block: the width of what they keep
    inputs: int  # sum of their widths of input: what dropout keeps
    adapted: frozenset[str]  # last components of their names


@functools.lru_cache  # advice asks for the same ones again and again
def sizes_of(raw: str, lora_r, targets, adapter, base) -> Sizes:
    import lora

    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(json.loads(raw)))
    if adapter:
        lora.load_adapter(model, adapter)
    elif lora_r:
        lora.add_lora(model, lora_r, 1, targets[3:] if targets.startswith("re:") else targets.split(","))

    def count(module, trained=False):
        return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)

    linears, blocks = lora.linears(model), model.model.layers
    adapted = [m for m in linears.values() if isinstance(m, lora.LoraLinear)]
    nf4 = sum(m.weight.numel() for m in linears.values()) if base == "nf4" else 0
    plain = sum(m.weight.numel() for m in linears.values() if base != "nf4" or m in adapted)
    of_blocks, trained = sum(map(count, blocks)), count(model, True)
    return Sizes(
        total=count(model) - nf4, root=count(model) - of_blocks, block=max(map(count, blocks)) - nf4 // len(blocks),
        trained=trained, trained_root=trained - sum(count(b, True) for b in blocks),
        trained_block=max(count(b, True) for b in blocks), nf4=nf4, folded=sum(m.weight.numel() for m in adapted),
        packed=plain + model.lm_head.weight.numel(), ranks=sum(m.r for m in adapted) // len(blocks),
        inputs=sum(m.in_features for m in adapted) // len(blocks),
        adapted=frozenset(name.split(".")[-1] for name, m in linears.items() if m in adapted),
    )  # fmt: skip


MicroBatch = namedtuple("MicroBatch", "P S B T M N count")  # count: how many an optimizer step takes


def micro_batch(cfg, world_size: int, prompt: int, completion: int) -> MicroBatch:
    """The largest that learner.cut makes where all prompts and completions have these lengths."""
    groups, G, room = -(-cfg.prompts_per_step // world_size), cfg.num_generations, cfg.micro_batch_tokens
    if cfg.shared_prefix:
        P, S, T = min(groups, room // (prompt + G * completion)), prompt - 1, completion
        B, P = (P * G, P) if P else (min(G, max(1, (room - prompt) // completion)), 1)  # whole groups, or part of one
    else:
        P, S, T, B = 0, 0, prompt - 1 + completion, min(groups * G, max(1, room // (prompt + completion)))
    return MicroBatch(P, S, B, T, P * S + B * T, B * completion, -(-groups * G // B))


class Plan(NamedTuple):
    """Parts by name. `held` is always there; of the two phases only one at a time is, but for `kept`."""

    held: dict[str, int]
    sampling: dict[str, int]
    kept: dict[str, int]  # of sampling, what stays while learning: recorded steps hold on to it
    learning: dict[str, int]
    host: dict[str, int]  # in CPU memory, where that is not the device
    allowance: int  # of the device's memory that no tensor gets
    setting: str  # what the numbers are for, in words

    @property
    def total(self) -> int:  # what torch.cuda.max_memory_allocated should say
        return size(self.held) + max(size(self.sampling), size(self.learning) + size(self.kept))

    def fits(self, memory: int) -> bool:
        return self.total + self.allowance <= memory

    def within(self, memory: int) -> Plan:
        """This plan, or where that does not fit, the one that keeps nothing: weights are gathered and steps recorded
        anew in each rollout."""
        return self if self.fits(memory) else self._replace(kept={})

    def lines(self) -> list[str]:
        out = [self.setting]
        titles = ("always", "while sampling", "of that, stays while learning", "while learning", "in CPU memory")
        for title, parts in zip(titles, (self.held, self.sampling, self.kept, self.learning, self.host)):
            if size(parts):
                out.append(f"{gib(size(parts)):>13}  {title}")
                if parts is not self.kept:  # those of sampling
                    out += [f"{gib(part):>17}  {name}" for name, part in parts.items() if part]
        return [*out, f"{gib(self.total):>13}  in all, with the larger of the two phases"]

    def report(self, memory: int) -> str:
        """The parts, the total, and whether it fits a device of `memory` bytes."""
        besides = f" beside {gib(self.allowance)} for CUDA itself" if self.allowance else ""
        verdict = "fits" if self.fits(memory) else "does not fit"
        return "\n".join([*self.lines(), f"{verdict} into {gib(memory)}{besides}"])


def size(parts: dict[str, int]) -> int:
    return sum(parts.values())


def gib(number: int) -> str:
    return f"{number / GIB:.2f} GiB"


# ---------------------------------------------------------------------------------------------------------------------
# The estimate


def estimate(config: ModelConfig, cfg, world_size: int, *, prompt=None, completion=None, per_node=None) -> Plan:
    """What each of world_size ranks holds at most, in bytes; cfg is train.py's Config.

    prompt, completion   tokens, all alike; default: the longest prompt, and of the completions up to the longest those
                         that take most (short ones can: more rows fit, and each copies its prompt's keys and values).
    per_node             ranks of a machine, for --shard hybrid; default: what torchrun says here, else 8.
    """
    prompt, longest = prompt or cfg.max_prompt_length, completion or cfg.max_completion_length
    lengths = [completion] if completion else sorted({-(-longest // 2**i) for i in range(longest.bit_length())})
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = cfg.dtype or ("bfloat16" if device == "cuda" else "float32")
    c = getattr(torch, dtype).itemsize
    sizes = sizes_of(json.dumps(config.raw), cfg.lora_r, cfg.lora_targets, cfg.adapter, cfg.base)
    wrapped = world_size > 1 or dtype != "float32" or cfg.cpu_offload  # see fsdp.shard
    per_node = per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 8))
    parts = {"full": world_size, "hybrid": min(per_node, world_size), "none": 1}[cfg.shard]  # a parameter is cut into
    adapted = bool(cfg.lora_r or cfg.adapter)
    reference = bool(cfg.beta) and not adapted

    masters = {
        "master weights, fp32": 4 * sizes.total // parts,
        "AdamW's two moments, fp32": 8 * sizes.trained // parts,
        "reference model, fp32": 4 * sizes.total // parts * reference,
    }
    gradients = 4 * sizes.trained // parts
    held = {  # what no sharding spreads: buffers
        # 4 bits a weight, 8 bits for 64 of them, and 4 bytes for 64 · 256
        "base in NF4": sizes.nf4 // 2 + sizes.nf4 // 64 + sizes.nf4 // 4096,
        "starting adapter": 4 * sizes.trained if cfg.adapter else 0,
        # reference passes have no backward, after which FSDP would free what it gathered at the root
        "reference model's root, gathered": sizes.root * c * (reference and wrapped),
    }
    host = {"a checkpoint on its way to disk": (4 + 8) * sizes.trained // parts if cfg.save_every else 0}
    if cfg.cpu_offload:
        host |= masters | {"gradients": gradients}
        gradients = 0
    else:
        held |= masters
    if device == "cpu":  # one memory for both
        held, host = held | host, {}

    setup = (config, cfg, sizes, device, c)
    sampling, kept = rollout(*setup, wrapped, world_size, prompt, longest)
    batches = [micro_batch(cfg, world_size, prompt, length) for length in lengths]
    moments = [(moment, mb) for mb in batches for moment in step(*setup, wrapped, parts, gradients, mb)]
    learning, mb = max(moments, key=lambda entry: sum(entry[0].values()))
    setting = (
        f"each of {world_size} ranks, {dtype} on {device}: prompts of {prompt} tokens, completions of up to {longest}; "
        f"at most (the lengths that take most) a micro-batch of {mb.B} completions of {mb.N // mb.B}, {mb.count} a step"
    )
    return Plan(held, sampling, kept, learning, host, OUTSIDE if device == "cuda" else 0, setting)


def rollout(config, cfg, sizes, device, c, wrapped, world_size, prompt, completion) -> tuple[dict, dict]:
    """The peak of sample.generate: weights, and the largest of what is there beside them at one time or another. And
    what of it stays where it lies for the next rollout, because recorded steps hold its addresses."""
    D, F, V, layers = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers
    Q, K = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    prompts = -(-cfg.prompts_per_step * cfg.steps_per_generation // world_size)
    rows, tested = prompts * cfg.num_generations, -(-cfg.eval_problems // world_size) * bool(cfg.eval_every)
    rows, prompts = max(rows, tested * max(1, cfg.eval_samples)), max(prompts, tested)
    token, recorded = 2 * layers * K * c, device in RECORDED  # keys and values of a token
    limit = bucket(prompt + completion + LOOK_EVERY[device] - 1)  # tokens of the longest row
    rows = min(rows, max(1, cfg.kv_bytes // (token * limit)), cfg.max_batch or rows)
    start = before = capacity = limit if recorded else bucket(prompt + min(completion, 64))
    while capacity < limit:  # as KVCache.grow
        before, capacity = capacity, min(bucket(capacity * 3 // 2), limit)
    prefill = min(min(rows, prompts) * (prompt - 1), max(PREFILL_TOKENS, prompt - 1))  # tokens at a time

    packed = packed_type(torch.bfloat16 if c == 2 else torch.float32) if device == "cpu" else None
    laid_out = packed.itemsize if packed else 0  # bytes of a number in sample.packed_linears
    weights = {
        "weights gathered": sizes.total * c * wrapped,
        # lora.merged: where linears are laid out anew, they are folded one by one
        "adapters folded in": 4 * sizes.folded * (device == "cpu" and c == 4 and not laid_out),
        "weights laid out for oneDNN": sizes.packed * laid_out,
    }
    # Logits, and as weights, fp32; filled up to whole blocks; sorted, scanned and cut for top_p. Recorded steps have
    # one memory for theirs, beside which a first step of a kind, which is not recorded, needs as much.
    draws = rows * V * (c * (c < 4) + 4 * (2 + bool(V % 128) + 6 * (cfg.top_p < 1)))
    cache = {"keys and values": rows * limit * token}
    records = {"recorded steps": draws * recorded}
    moments = [
        {"the head, while it is laid out": V * D * laid_out * (laid_out != c)},  # in another type
        records | {"keys and values": rows * start * token, "prompts' keys and values": prefill * token,
                   "a prefill's activations": prefill * (2 * D + max(3 * F, 3 * Q + 3 * K)) * c},
        cache | {"what a layer's grew from": rows * before * K * c * (before < limit)},
        cache | records | {"logits and draws": draws + rows * 8 * completion},
    ]  # fmt: skip
    kept = {"weights gathered": weights["weights gathered"]} | cache | records if recorded else {}
    return weights | max(moments, key=size), kept


def step(config, cfg, sizes, device, c, wrapped, parts, gradients, mb: MicroBatch) -> list[dict[str, int]]:
    """The moments of learner.optimizer_step that can be its peak."""
    D, F, V, L = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers
    Q, K = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    H, (P, S, B, T, M, N, count) = config.num_attention_heads, mb
    trains_head = sizes.trained_root > 0
    before = gradients if count > 1 else 0  # of earlier micro-batches

    # What a block keeps for its backward. A norm: its input, on a CPU in fp32, and normalised if its weight is trained
    norm = c if device == "cuda" else 4 + 4 * trains_head

    def read(*names):  # whether the input of any of these linears is kept, for the gradient of its weight or adapter
        return trains_head or not cfg.lora_dropout and not sizes.adapted.isdisjoint(names)

    block = M * D * (2 * norm + c * (read("q_proj", "k_proj", "v_proj") + read("gate_proj", "up_proj")))  # norms
    block += M * (Q + K) * norm * config.qk_norm  # queries and keys before their norms
    block += M * F * c * (3 + read("down_proj"))  # gate, silu(gate), up, and their product
    block += M * 4 * (2 + H + (H + config.num_key_value_heads) * config.qk_norm)  # one number a norm, one a softmax
    if not trains_head:  # x A; with dropout also the factors, on CUDA as bytes, and x times them
        block += M * (sizes.ranks * c + sizes.inputs * (c + (1 if device == "cuda" else c)) * bool(cfg.lora_dropout))
    if cfg.shared_prefix:  # model.Packed: a line of tokens, laid out for attention and back
        block += M * (Q * (1 + read("o_proj")) + 2 * K) * c  # the line's q, k, v, and what o_proj reads
        block += P * S * (2 * Q + 2 * K) * c  # prefixes: q, k, v, y
        block += B * T * 2 * Q * c + B * (S + T) * 2 * K * c  # rows: q and y; k and v with their prefix's
        block += B * T * (S + T) * c  # the mask as numbers to add
    else:
        block += M * (2 * Q + 2 * K) * c  # q, k, v, y
    line = M * 2 * config.head_dim * c + B * T * (S + T)  # for all blocks: cos and sin, the mask
    last_norm = M * D * (norm + c)

    # Gradients inside a block's backward: in its MLP; or, what the MLP kept being free by then, in its attention
    mlp, attention = M * (2 * F + 2 * D) * c, (B * T * 2 * Q + B * (S + T) * 2 * K + M * D) * c
    # or, over NF4, with the MLP's last weight dequantised, without Triton by way of fp32 and int32 codes
    dequantised = F * D * (c if device == "cuda" else 6) + M * (F + 2 * D) * c if sizes.nf4 else 0
    backward = max(mlp, attention - M * 4 * F * c, dequantised)

    hidden = (2 * N + B * T) * D * c  # hidden states of rows, those that count, and their gradient
    if cfg.chunked_head:
        rows = -(-N // -(-N // max(1, cfg.chunk_bytes // (4 * V))))  # chunks of equal size
        head = hidden + rows * V * 4 * 34 // 32  # the buffer, and scratch of a 32nd twice
        head += V * D * (4 + c * (c < 4)) * trains_head  # dW is summed in fp32, and cast
        head += 4096 * D * 4 * (device == "cpu" and c == 2)  # a tile of W in fp32
        kept_by_head = V * D * c * trains_head
    else:  # log-probs, and two like them, forward and backward; the entropy's graph where it is used
        head, kept_by_head = hidden + N * V * 4 * (5 if cfg.entropy_coef else 3), V * D * c * trains_head

    # FSDP gathers the root for a whole pass and blocks one by one: this one, what the last and the next arrive in;
    # "none" keeps all until the backward is through. Gradients travel in fp32, a block's beside those of the last.
    blocks, travelling = (1, 1) if parts == 1 else (3, 2)
    root, gathered = ((sizes.total, sizes.total) if cfg.shard == "none" else
                      (sizes.root + sizes.block, sizes.root + blocks * sizes.block))  # fmt: skip
    root, gathered, reduced = root * c * wrapped, gathered * c * wrapped, travelling * 4 * sizes.trained_block * wrapped
    kept, again = (M * D * c, block) if cfg.gradient_checkpointing else (block, 0)
    kept = kept * L + line
    # a tied embedding's gradient is formed beside the head's, any beside earlier ones; FSDP sums in fp32 and divides
    last = 4 * V * D * trains_head * (config.tie_word_embeddings + (count > 1))
    if wrapped:
        last = 4 * sizes.trained_root + 4 * sizes.trained_root // parts
    missing = sizes.trained_block + sizes.trained_root * wrapped  # gradients that come after all other blocks'
    most = before or gradients - min(gradients, 4 * missing // parts)
    names = ("gathered weights", "gradients", "activations", "a block again, for its backward",
             "gradients inside a block", "head: logits, dH, dW", "gradients to be summed")  # fmt: skip
    moments = [
        (root, before, kept + last_norm, 0, 0, head, 0),  # in the head
        (gathered, before, kept, again, backward, kept_by_head, 0),  # in the last block's backward
        (gathered, most, block + line, 0, backward, kept_by_head * wrapped, reduced),  # in the first block's
        (0, gradients, 0, 0, 0, 0, last),  # in the embedding's
    ]
    return [dict(zip(names, moment)) for moment in moments]


# ---------------------------------------------------------------------------------------------------------------------
# What would fit


def levers(cfg) -> list[tuple[str, object]]:
    """Flags that save memory and do not change what is learned, those that cost least time first."""
    tokens = [("micro_batch_tokens", max(1, cfg.micro_batch_tokens >> i)) for i in range(1, 6)]
    return [("shard", "full"), ("chunked_head", True), ("kv_bytes", GIB), tokens[0], ("kv_bytes", GIB // 4),
            ("gradient_checkpointing", True), *tokens[1:],
            *([] if cfg.lora_r or cfg.adapter else [("cpu_offload", True)])]  # fmt: skip


def search(config, cfg, world_size: int, memory: int) -> tuple[dict, Plan] | None:
    """The levers that make cfg fit on so many ranks, none without need, and the plan that shows it; None: none do."""

    def trial(changes):
        return estimate(config, replace(cfg, **changes), world_size).within(memory)

    def everything(plan):  # both phases: what shrinks the smaller one counts once the larger one has shrunk
        return size(plan.held) + size(plan.sampling) + size(plan.learning)

    changes, plan = {}, trial({})
    for name, value in levers(cfg):
        if not plan.fits(memory) and everything(smaller := trial(changes | {name: value})) < everything(plan):
            changes, plan = changes | {name: value}, smaller
    for name in list(changes):
        fewer = {key: value for key, value in changes.items() if key != name}
        if (without := trial(fewer)).fits(memory):
            changes, plan = fewer, without
    return (changes, plan) if plan.fits(memory) else None


def advice(config: ModelConfig, cfg, world_size: int, memory: int) -> list[str]:
    """Ways to make fit what does not, one a line, each found by doing the sum again: with these GPUs, with more, and
    where these do not help by training adapters, over a base in four bits if need be. [] where there is none."""
    ways, more = [], [world_size << i for i in range(1, 11) if world_size << i <= 1024]

    def attempt(changes, n):
        if found := search(config, replace(cfg, **changes), n, memory):
            words = [f"--{name} {str(value).lower()}" for name, value in (changes | found[0]).items()]
            host = f" and {gib(size(found[1].host))} of CPU memory" if "cpu_offload" in found[0] else ""
            words += [f"on {n} GPUs"] if n != world_size else []
            ways.append(f"{' '.join(words)}: {gib(found[1].total)} each{host}")
        return found

    attempt({}, world_size)
    for n in more:
        if estimate(config, cfg, n).within(memory).fits(memory):
            attempt({}, n)
            break
        if not ways:  # with fewer, and flags
            attempt({}, n)
    adapters = {} if cfg.lora_r or cfg.adapter else {"lora_r": 16}
    if not ways and not (adapters and attempt(adapters, world_size)) and cfg.base == "keep":
        attempt(adapters | {"base": "nf4"}, world_size)
    most = estimate(config, cfg, 1024)
    name, part = max((most.sampling | most.learning).items(), key=lambda entry: entry[1])
    if part > memory:
        ways.append(f"no number of GPUs as it is: {name} alone take {gib(part)} on each")
    return ways


def answer(config: ModelConfig, cfg, world_size: int, memory: int) -> str:
    """The plan, whether it fits into `memory` bytes on each rank, and where it does not, what would."""
    plan = estimate(config, cfg, world_size).within(memory)
    if plan.fits(memory):
        return plan.report(memory)
    ways = advice(config, cfg, world_size, memory) or ["nothing that is known here"]
    return "\n    ".join([plan.report(memory), "it would fit with", *ways])


# ---------------------------------------------------------------------------------------------------------------------
# What there is, and what was taken


def device_memory(device: str | None) -> int:
    """Bytes of this process's GPU, or of the machine's memory divided among the processes on it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; `python plan.py --memory` plans for one elsewhere")
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def peak_memory(device: str) -> int:
    """Most bytes so far: of tensors on the GPU, or of the whole process on a CPU, Python and torch included."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------------------------------------------------------
# On the command line


def main():
    import argparse

    from train import config_from

    about = "Will it fit? Takes every flag of train.py besides these."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--model", nargs="+", default=[None], help="aliases, directories or hub ids")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], help="ranks; several numbers make a table")
    parser.add_argument("--memory", type=float, default=80, help="GiB of each device (default 80)")
    parser.add_argument("--batch", type=int, nargs="+", help="a table: steps of so many completions")
    args, flags = parser.parse_known_args()
    for name, least in (("gpus", min(args.gpus)), ("batch", min(args.batch or [1]))):
        if least < 1:
            raise ValueError(f"--{name} is {least}, but must be at least 1")
    memory, runs = int(args.memory * GIB), []
    for name in args.model:
        cfg = config_from([*(["--model", name] if name else []), *flags])
        runs.append((cfg.model, find_config(cfg.model), replace(cfg, device=cfg.device or "cuda")))
    if args.batch:
        return [print_batches(*run, args.batch) for run in runs]
    plans = [(name, config, cfg, n, estimate(config, cfg, n).within(memory)) for name, config, cfg in runs
             for n in args.gpus]  # fmt: skip
    if len(plans) == 1:
        return print(answer(*plans[0][1:4], memory))
    print(f"| model | GPUs | always | while sampling | while learning | total | in {args.memory:g} GiB |")
    print("|---|---|---|---|---|---|---|")
    for name, _, _, n, plan in plans:
        sums = [*map(size, (plan.held, plan.sampling, plan.learning)), plan.total]
        verdict = "fits" if plan.fits(memory) else "does not fit"
        print("|", " | ".join([name, str(n), *map(gib, sums), verdict]), "|")
    for name, config, cfg, n, plan in plans:
        if not plan.fits(memory):
            ways = advice(config, cfg, n, memory) or ["nothing that is known here"]
            print("\n    ".join([f"\n{name} on {n} would fit with", *ways]))


def print_batches(name, config, cfg, batches):
    """The learner's peak with the plain and the chunked head, in fp32 and bf16, on one device."""
    print(f"{name} on one device, what is always there and the peak while learning: prompts of {cfg.max_prompt_length} "
          f"tokens, each with up to {cfg.num_generations} completions of {cfg.max_completion_length}; "
          "all of a step in one micro-batch\n")  # fmt: skip
    print("| completions | fp32: plain head | chunked | saved | bf16: plain head | chunked | saved |")
    print("|---|---|---|---|---|---|---|")
    for batch in batches:
        cells, group = [str(batch)], math.gcd(batch, cfg.num_generations)
        step = replace(cfg, num_generations=group, prompts_per_step=batch // group,
                       micro_batch_tokens=batch * (cfg.max_prompt_length + cfg.max_completion_length))  # fmt: skip
        for dtype in ("float32", "bfloat16"):
            plans = [estimate(config, replace(step, dtype=dtype, chunked_head=chunked), 1,
                              completion=cfg.max_completion_length) for chunked in (False, True)]  # fmt: skip
            peaks = [size(plan.held) + size(plan.learning) for plan in plans]
            cells += [*map(gib, peaks), f"{1 - peaks[1] / peaks[0]:.0%}"]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"plan.py: {error}")
