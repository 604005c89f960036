"""A decoder-only transformer by hand: Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3, from and to Hugging Face directories.

    h = h + W_o · attention(rope(W_q n), rope(W_k n), W_v n)      n = rmsnorm(h)
    h = h + W_down · (silu(W_gate n) ⊙ W_up n)                    n = rmsnorm(h)

RMSNorm: Zhang and Sennrich, arXiv:1910.07467. RoPE: Su et al., arXiv:2104.09864. GQA: Ainslie et al., arXiv:2305.13245.
SwiGLU: Shazeer, arXiv:2002.05202. The four families differ in biases, in Qwen3's norm of queries and keys, and in how
their config.json spells things; nothing else.

Lives here: config.json -> Transformer, and safetensors in and out. Not here: the KV cache (sample.py owns it and passes
it in), what happens to logits (`forward` hands hidden states and the head's weight to `head`), adapters, sharding.

    B sequences, T tokens, P prefixes, S tokens of a prefix, D width, V vocabulary
    H query heads, K key/value heads, d width of a head

Try it:  python -c "import model; print(model.load_model('tiny'))"
"""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

# An alias is the last part of the hub id in small letters.
ALIASES = {repo.split("/")[1].lower(): repo for repo in (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct",
)}  # fmt: skip

# A million parameters in Qwen3's style; its 98 tokens are the character tokenizer's of data/tokenizer.py.
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 98, "hidden_size": 160,
    "intermediate_size": 480, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

TOKENIZER_FILES = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class ModelConfig:
    """What the four families need to know; `raw` is the config.json it was read from, for writing it back."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None  # None, {"rope_type": "linear", ...} or {"rope_type": "llama3", ...}
    max_position_embeddings: int  # the longest sequence whose attention is computed exactly
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    raw: dict = field(repr=False)

    @classmethod
    def from_dict(cls, raw: dict) -> ModelConfig:
        """Reads a config.json in the layout of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) or 5
        (`rope_parameters`, `dtype`); where both spellings stand and disagree, the newer one wins."""
        kind = raw.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(f"config.json: model_type {kind!r} is not supported; known: llama, mistral, qwen2, qwen3")
        for key in ("quantization_config", "num_local_experts", "num_experts"):
            if raw.get(key):
                raise ValueError(f"config.json: {key} is set, but only dense, unquantised checkpoints are supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported; known: silu")
        known = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in known if key not in raw]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        heads = raw["num_attention_heads"]
        theta, scaling = read_rope(raw)
        attention_bias = bool(raw.get("attention_bias", False)) and kind in ("llama", "qwen3")
        return cls(
            model_type=kind,
            **{key: raw[key] for key in known},
            num_key_value_heads=raw.get("num_key_value_heads") or (8 if kind == "mistral" else heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=exact_length(raw),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            raw=dict(raw),
        )


def read_rope(raw: dict) -> tuple[float, dict | None]:
    """(theta, scaling) of RoPE from either layout; scaling is None, linear's or llama3's parameters."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json: partial_rotary_factor other than 1 is not supported")
    llama3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    needed = {"default": [], "linear": ["factor"], "llama3": llama3}
    if kind not in needed:
        raise ValueError(f"config.json: RoPE scaling {kind!r} is not supported; known: {', '.join(needed)}")
    if missing := [key for key in needed[kind] if key not in rope]:
        raise ValueError(f"config.json: RoPE scaling {kind!r} lacks {', '.join(missing)}")
    return float(theta), None if kind == "default" else {"rope_type": kind, **{key: rope[key] for key in needed[kind]}}


def exact_length(raw: dict) -> int:
    """The longest sequence the model can read, and that full attention computes as the model was trained: a sliding
    window first matters past its own length, so longer sequences are refused and shorter ones are exact."""
    kind = raw["model_type"]
    length = raw.get("max_position_embeddings") or {"llama": 2048, "mistral": 131072}.get(kind, 32768)
    slides = kind == "mistral"
    if kind in ("qwen2", "qwen3") and raw.get("use_sliding_window", False):
        kinds, first = raw.get("layer_types"), raw.get("max_window_layers", 28)
        slides = "sliding_attention" in kinds if kinds else first < raw["num_hidden_layers"]
    window = raw.get("sliding_window", 4096)
    return min(length, window) if slides and window else length


