"""Low-rank adapters, the reference model they give for free, and base weights in four bits.

    y = W x + s · B A x        A (r, in), B (out, r);  s = alpha / r, or alpha / √r with rsLoRA

W is frozen, A starts Kaiming-uniform and B at zero, so a fresh adapter changes nothing, and the model with its adapter
switched off is the model that training started from: KL needs no second copy of the weights.
LoRA: Hu et al., arXiv:2106.09685. rsLoRA: Kalajdzievski, arXiv:2312.03732.

QLoRA (Dettmers et al., arXiv:2305.14314) keeps W in NF4: each block of 64 weights is divided by its absmax and rounded
to one of 16 quantiles of a normal distribution; the absmax are themselves stored in 8 bits, in blocks of 256. Together
4 + 8/64 + 32/(64·256) = 4.127 bits, or 0.516 bytes, a weight.

Lives here: adapters added, switched off, merged, and saved and loaded in PEFT's format; NF4 linears and their kernel.
Not here: reading base weights (model.py's load_model calls add_lora as `prepare`, so that a quantised model is never
held in full), training, sharding. Everything here works on sharded parameters, except what needs W whole: merging.

Try it:  python lora.py --model NAME --adapter runs/NAME/adapter --out merged     (one Hugging Face directory)
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

try:
    import triton
    import triton.language as tl
except ImportError:  # no CUDA build of torch: the same in torch ops
    triton = None

DEFAULT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# ---------------------------------------------------------------------------------------------------------------------
# NF4


# The quantiles of N(0,1), scaled to [-1, 1] and with an exact zero: QLoRA's appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@functools.cache
def code_books(device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16 values of NF4, and the 256 of the dynamic 8-bit type that stores the absmax, both fp32 and sorted.

    The dynamic type (Dettmers et al., arXiv:2110.02861) gives each decade from 1e-6 to 1 twice as many values as the
    decade below it: the middles of 2^e equal pieces of [0.1, 1], times 10^(e-6), with both signs; and 0 and 1.
    """
    values = [torch.tensor([0.0, 1.0])]
    for e in range(7):
        edges = torch.linspace(0.1, 1, 2**e + 1)
        middles = 10.0 ** (e - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles]
    return torch.tensor(NF4, device=device), torch.cat(values).sort().values.to(device)


def round_to(values, book):
    """Index of the value of the sorted book nearest to each of values; a tie goes to the lower one."""
    return torch.bucketize(values, (book[:-1] + book[1:]) / 2, out_int32=True).to(torch.uint8)


@torch.no_grad()
def quantise_blocks(values, size: int, book):
    """values in any shape -> (codes uint8 padded to whole blocks, absmax (blocks,) fp32)."""
    values = values.detach().float().flatten()
    blocks = F.pad(values, (0, -len(values) % size)).view(-1, size)
    absmax = blocks.abs().amax(1)
    # Times the reciprocal, not divided: as bitsandbytes has it, and it decides near ties.
    return round_to(blocks * (1 / absmax.clamp(min=1e-38))[:, None], book).flatten(), absmax


def quantise_nf4(weight):
    """weight -> codes (n/2,) two a byte, the first in the high half; scale_codes (n/64,); scale_absmax (n/16384,);
    scale_mean (). n is the number of weights, padded to whole blocks."""
    nf4, dynamic = code_books(weight.device)
    codes, absmax = quantise_blocks(weight, 64, nf4)
    mean = absmax.mean()  # absmax are positive: without their mean, half of the 8-bit codes would never be used
    scale_codes, scale_absmax = quantise_blocks(absmax - mean, 256, dynamic)
    return codes[::2] << 4 | codes[1::2], scale_codes[: len(absmax)], scale_absmax, mean


def dequantise_nf4(codes, scale_codes, scale_absmax, scale_mean, shape, dtype):
    """What quantise_nf4 returned -> the weight, as `shape` in dtype; computed in fp32, rounded once."""
    if codes.is_cuda and triton is not None:
        return dequantise_triton(codes, scale_codes, scale_absmax, scale_mean, shape, dtype)
    nf4, dynamic = code_books(codes.device)
    absmax = dynamic.index_select(0, scale_codes.int())
    absmax = absmax * scale_absmax.repeat_interleave(256)[: len(absmax)] + scale_mean
    pairs = torch.cartesian_prod(nf4, nf4)  # (256,2): both weights of a byte at one look, moved as one 8-byte number
    blocks = pairs.view(torch.float64)[:, 0].index_select(0, codes.int()).view(torch.float32).view(-1, 64)
    return blocks.mul_(absmax[:, None]).flatten()[: math.prod(shape)].view(shape).to(dtype)


