"""Tiny checkpoints of every family, made from a seed, and the script that stores what transformers computes on them.

The tests write the same checkpoints again (`write`) and compare with tests/golden.json, so they need no transformers.
Run by hand where transformers is installed, after a change to CASES:   python tests/golden.py
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FILE = Path(__file__).with_name("golden.json")
NEW_TOKENS = 12
WIDTHS = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
          "hidden_act": "silu"}  # fmt: skip


def config(kind: str, **more) -> dict:
    return {"architectures": [kind.capitalize() + "ForCausalLM"], "model_type": kind, **WIDTHS, **more}


# name -> config.json. Together they hold every family, both layouts of config.json (transformers 4: rope_theta,
# rope_scaling, torch_dtype; 5: rope_parameters, dtype), every bias, both heads, and each kind of RoPE that is read.
CASES = {
    "llama_v4": config("llama", torch_dtype="float32", rms_norm_eps=5e-3, rope_theta=2000.0, rope_scaling=None),
    "llama_biases_v5": config(
        "llama", dtype="float32", rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
        head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 3000.0}),
    "llama3_rope_v4": config(
        "llama", torch_dtype="float32", rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=500.0,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 64}),
    "llama_linear_v4": config(
        "llama", torch_dtype="float32", rms_norm_eps=1e-5, rope_theta=2000.0,
        rope_scaling={"type": "linear", "factor": 4.0}),
    "mistral_v5": config(
        "mistral", dtype="float32", rms_norm_eps=1e-5, head_dim=32, sliding_window=64, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 4000.0}),
    "qwen2_tied_v4": config(
        "qwen2", torch_dtype="float32", rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=1000.0, vocab_size=128,
        use_sliding_window=False, sliding_window=64, max_window_layers=1),
    "qwen2_v5": config(
        "qwen2", dtype="float32", rms_norm_eps=1e-6, tie_word_embeddings=False, use_sliding_window=False,
        sliding_window=None, layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 4000.0}),
    "qwen3_wide_heads_v5": config(
        "qwen3", dtype="float32", rms_norm_eps=1e-3, tie_word_embeddings=True, head_dim=32, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
    "qwen3_biases_v4": config(
        "qwen3", torch_dtype="float32", rms_norm_eps=1e-6, tie_word_embeddings=False, head_dim=16, attention_bias=True,
        rope_theta=1000000.0, rope_scaling=None, num_hidden_layers=3),
}  # fmt: skip


def weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by Hugging Face name: std 0.3 and biases that are not zero, because the usual 0.02
    and zeros make a model so tame that a wrong rotation, mask or bias hardly shows. RandomState, whose stream numpy
    promises never to change; a default_rng's may."""
    rng, kind = np.random.RandomState(seed), config["model_type"]
    V, D, I = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or D // H
    qkv = kind == "qwen2" or config.get("attention_bias", False)
    tensors = {}

    def add(name, *shape, mean=0.0):
        tensors[name] = (mean + 0.3 * rng.standard_normal(shape)).astype(np.float32)

    def linear(name, out, into, bias):
        add(f"{name}.weight", out, into)
        if bias:
            add(f"{name}.bias", out)

    add("model.embed_tokens.weight", V, D)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        add(f"{layer}.input_layernorm.weight", D, mean=1.0)
        linear(f"{layer}.self_attn.q_proj", H * d, D, qkv)
        linear(f"{layer}.self_attn.k_proj", K * d, D, qkv)
        linear(f"{layer}.self_attn.v_proj", K * d, D, qkv)
        linear(f"{layer}.self_attn.o_proj", D, H * d, qkv and kind != "qwen2")
        if kind == "qwen3":
            add(f"{layer}.self_attn.q_norm.weight", d, mean=1.0)
            add(f"{layer}.self_attn.k_norm.weight", d, mean=1.0)
        add(f"{layer}.post_attention_layernorm.weight", D, mean=1.0)
        for name, out, into in (("gate_proj", I, D), ("up_proj", I, D), ("down_proj", D, I)):
            linear(f"{layer}.mlp.{name}", out, into, config.get("mlp_bias", False))
    add("model.norm.weight", D, mean=1.0)
    if not config.get("tie_word_embeddings", False):
        add("lm_head.weight", V, D)
    return tensors


def write(directory: Path, config: dict, tensors: dict | None = None, shards: int = 1) -> Path:
    """A Hugging Face directory of `config`, with the weights of seed 0 unless others are given."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = weights(config) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    where = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({k: v for k, v in tensors.items() if where[k] == file}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(v.nbytes for v in tensors.values())}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def prompt(config: dict) -> list[int]:
    return np.random.RandomState(1).randint(0, config["vocab_size"], 40).tolist()


def main():
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM

    golden = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), case)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
        ids, gaps = prompt(case), []
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
            for _ in range(NEW_TOKENS):
                top = model(torch.tensor([ids])).logits[0, -1].topk(2)
                gaps.append(float(top.values[0] - top.values[1]))
                ids = ids + [int(top.indices[0])]
        if min(gaps) < 1e-3:
            raise SystemExit(f"{name}: two tokens are only {min(gaps):.1e} apart, rounding could swap them")
        golden[name] = {
            "logits": {t: [round(x, 6) for x in logits[t, :8].tolist()] for t in (0, 3, 39)},
            "logsumexp": [round(x, 6) for x in logits.logsumexp(-1).tolist()],  # every position and token
            "greedy": ids[-NEW_TOKENS:],
        }
        print(f"{name:22s} largest logit {float(logits.abs().max()):5.2f}, smallest gap {min(gaps):.3f}")
    FILE.write_text("{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in golden.items()) + "\n}\n")


if __name__ == "__main__":
    main()