# ---------------------------------------------------------------------------------------------------------------------
# The network


class RMSNorm(nn.Module):
    """x / rms(x) ⊙ weight over the last dimension, statistics in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """(d/2,) fp32 angular frequencies theta^(-2i/d), scaled as the config asks.

    `linear` divides all by the factor (position interpolation, arXiv:2306.15595). `llama3` (arXiv:2407.21783, and the
    reference code of Llama 3.1) divides wavelengths beyond original/low_freq_factor, keeps those below
    original/high_freq_factor, and blends in between.
    """
    d, scaling = config.head_dim, config.rope_scaling
    # Named device: the model is built on the meta device, but these numbers are not weights that arrive later.
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32, device="cpu") / d)
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]


def rotate(x, cos, sin):
    """Turns each pair (x_i, x_{i+d/2}) by its angle: the half-split pairing of Hugging Face checkpoints.

    x (..., T, heads, d); cos, sin (..., T, 1, d), the two halves alike, sin's first half negated.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def attention(q, k, v, mask=None):
    """q (B,T,H,d), k, v (B,S,K,d) -> (B,T,H,d): causal, unless mask (B,1,T,S) says which keys each query sees.

    With right padding, causality alone hides the padding.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        D, d, H, K = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.layer, self.head_dim = layer, d
        self.q_proj = nn.Linear(D, H * d, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, K * d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, K * d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * d, D, bias=config.o_bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def qkv(self, x, cos, sin):
        """x (B,T,D) -> q (B,T,H,d), k, v (B,T,K,d). A method of its own: sample.py makes one product of it."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        return q, k, self.v_proj(x).view(heads)

    def forward(self, x, cos, sin, attend):
        return self.o_proj(attend(self.layer, *self.qkv(x, cos, sin)).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def gated(self, x):  # a method of its own, for the same reason
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.gated(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Prefix(NamedTuple):
    """Sequences that rows continue: `Transformer.forward(tokens, prefix=…)` reads each prefix once, however many rows
    follow it, and computes no padding; the result is the plain pass's over prefix + row, at the row's positions."""

    tokens: torch.Tensor  # (P,S) right-padded
    lengths: torch.Tensor  # (P,) real tokens of each, 0 allowed
    rows: torch.Tensor  # (B,) the prefix that each row continues
    row_lengths: torch.Tensor  # (B,) real tokens of each row


class Packed:
    """The tokens of prefixes and rows in one line without padding (1,M), and attention over that line.

    Everything but attention is per token and runs on the line. Attention lays it out again: prefixes attend to
    themselves; a row attends to the whole of its prefix and causally to itself.
    """

    def __init__(self, tokens, prefix: Prefix):
        (self.P, self.S), (self.B, self.T), device = prefix.tokens.shape, tokens.shape, tokens.device
        in_prefix = torch.arange(self.S, device=device) < prefix.lengths[:, None]  # (P,S)
        in_row = torch.arange(self.T, device=device) < prefix.row_lengths[:, None]  # (B,T)
        self.prefix_at, self.row_at = in_prefix.flatten().nonzero()[:, 0], in_row.flatten().nonzero()[:, 0]
        self.rows = prefix.rows
        self.tokens = torch.cat([prefix.tokens.flatten()[self.prefix_at], tokens.flatten()[self.row_at]])[None]  # (1,M)
        row_start = prefix.lengths[prefix.rows][:, None] + torch.arange(self.T, device=device)  # (B,T)
        prefix_start = torch.arange(self.S, device=device).expand(self.P, self.S)
        self.positions = torch.cat([prefix_start.flatten()[self.prefix_at], row_start.flatten()[self.row_at]])[None]
        causal = torch.ones(self.T, self.T, dtype=torch.bool, device=device).tril()
        seen = in_prefix[prefix.rows][:, None].expand(-1, self.T, -1)  # (B,T,S)
        self.mask = torch.cat([seen, causal.expand(self.B, -1, -1)], 2)[:, None]  # (B,1,T,S+T)

    def pad(self, x, at, rows, length):  # (n,heads,d) -> (rows,length,heads,d)
        return x.new_zeros(rows * length, *x.shape[1:]).index_copy(0, at, x).view(rows, length, *x.shape[1:])

    def attend(self, layer, q, k, v):  # (1,M,heads,d) each
        n = len(self.prefix_at)
        q0, k0, v0 = (self.pad(x[0, :n], self.prefix_at, self.P, self.S) for x in (q, k, v))
        q1, k1, v1 = (self.pad(x[0, n:], self.row_at, self.B, self.T) for x in (q, k, v))
        y0 = attention(q0, k0, v0)
        k1, v1 = torch.cat([k0[self.rows], k1], 1), torch.cat([v0[self.rows], v1], 1)  # (B,S+T,K,d)
        y1 = attention(q1, k1, v1, self.mask)
        return torch.cat([y0.flatten(0, 1)[self.prefix_at], y1.flatten(0, 1)[self.row_at]])[None]

    def unpack(self, x):  # (1,M,D) -> (B,T,D), zero where there is no token
        return self.pad(x[0, len(self.prefix_at) :], self.row_at, self.B, self.T)


class Decoder(nn.Module):
    """Embedding, blocks and last norm: what Hugging Face names `model.…`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        # Values given, because nn.Embedding's own normal_ imports all of torch._dynamo for a meta tensor: two seconds.
        values = torch.empty(config.vocab_size, config.hidden_size).uniform_(-1, 1)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=values)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.frequencies = rope_frequencies(config)  # not a buffer: `.to(bfloat16)` must not round it
        self.checkpointing = False  # recompute each block in the backward pass instead of keeping its activations

    def rope(self, positions, dtype):
        """positions (B,T) -> cos, sin (B,T,1,d) as `rotate` takes them; angles in fp32, the result in dtype."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = (positions[..., None].float() * self.frequencies)[:, :, None]  # (B,T,1,d/2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def forward(self, tokens, positions, attend):
        x = self.embed_tokens(tokens)  # (B,T,D)
        cos, sin = self.rope(positions, x.dtype)
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend)
        return self.norm(x)


class Transformer(nn.Module):
    """A causal language model whose parameters carry Hugging Face's names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.source: Path | None = None  # the directory it was read from; its tokenizer files go where the model goes
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, *, cache=None, prefix: Prefix | None = None, head: Callable | None = None):
        """tokens (B,T) right-padded -> hidden (B,T,D) after the last norm, or what `head(hidden, weight)` returns.

        head    called with lm_head.weight (V,D) inside this forward, where a sharded model has it gathered.
        cache   owns the keys and values of earlier tokens: `cache.positions(tokens)` -> (B,T), and
                `cache.attend(layer, q, k, v)` stores k, v (B,T,K,d) and returns attention's (B,T,H,d).
        prefix  tokens continue shared prefixes, see Prefix.
        ValueError where a sequence is longer than the model reads exactly (config.max_position_embeddings).
        """
        if prefix is not None:
            packed = Packed(tokens, prefix)
            self.check_length(int(packed.positions.max()) + 1)
            hidden = packed.unpack(self.model(packed.tokens, packed.positions, packed.attend))
        elif cache is not None:
            hidden = self.model(tokens, cache.positions(tokens), cache.attend)
        else:
            self.check_length(tokens.shape[1])
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            hidden = self.model(tokens, positions, lambda layer, q, k, v: attention(q, k, v))
        return hidden if head is None else head(hidden, self.lm_head.weight)

    def check_length(self, length: int):
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"a sequence of {length} tokens is longer than the {longest} this model reads exactly")

    @torch.no_grad()
    def init_weights(self):
        """Random weights from torch's generator: normal, std 0.02, as GPT-2 and Hugging Face have it, smaller by
        sqrt(2 · layers) for the matrices that write into the residual stream, which thus still says at the start which
        token it stands on."""
        residual = (2 * self.config.num_hidden_layers) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(std=0.02 * (residual if name.endswith(("o_proj", "down_proj")) else 1.0))
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints in


def find_checkpoint(name: str) -> str:
    """An alias, a directory or a hub id -> "tiny", or a directory with config.json, safetensors and tokenizer.

    Hub ids are downloaded by huggingface_hub, with its cache, progress bar and offline mode; safetensors and tokenizer
    files only. ValueError for a name that is none of these, ConnectionError where the download is not possible.
    """
    if name == "tiny" or os.path.isdir(name):
        return name
    repo = ALIASES.get(name.lower(), name)
    if repo.count("/") != 1 or repo.startswith((".", "/")):
        close = difflib.get_close_matches(name.lower(), ["tiny", *ALIASES], n=1)
        raise ValueError(
            f"model {name!r} is no directory here, no hub id (owner/name) and no alias; "
            + (f"did you mean {close[0]!r}? " if close else "")
            + f"aliases: {', '.join(['tiny', *ALIASES])}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        files = ["config.json", "model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES]
        return snapshot_download(repo, allow_patterns=files)
    except GatedRepoError:
        raise ConnectionError(f"{repo!r}: accept its licence on its hub page, then run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ConnectionError(
            f"{repo!r} is no directory here and no hub model that you may see: check the name, or run `hf auth login`"
        ) from None
    except Exception as error:  # every way a network can fail, the hub's own offline errors, a full disk
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConnectionError(
            f"{repo!r} is no directory here, not in the cache and cannot be downloaded ({why}): connect to the network "
            f"or run `hf download {repo}` where there is one and copy the cache, or pass --model DIRECTORY"
        ) from None


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: not a Hugging Face model directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} instead of an object: download it again")
    return value


def open_tensors(directory: Path) -> dict:
    """name -> safetensors slice (shape known, values read when indexed), over one file or all shards of an index."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        promised = read_json(index).get("weight_map")
        if not promised:
            raise ValueError(f"{index} has no weight_map, which says where each tensor is: download it again")
        files = sorted(set(promised.values()))
    else:
        promised, files = {}, ["model.safetensors"]
    tensors, where = {}, {}
    for name in files:
        path = directory / name
        if not path.exists():
            others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            hint = f"; {others[0]} is not safetensors, convert it first" if others else "; download it again"
            raise ValueError(f"{path} does not exist" + (", though the index names it" if promised else hint))
        with open(path, "rb") as file:
            if file.read(40).startswith(b"version https://git-lfs"):
                raise ValueError(f"{path} is a Git LFS pointer, not the weights: download it (`git lfs pull`)")
        try:
            handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is cut off or damaged ({error}): download it again") from None
        for key in handle.keys():
            tensors[key], where[key] = handle.get_slice(key), name
    for key, name in promised.items():
        if where.get(key) != name:
            raise ValueError(f"{index} says {key} is in {name}, which has no such tensor: download both again")
    return tensors


def load_model(name: str, *, device="cpu", dtype=torch.float32, prepare: Callable | None = None) -> Transformer:
    """Builds the model `name` (an alias, a directory or a hub id, see find_checkpoint) with its weights in dtype.

    prepare  called with the model while it is still on the meta device and weighs nothing: adapters, quantised layers
             and sharding go on here, so that the full-precision model never exists. A parameter that it adds gets its
             values from its module's `reset_parameters`; a module with `load_tensor(name, tensor)` takes its own.
    Tensors are read one by one. ValueError names every missing, unexpected and misshapen one, before any is read.
    `tiny` has random weights from torch's CPU generator, the same ones on every device and however they are sharded.
    """
    place = find_checkpoint(name)
    config = ModelConfig.from_dict(TINY if place == "tiny" else read_json(Path(place) / "config.json"))
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    wanted = {key: p.shape for key, p in model.named_parameters()}  # a tied head counts once, as the embedding
    if place == "tiny":
        plain = Transformer(config)
        plain.init_weights()
        tensors = dict(plain.named_parameters())
    else:
        model.source = Path(place)
        tensors = open_tensors(model.source)
        check_tensors(place, wanted, tensors)
    if prepare is not None:
        prepare(model)
    model.to_empty(device=device)
    model.tie_weights()
    # In the model's order: these draw random numbers. Before the weights: a layer may reset what it inherited, too.
    for path in dict.fromkeys(key.rpartition(".")[0] for key, _ in model.named_parameters() if key not in wanted):
        model.get_submodule(path).reset_parameters()
    for key in wanted:
        fill(model, key, tensors[key])
    return model


def check_tensors(place: str, wanted: dict, tensors: dict):
    """ValueError that names what is missing, unexpected or misshapen among the tensors of a checkpoint."""
    found = {key: tuple(tensor.get_shape()) for key, tensor in tensors.items()}
    ignored = {"lm_head.weight"} - set(wanted)  # some tied checkpoints carry the head a second time
    problems = {
        "missing": [key for key in wanted if key not in found],
        "unexpected": [k for k in found if k not in wanted and k not in ignored and "rotary_emb" not in k],
        "wrong shape": [
            f"{key} {found[key]} instead of {tuple(shape)}"
            for key, shape in wanted.items()
            if found.get(key, shape) != tuple(shape)
        ],
    }
    said = [
        f"{what}: {', '.join(keys[:6])}" + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")
        for what, keys in problems.items()
        if keys
    ]
    if said:
        raise ValueError(f"{place}: the weights do not fit config.json; {'; '.join(said)}")


@torch.no_grad()
def fill(model: Transformer, key: str, tensor):
    """Reads one tensor, or safetensors slice, into the parameter `key`; a sharded parameter reads its own rows only."""
    path, _, leaf = key.rpartition(".")
    module = model.get_submodule(path)
    if hasattr(module, "load_tensor"):
        return module.load_tensor(leaf, tensor[:])
    parameter = getattr(module, leaf)
    if not hasattr(parameter, "device_mesh"):
        parameter.copy_(tensor[:])
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    parameter.to_local().copy_(tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape))])


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints out