if triton is not None:

    @triton.jit
    def dequantise_kernel(out, codes, scale_codes, scale_absmax, scale_mean, nf4, dynamic, n, BYTES: tl.constexpr):
        start = tl.program_id(0).to(tl.int64) * BYTES
        at = start + tl.arange(0, BYTES)  # bytes: two weights each, 32 a block
        block, inside = at // 32, at * 2 < n
        byte = tl.load(codes + at, inside, other=0).to(tl.int32)
        scale = tl.load(dynamic + tl.load(scale_codes + block, inside, other=0).to(tl.int32))
        absmax = scale * tl.load(scale_absmax + block // 256, inside, other=0) + tl.load(scale_mean)
        weights = tl.interleave(tl.load(nf4 + (byte >> 4)) * absmax, tl.load(nf4 + (byte & 15)) * absmax)
        to = start * 2 + tl.arange(0, BYTES * 2)
        tl.store(out + to, weights.to(out.dtype.element_ty), to < n)


def dequantise_triton(codes, scale_codes, scale_absmax, scale_mean, shape, dtype, BYTES=1024):
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(out.numel(), 2 * BYTES),)
    books = code_books(codes.device)
    dequantise_kernel[grid](out, codes, scale_codes, scale_absmax, scale_mean, *books, out.numel(), BYTES)
    return out