def config_dict(config: ModelConfig, dtype: torch.dtype) -> dict:
    """config.json as transformers 4 wrote it, which transformers 4 and 5 and vLLM read."""
    raw = {key: value for key, value in config.raw.items() if key not in ("rope_parameters", "dtype")}
    return raw | {
        "architectures": [f"{config.model_type.capitalize()}ForCausalLM"],
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_key_value_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformers_version": "4.51.0",
    }


def save_model(model: Transformer, directory, *, dtype=None):
    """Writes a Hugging Face directory: config.json, safetensors in shards of at most 5 GB with their index, and the
    tokenizer files of the directory it came from. dtype None keeps the parameters' own; a tied head is written once.
    ValueError for a model with adapters or shards, whose files no one could load."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    with torch.device("meta"):
        plain = {name for name, _ in Transformer(model.config).named_parameters()}
    if odd := sorted(plain ^ tensors.keys()):
        raise ValueError(f"save_model: {odd[0]} is missing or not of a plain model: lora.merge_adapter(model) first")
    if any(hasattr(p, "device_mesh") for p in tensors.values()):
        raise ValueError("save_model: the model is sharded: save inside fsdp.unsharded(model), or use fsdp.export")
    dtype = dtype or model.model.embed_tokens.weight.dtype
    write_checkpoint(directory, model.config, tensors.items(), dtype, model.source)


def write_checkpoint(directory, config: ModelConfig, tensors, dtype, source=None, shard_bytes: int = 5 * 10**9):
    """save_model for any iterable of (name, tensor); one shard of it is in memory at a time."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards, shard, size, total = [], {}, 0, 0

    def flush():
        save_file(shard, directory / f"shard-{len(shards)}.tmp", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        tensor = tensor.to("cpu", dtype).contiguous()
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    for old in directory.glob("model*.safetensors*"):  # a shard of an earlier, longer save would be read as ours
        old.unlink()
    n = len(shards)
    files = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)] if n > 1 else ["model.safetensors"]
    for i, file in enumerate(files):
        (directory / f"shard-{i}.tmp").rename(directory / file)
    if n > 1:
        where = {name: file for file, names in zip(files, shards) for name in names}
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    write_json(directory / "config.json", config_dict(config, dtype))
    for name in TOKENIZER_FILES if source else ():
        if (Path(source) / name).exists() and Path(source).resolve() != directory.resolve():
            shutil.copyfile(Path(source) / name, directory / name)


def write_json(path: Path, value: dict):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