class NF4Product(torch.autograd.Function):
    """x Wᵀ for a frozen W in NF4. The backward pass dequantises once more instead of keeping W."""

    @staticmethod
    def forward(ctx, x, shape, *quantised):
        ctx.save_for_backward(*quantised)
        ctx.shape = shape
        return F.linear(x, dequantise_nf4(*quantised, shape, x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        quantised = ctx.saved_tensors  # asked for once: under checkpointing, asking recomputes the block
        return grad @ dequantise_nf4(*quantised, ctx.shape, grad.dtype), *(None for _ in (ctx.shape, *quantised))


class NF4Linear(nn.Linear):
    """A frozen linear whose weight is NF4, dequantised to the type of its input at each use.

    The four buffers are not in the state dict: the base is read from its checkpoint again. Under sharding each rank
    holds all of them. They are buffers because sharding and its mixed precision would cast parameters.
    """

    @staticmethod
    def convert(linear: nn.Linear):
        """Turns a plain linear into this class, in place; on the meta device, values come later by `load_tensor`."""
        weight = linear._parameters.pop("weight")
        linear.__class__, linear.dtype = NF4Linear, weight.dtype
        for name, values in zip(("codes", "scale_codes", "scale_absmax", "scale_mean"), quantise_nf4(weight)):
            linear.register_buffer(name, values, persistent=False)

    def quantised(self):
        return self.codes, self.scale_codes, self.scale_absmax, self.scale_mean

    def load_tensor(self, name: str, tensor):
        if name == "bias":
            return assign(self.bias, tensor)
        for buffer, values in zip(self.quantised(), quantise_nf4(tensor.to(self.codes.device))):
            buffer.copy_(values)

    @property
    def weight(self):  # a fresh tensor each time: writing to it changes nothing
        return dequantise_nf4(*self.quantised(), (self.out_features, self.in_features), self.dtype)

    def forward(self, x):
        y = NF4Product.apply(x, (self.out_features, self.in_features), *self.quantised())
        return y if self.bias is None else y + self.bias


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


SHARDED = "merging needs whole weights, but these are sharded: merge inside fsdp.unsharded(model)"


class LoraLinear(nn.Linear):
    """A linear with an adapter. `weight` keeps its name and is frozen; lora_A (r,in) and lora_B (out,r) are fp32.

    mode is what the adapter does now: "on", "off", "start" (the adapter that training started from, for a model that
    did not start fresh) or "merged" (`folded` is used instead of weight; `merges` is the mode that it was in).
    start_A, start_B are buffers, in the state dict, whole on every rank. A resumed run loads its starting adapter first
    and then its checkpoint, and a fresh one has none: so after a resume too, "start" is where training started.
    """

    def adapt(self, r: int, alpha: float, rslora: bool, dropout: float):
        self.r, self.alpha, self.rslora, self.dropout = r, alpha, rslora, dropout
        self.scale = alpha / (math.sqrt(r) if rslora else r)
        device = (self.codes if isinstance(self, NF4Linear) else self.weight).device
        self.lora_A = nn.Parameter(torch.empty(r, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, r, dtype=torch.float32, device=device))
        self.register_buffer("start_A", None)
        self.register_buffer("start_B", None)
        self.mode, self.merges, self.kept = "on", None, None
        self.arriving = None  # (A, B) from a file, kept until the model leaves the meta device
        if device.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Puts the adapter where training starts: at the one that was loaded, or at PEFT's start. The base stays."""
        if self.arriving is not None:
            A, B = self.arriving
            self.start_A, self.start_B = (x.clone().to(self.lora_A.device, torch.float32) for x in (A, B))
            self.arriving = None
        else:  # whole and on the CPU, so that every rank of any number draws the same
            A = torch.empty(self.r, self.in_features, device="cpu")
            nn.init.kaiming_uniform_(A, a=math.sqrt(5))
            B = torch.zeros(self.out_features, self.r, device="cpu")
        assign(self.lora_A, A)
        assign(self.lora_B, B)

    def factors(self):
        mode = self.merges if self.mode == "merged" else self.mode
        return {"on": (self.lora_A, self.lora_B), "start": (self.start_A, self.start_B), "off": None}[mode]

    @torch.no_grad()
    def fold(self):
        """W + s B A as a new tensor of the base's type, computed in fp32 (fp64 for fp64 weights) and rounded once."""
        if hasattr(self.lora_A, "device_mesh"):
            raise ValueError(SHARDED)
        weight, dtype = self.weight, base_dtype(self)
        weight = weight.to(torch.promote_types(dtype, torch.float32))
        if factors := self.factors():
            A, B = (x.to(weight.dtype) for x in factors)
            weight = torch.addmm(weight, B, A, alpha=self.scale)
        return weight.detach().to(dtype)

    @property
    def folded(self):
        """While merged, the one weight to multiply by, made anew for a sampler that keeps it in a layout of its own."""
        return self.fold() if self.mode == "merged" else None

    def forward(self, x):
        if self.mode == "merged":
            if self.kept is None:
                self.kept = self.folded
            return F.linear(x, self.kept, self.bias)
        y = super().forward(x)
        if self.mode == "off":
            return y
        A, B = self.factors()
        # Dropout only where a gradient is wanted: sampling and scoring are deterministic without anyone's .eval().
        if self.dropout and self.training and torch.is_grad_enabled():
            x = F.dropout(x, self.dropout)
        return y + F.linear(F.linear(x, A.to(x.dtype)) * self.scale, B.to(x.dtype))

    def extra_repr(self):
        return f"{super().extra_repr()}, r={self.r}, alpha={self.alpha}"


class NF4LoraLinear(LoraLinear, NF4Linear):
    """An adapter on an NF4 base: LoraLinear's `super().forward` is NF4Linear's."""


def base_dtype(module: nn.Linear) -> torch.dtype:
    return module.dtype if isinstance(module, NF4Linear) else module.weight.dtype


def assign(parameter, whole):
    """Copies a whole tensor into a parameter, or this rank's part of it into a sharded one."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        parameter = parameter.to_local()
    parameter.detach().copy_(whole)


def gather(parameter):
    """The whole of a parameter on the CPU, a sharded one's too (all ranks must call)."""
    parameter = parameter.detach()
    if hasattr(parameter, "device_mesh"):
        parameter = parameter.to(parameter.device_mesh.device_type).full_tensor()
    return parameter.cpu()


WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}


def linears(model, kind=nn.Linear) -> dict[str, nn.Linear]:
    """name -> linear, the head's not among them; names without what torch.compile and other wrappers put into them."""
    found = {".".join(part for part in name.split(".") if part not in WRAPPERS): module
             for name, module in model.named_modules() if isinstance(module, kind)}  # fmt: skip
    return {name: module for name, module in found.items() if name.split(".")[-1] != "lm_head"}


def match_targets(names, targets) -> list[str]:
    """The linears that targets name: a list of names, each the last components of a linear's ("q_proj",
    "self_attn.q_proj"), a regular expression for whole names, or "all-linear". ValueError if one matches nothing."""
    there = sorted({name.split(".")[-1] for name in names})
    if targets == "all-linear":
        return list(names)
    if isinstance(targets, str):
        try:
            matched = [name for name in names if re.fullmatch(targets, name)]
        except re.error as error:
            raise ValueError(f"targets: {targets!r} is no regular expression: {error}") from None
        if not matched:
            raise ValueError(
                f"targets: the regular expression {targets!r} matches no linear's whole name, such as "
                f"{next(iter(names), None)!r}; a list of last components may name: {', '.join(there)}"
            )
        return matched
    for target in targets:
        if not any(is_tail(target, name) for name in names):
            close = difflib.get_close_matches(target, there, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            if target == "lm_head":
                hint = " (the head is called with its weight and takes no adapter)"
            raise ValueError(f"targets: {target!r} matches no linear{hint}; known: {', '.join(there)}")
    matched = [name for name in names if any(is_tail(target, name) for target in targets)]
    if not matched:
        raise ValueError(f"targets is empty: nothing would be trained; known: {', '.join(there)}")
    return matched


def is_tail(target: str, name: str) -> bool:
    return f".{name}".endswith(f".{target}")  # whole components: "proj" is not the tail of "out_proj"


def by_pattern(label: str, pattern: dict, names, default) -> dict:
    """name -> the value of the first key of pattern that matches the end of the name, as PEFT reads them."""
    matches = {key: [name for name in names if re.match(rf"(.*\.)?({key})$", name)] for key in pattern}
    for key, matched in matches.items():
        if not matched:
            raise ValueError(f"{label}: {key!r} matches none of the targeted linears, such as {names[0]!r}")
    return {name: next((pattern[key] for key in pattern if name in matches[key]), default) for name in names}


def add_lora(model, r=16, alpha=32, targets=DEFAULT, dropout=0.0, rslora=False, base="keep", *,
             rank_pattern=None, alpha_pattern=None):  # fmt: skip
    """Freezes model and puts adapters on the linears that `targets` names (see match_targets). Returns model.

    base           "nf4": all linears but the head are stored as NF4, those without an adapter too.
    rank_pattern   {name or regular expression: r} for linears that differ; alpha_pattern alike.
    Works before the weights are there (as load_model's `prepare`) and after. ValueError names a bad value.
    """
    if base not in ("keep", "nf4"):
        raise ValueError(f"base is {base!r}, but must be keep or nf4")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}, but must be at least 0 and below 1")
    if linears(model, LoraLinear):
        raise ValueError("the model has adapters already: merge_adapter first")
    plain = linears(model)
    names = match_targets(plain, targets)
    ranks = by_pattern("rank_pattern", rank_pattern or {}, names, r)
    alphas = by_pattern("alpha_pattern", alpha_pattern or {}, names, alpha)
    for name, rank in ranks.items():
        if not (isinstance(rank, int) and rank >= 1):
            raise ValueError(f"r is {rank!r} for {name}, but must be an integer of at least 1")
    model.requires_grad_(False)
    for name, module in plain.items():
        if base == "nf4":
            NF4Linear.convert(module)
        if name in ranks:
            # The class changes in place, as fully_shard does it: place, name, weight and hooks stay what they were.
            module.__class__ = NF4LoraLinear if base == "nf4" else LoraLinear
            module.adapt(ranks[name], alphas[name], rslora, dropout)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Switching: three context managers, nestable, each restores what it found, also after an exception


@contextmanager
def switched(model, choose):
    """Inside, every adapter is in the mode that choose(module) returns."""
    modules = linears(model, LoraLinear).values()
    before = [(module, module.mode, module.merges, module.kept) for module in modules]
    try:
        for module in modules:
            mode, module.kept = choose(module), None
            if mode == "merged" != module.mode:
                module.merges = module.mode
            module.mode = mode
        yield model
    finally:
        for module, *state in before:
            module.mode, module.merges, module.kept = state


def disabled(model):
    """Inside, the bare base, bit for bit."""
    return switched(model, lambda module: "off")


def reference(model):
    """Inside, the model that training started from: the base for a fresh adapter, else the adapter that was loaded."""
    if not linears(model, LoraLinear):
        raise ValueError("reference: the model has no adapters, so nothing in it says where training started")
    return switched(model, lambda module: "off" if module.start_A is None else "start")


def merged(model):
    """Inside, the adapter is folded into one weight: no extra products while sampling.

    The originals are not touched, so what comes afterwards is exact. A sampler that lays weights out anew takes
    `module.folded`; who just calls the model makes a folded copy of each weight at its first use, kept while merged.
    Only in fp32: around 1, bf16 steps by 0.0078, and smaller changes would vanish (ValueError).
    """
    for name, module in linears(model, LoraLinear).items():
        for dtype in (base_dtype(module), module.lora_A.dtype):  # NF4 computes in the adapter's type
            if dtype in (torch.bfloat16, torch.float16):
                raise ValueError(f"merged: {name} is {dtype}, where small changes are rounded away; merge in float32")
        if hasattr(module.lora_A, "device_mesh"):
            raise ValueError(SHARDED)
    return switched(model, lambda module: "merged")


def merge_adapter(model):
    """Folds the adapters in for good and leaves plain linears, ready for save_model. Returns model.

    The sum is formed in fp32 and rounded once to the base's type; NF4 weights become the type they were loaded in.
    In bf16 a change below half a step of its weight is lost: export fp32 where that matters.
    """
    for module in linears(model, (LoraLinear, NF4Linear)).values():
        weight = module.fold() if isinstance(module, LoraLinear) else module.weight
        for kind in (module._parameters, module._buffers):
            for name in set(kind) - {"bias"}:
                delattr(module, name)
        module.__class__ = nn.Linear
        module.weight = nn.Parameter(weight, requires_grad=False)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# PEFT's two files


CONFIG_FILE, WEIGHTS_FILE, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

# Keys of adapter_config.json that are read here, or that change nothing about what an adapter computes. Any other that
# is set asks for something else (DoRA, trained biases, some layers only), and is refused by name.
KNOWN = {
    "peft_type", "r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern",
    "init_lora_weights", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "peft_version", "megatron_core", "qalora_group_size", "eva_config", "loftq_config", "runtime_config",
}  # fmt: skip


def save_adapter(model, directory):
    """Writes PEFT's adapter_config.json and adapter_model.safetensors: of the adapter, or, inside `reference`, of the
    one that training started from. With several processes all must call; the first writes, and all wait for it."""
    modules = linears(model, LoraLinear)
    if not modules:
        raise ValueError("save_adapter: the model has no adapters")
    tensors = {}
    for name, module in modules.items():
        if (factors := module.factors()) is None:
            raise ValueError("save_adapter: the adapters are off here (disabled, or the reference of fresh ones)")
        A, B = factors
        tensors[f"{PREFIX}{name}.lora_A.weight"] = gather(A).contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = gather(B).contiguous()
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_rank() == 0:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        config = json.dumps(peft_config(model, modules), indent=2) + "\n"
        (directory / CONFIG_FILE).write_text(config, encoding="utf-8")
    if several:
        torch.distributed.barrier()


def peft_config(model, modules: dict[str, LoraLinear]) -> dict:
    """adapter_config.json of these adapters: the most common r and alpha, and patterns for those that differ."""
    tails = {name.split(".")[-1] for name in modules}
    every = all(name in modules for name in linears(model) if name.split(".")[-1] in tails)
    r, alpha = (Counter(values).most_common(1)[0][0] for values in
                ([m.r for m in modules.values()], [m.alpha for m in modules.values()]))  # fmt: skip
    one, source = next(iter(modules.values())), getattr(model, "source", None)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if source is None else str(source),
        "r": r,
        "lora_alpha": alpha,
        "target_modules": sorted(tails if every else modules),
        "lora_dropout": one.dropout,
        "use_rslora": one.rslora,
        "rank_pattern": {name: m.r for name, m in modules.items() if m.r != r},
        "alpha_pattern": {name: m.alpha for name, m in modules.items() if m.alpha != alpha},
        "bias": "none",
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def load_adapter(model, directory, base="keep"):
    """Reads PEFT's two files onto model: adds adapters as they ask, or fills those that it has. Returns model.

    What was read is where training starts from now on (see `reference`). Works as load_model's `prepare` too; base as
    in add_lora. ValueError names what is missing, unexpected, misshapen or not plain LoRA; nothing is changed then.
    """
    directory = Path(directory)
    config = read_config(directory / CONFIG_FILE)
    try:
        tensors = load_file(directory / WEIGHTS_FILE)
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{directory / WEIGHTS_FILE} cannot be read: {error}") from None
    names = match_targets(linears(model), config["targets"])
    ranks = by_pattern("rank_pattern", config["rank_pattern"], names, config["r"])
    alphas = by_pattern("alpha_pattern", config["alpha_pattern"], names, config["alpha"])
    wanted = {}
    for name in names:
        module = linears(model)[name]
        wanted[f"{PREFIX}{name}.lora_A.weight"] = (ranks[name], module.in_features)
        wanted[f"{PREFIX}{name}.lora_B.weight"] = (module.out_features, ranks[name])
    for what, keys in [
        ("lacks", sorted(wanted.keys() - tensors.keys())),
        ("has what its config does not name:", sorted(tensors.keys() - wanted.keys())),
        ("has another shape than its config says:", [k for k in wanted if tensors[k].shape != wanted[k]]
         if tensors.keys() == wanted.keys() else []),
    ]:  # fmt: skip
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ValueError(f"{directory / WEIGHTS_FILE} {what} {', '.join(keys[:3])}{more}")
    modules = linears(model, LoraLinear)
    if not modules:
        add_lora(model, **config, base=base)
        modules = linears(model, LoraLinear)
    asked = {name: (ranks[name], alphas[name], config["rslora"]) for name in names}
    for name in sorted(asked.keys() | modules.keys()):
        has = (modules[name].r, modules[name].alpha, modules[name].rslora) if name in modules else None
        if has != asked.get(name):
            raise ValueError(f"{directory}: (r, alpha, rsLoRA) of {name} is {asked.get(name)}, but the model has {has}")
    for name, module in modules.items():
        module.arriving = tuple(tensors[f"{PREFIX}{name}.lora_{x}.weight"] for x in "AB")
        if module.lora_A.device.type != "meta":
            module.reset_parameters()
    return model


def read_config(path: Path) -> dict:
    """adapter_config.json -> add_lora's arguments. ValueError for anything but plain LoRA."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {raw.get('peft_type')!r}, but only LORA is supported")
    missing = [key for key in ("r", "lora_alpha", "target_modules") if raw.get(key) is None]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    for key, value in raw.items():
        if key not in KNOWN and not (value is None or value is False or value in ("none", "", [], {})):
            raise ValueError(f"{path}: {key} is {value!r}, but only plain LoRA is supported")
    start = raw.get("init_lora_weights", True)
    if start not in (True, False, "gaussian", "eva", "orthogonal"):  # the others change the base weights as well
        raise ValueError(f"{path}: init_lora_weights is {start!r}, whose base weights are not the checkpoint's")
    return {
        "r": raw["r"],
        "alpha": raw["lora_alpha"],
        "targets": raw["target_modules"],
        "dropout": raw.get("lora_dropout", 0.0),
        "rslora": raw.get("use_rslora", False),
        "rank_pattern": raw.get("rank_pattern") or {},
        "alpha_pattern": raw.get("alpha_pattern") or {},
    }


def main():
    import argparse

    from model import load_model, save_model

    parser = argparse.ArgumentParser(description="Folds an adapter into its base and writes a Hugging Face directory.")
    parser.add_argument("--model", required=True, help="the base: an alias, a directory or a hub id")
    parser.add_argument("--adapter", required=True, help="a directory with PEFT's two files")
    parser.add_argument("--out", required=True, help="the directory to write")
    parser.add_argument("--base", choices=["keep", "nf4"], default="keep", help="fold into the base, or into its NF4")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="of the result; bfloat16 is half the size, and loses the smallest changes")  # fmt: skip
    args = parser.parse_args()
    model = load_model(args.model, prepare=lambda model: load_adapter(model, args.adapter, base=args.base))
    save_model(merge_adapter(model), args.out, dtype=getattr(torch, args.dtype))
    print(f"{args.out}: {args.model} with {args.adapter} folded in, {args.dtype}")


if __name__ == "__main__":
    main()
