"""model.py against numbers that transformers computed (tests/golden.json), and every way a checkpoint can be wrong."""

import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import golden
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.numpy import load_file

import model as M
from model import ModelConfig, Prefix, Transformer, load_model, save_model, write_checkpoint

EXPECTED = json.loads(golden.FILE.read_text())
LLAMA, QWEN2, QWEN3 = golden.CASES["llama_v4"], golden.CASES["qwen2_tied_v4"], golden.CASES["qwen3_wide_heads_v5"]


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(config, tensors=None, shards=1) -> its directory, a new one each time."""
    return lambda config, tensors=None, shards=1: golden.write(
        tmp_path / f"model{len(list(tmp_path.iterdir()))}", config, tensors, shards
    )


def random_model(config, dtype=torch.float64):
    """The golden weights of `config` in a Transformer, without going through files."""
    model = Transformer(ModelConfig.from_dict(config)).to(dtype)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in golden.weights(config).items()}, strict=False)
    return model


def logits_of(model, tokens, **kwargs):
    return model(torch.as_tensor(tokens), head=F.linear, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("name", golden.CASES)
def test_logits_and_greedy_ids_are_those_of_transformers(name, checkpoint):
    config = golden.CASES[name]
    model = load_model(str(checkpoint(config, shards=3 if name == "qwen3_wide_heads_v5" else 1)))
    expected, ids = EXPECTED[name], golden.prompt(config)
    with torch.no_grad():
        logits = logits_of(model, [ids])[0]
        for t, values in expected["logits"].items():
            assert logits[int(t), :8].tolist() == pytest.approx(values, abs=1e-4)
        assert logits.logsumexp(-1).tolist() == pytest.approx(expected["logsumexp"], abs=1e-4)
        for _ in expected["greedy"]:
            ids.append(int(logits_of(model, [ids])[0, -1].argmax()))
    assert ids[-len(expected["greedy"]) :] == expected["greedy"]


def test_right_padding_and_neighbours_change_no_score():
    # Prompts of 3 and 9 tokens in a batch, each with its completion: the short row was off by 12 without a mask.
    model, rng = random_model(QWEN3, torch.float32), np.random.RandomState(2)
    rows = [rng.randint(0, 96, 3 + 4).tolist(), rng.randint(0, 96, 9 + 4).tolist()]
    for width in (13, 23):  # and ten more columns of padding
        batch = [row + [95] * (width - len(row)) for row in rows]
        logp = logits_of(model, batch).log_softmax(-1)
        for i, row in enumerate(rows):
            alone = logits_of(model, [row]).log_softmax(-1)[0]
            torch.testing.assert_close(logp[i, : len(row)], alone, atol=1e-5, rtol=0)


def test_a_completion_token_is_scored_by_the_position_before_it_and_only_the_past():
    # Prompt of 4, completion of 3: logp[t] = log_softmax(logits[P + t - 1])[id_t].
    model, tokens = random_model(QWEN2), torch.tensor([[3, 17, 90, 5, 61, 8, 120]])
    seen = {}

    def head(hidden, weight):
        assert hidden.shape == (1, 7, 64) and weight is model.lm_head.weight
        hidden.retain_grad()
        seen["hidden"] = hidden
        logp = (hidden[:, 3:-1] @ weight.T).log_softmax(-1)
        return logp.gather(-1, tokens[:, 4:, None])[..., 0]

    logp = model(tokens, head=head)
    full = logits_of(model, tokens).log_softmax(-1)
    assert logp[0].tolist() == pytest.approx([full[0, 4 + t - 1, tokens[0, 4 + t]].item() for t in range(3)], abs=1e-12)
    (logp * torch.tensor([1.0, 0.0, 0.0])).sum().backward()  # masked to the first completion token
    assert seen["hidden"].grad[0].abs().sum(-1).nonzero()[:, 0].tolist() == [3]
    later = tokens.clone()
    later[0, 4:] = torch.tensor([61, 9, 9])  # other tokens after it
    torch.testing.assert_close(model(later, head=head)[0, 0], logp[0, 0], rtol=0, atol=0)
    assert torch.equal(model(tokens), seen["hidden"]) is False  # seen now holds the changed tokens' states
    assert model(tokens).shape == (1, 7, 64)


class SimpleCache:
    """The cache of `forward`'s contract, at its plainest: everything kept, one row."""

    def __init__(self):
        self.kept, self.length = {}, 0

    def positions(self, tokens):
        return self.length + torch.arange(tokens.shape[1]).expand(tokens.shape)

    def attend(self, layer, q, k, v):
        if layer in self.kept:
            k, v = torch.cat([self.kept[layer][0], k], 1), torch.cat([self.kept[layer][1], v], 1)
        self.kept[layer] = k, v
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        score = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        late = torch.arange(k.shape[1]) > k.shape[1] - q.shape[1] + torch.arange(q.shape[1])[:, None]
        return torch.einsum("bhts,bshd->bthd", score.masked_fill(late, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("name", ["llama3_rope_v4", "qwen3_wide_heads_v5"])
def test_cached_steps_equal_the_full_pass(name):
    # Rotary attention is relative: only prefill and decode disagreeing shows a wrong position (then by 6).
    model, ids = random_model(golden.CASES[name]), torch.tensor([golden.prompt(golden.CASES[name])])
    full, cache, parts = logits_of(model, ids), SimpleCache(), []
    for part in ids.split([7, 1, 1, 5, 26], 1):
        parts.append(logits_of(model, part, cache=cache))
        cache.length += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-10, rtol=0)
    assert sorted(cache.kept) == list(range(len(model.model.layers)))


# ---------------------------------------------------------------------------------------------------------------------
# Shared prefixes


def ragged(seed=3, vocab=96):
    """Four prefixes (one empty, one that nobody continues), five rows of 1 to 6 tokens; padding is a real token id."""
    rng = np.random.RandomState(seed)
    prefixes = [rng.randint(0, vocab, n).tolist() for n in (5, 0, 9, 2)]
    owner, rows = [2, 0, 2, 1, 0], [rng.randint(0, vocab, n).tolist() for n in (3, 6, 1, 4, 5)]

    def padded(lists):
        width = max(map(len, lists))
        return torch.tensor([x + [7] * (width - len(x)) for x in lists]), torch.tensor([len(x) for x in lists])

    (tokens, lengths), (row_tokens, row_lengths) = padded(prefixes), padded(rows)
    return prefixes, owner, rows, row_tokens, Prefix(tokens, lengths, torch.tensor(owner), row_lengths)


def loss_of(hidden, weight):
    """A scalar that every hidden state reaches in a way of its own."""
    return ((hidden @ weight.T).logsumexp(-1) * torch.linspace(0.5, 2.0, hidden.shape[0], dtype=hidden.dtype)).sum()


def plain_pass(model, prefixes, owner, rows):
    """The rows' hidden states, one after the other, each from a pass of its own over prefix + row."""
    alone = [model(torch.tensor([prefixes[p] + row]))[0, len(prefixes[p]) :] for p, row in zip(owner, rows)]
    hidden = torch.cat(alone)
    loss_of(hidden, model.lm_head.weight).backward()
    return hidden.detach()


def prefix_pass(model, rows, row_tokens, prefix):
    hidden = model(row_tokens, prefix=prefix)
    assert hidden.shape == (*row_tokens.shape, model.config.hidden_size)
    hidden = torch.cat([hidden[i, : len(row)] for i, row in enumerate(rows)])
    loss_of(hidden, model.lm_head.weight).backward()
    return hidden.detach()


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama3_rope_v4", "qwen2_v5", "qwen3_wide_heads_v5"])
def test_rows_on_a_shared_prefix_equal_the_plain_pass(name, checkpointing):
    model = random_model(golden.CASES[name])
    prefixes, owner, rows, row_tokens, prefix = ragged()
    plain, plain_grads = plain_pass(model, prefixes, owner, rows), gradients(model)
    model.model.checkpointing = checkpointing
    shared, shared_grads = prefix_pass(model, rows, row_tokens, prefix), gradients(model)
    torch.testing.assert_close(shared, plain, atol=1e-10, rtol=1e-10)
    assert shared_grads.keys() == plain_grads.keys()
    for key, grad in plain_grads.items():
        assert grad.abs().max() > 0, key
        torch.testing.assert_close(shared_grads[key], grad, atol=1e-10 * grad.abs().max().item(), rtol=1e-10, msg=key)


def test_rows_on_a_shared_prefix_equal_the_plain_pass_in_fp32():
    model = random_model(QWEN3, torch.float32)
    prefixes, owner, rows, row_tokens, prefix = ragged()
    plain, plain_grads = plain_pass(model, prefixes, owner, rows), gradients(model)
    shared, shared_grads = prefix_pass(model, rows, row_tokens, prefix), gradients(model)
    assert (shared - plain).norm() < 1e-5 * plain.norm()
    for key, grad in plain_grads.items():
        assert (shared_grads[key] - grad).norm() < 1e-5 * grad.norm(), key


def test_prefixes_that_are_all_empty_equal_the_plain_pass():
    model, rows = random_model(QWEN3), torch.tensor([[4, 9, 33], [8, 1, 77]])
    nothing = Prefix(torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]), torch.tensor([0, 0]), torch.tensor([3, 3]))
    found = []
    for prefix in (None, nothing):
        hidden = model(rows, prefix=prefix).flatten(0, 1)
        loss_of(hidden, model.lm_head.weight).backward()
        found.append((hidden, gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-12, rtol=0)
    for key, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], grad, atol=1e-10 * grad.abs().max().item(), rtol=1e-10, msg=key)


def test_each_prefix_is_read_once_and_padding_never():
    model, widths = random_model(QWEN3), []
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: widths.append(inputs[0].shape[:2]))
    prefixes, _, rows, row_tokens, prefix = ragged()
    model(row_tokens, prefix=prefix)
    assert widths == [(1, sum(map(len, prefixes)) + sum(map(len, rows)))]


def test_checkpointing_recomputes_and_changes_no_gradient():
    model, ids = random_model(QWEN3), torch.tensor([golden.prompt(QWEN3)])
    calls = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    found = []
    for model.model.checkpointing in (False, True):
        calls.clear()
        loss_of(model(ids)[0], model.lm_head.weight).backward()
        found.append((len(calls), gradients(model)))
    assert [n for n, _ in found] == [1, 2]
    for key, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], grad, atol=0, rtol=1e-12, msg=key)


# ---------------------------------------------------------------------------------------------------------------------
# Heads, widths, biases


def test_a_tied_head_is_one_parameter_and_stays_so(checkpoint):
    directory = checkpoint(QWEN2)
    assert len(load_file(directory / "model.safetensors")) == 26  # no head among them
    model = load_model(str(directory))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    per_layer = 64 * (64 + 32 + 32 + 64) + (64 + 32 + 32) + 3 * 64 * 80 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == 128 * 64 + 2 * per_layer + 64
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits_of(model, [[1, 2, 3]]).logsumexp(-1).sum().backward()
    optimizer.step()
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert not torch.equal(model.lm_head.weight, before)


def test_an_untied_head_is_its_own_parameter(checkpoint):
    model = load_model(str(checkpoint(LLAMA)))
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_a_tied_checkpoint_may_carry_its_head_again(checkpoint):
    # Some do; transformers ignores it, and so do we.
    tensors = golden.weights(QWEN2)
    again = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}
    model = load_model(str(checkpoint(QWEN2, again)))
    assert np.array_equal(model.lm_head.weight.detach().numpy(), tensors["model.embed_tokens.weight"])


def test_an_explicit_head_dim_wins_and_null_means_hidden_over_heads(checkpoint):
    attention = load_model(str(checkpoint(QWEN3))).model.layers[0].self_attn  # width 64, 4 heads of 32, 2 for keys
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes == {"q_proj.weight": (128, 64), "k_proj.weight": (64, 64), "v_proj.weight": (64, 64),
                      "o_proj.weight": (64, 128), "q_norm.weight": (32,), "k_norm.weight": (32,)}  # fmt: skip
    explicit, null, absent = QWEN3 | {"head_dim": 16}, QWEN3 | {"head_dim": None}, dict(QWEN3)
    del absent["head_dim"]
    ids = [golden.prompt(QWEN3)]
    logits = [logits_of(load_model(str(checkpoint(config))), ids) for config in (explicit, null, absent)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    "name, biased",
    [
        ("llama_v4", []),
        ("llama_biases_v5", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("mistral_v5", []),
        ("qwen2_v5", ["q_proj", "k_proj", "v_proj"]),
        ("qwen3_wide_heads_v5", []),
        ("qwen3_biases_v4", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ],
)
def test_biases_are_where_the_family_and_the_config_put_them(name, biased):
    model = Transformer(ModelConfig.from_dict(golden.CASES[name]))
    assert [k.split(".")[-2] for k, _ in model.model.layers[0].named_parameters() if k.endswith("bias")] == biased


# ---------------------------------------------------------------------------------------------------------------------
# config.json


def test_both_layouts_of_the_config_give_the_same_model(checkpoint):
    # transformers 5 writes rope_parameters and dtype; read as version 4, theta was 1e4 for 1e6: off by 10 at the end.
    old = {k: v for k, v in QWEN3.items() if k not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": 1e6, "torch_dtype": "float32"}
    new = QWEN3 | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    ids = [np.random.RandomState(4).randint(0, 96, 96).tolist()]
    first, second, other = (
        logits_of(load_model(str(checkpoint(c))), ids) for c in (old, new, old | {"rope_theta": 1e4})
    )
    assert torch.equal(first, second)
    assert (first - other).abs()[:, -8:].max() > 1.0  # the comparison can see theta
    both = ModelConfig.from_dict(old | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}})
    assert both.rope_theta == 1e6  # where the two disagree, the newer spelling wins


def test_llama3_rope_divides_long_waves_keeps_short_ones_and_blends_between():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config = LLAMA | {"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": scaling}
    got = M.rope_frequencies(ModelConfig.from_dict(config)).double()
    plain = 500000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    waves = 2 * math.pi / plain
    assert int((waves < 2048).sum()) == 15 and int((waves > 8192).sum()) == 14  # all three bands are there
    torch.testing.assert_close(got[:15], plain[:15], rtol=1e-6, atol=0)
    torch.testing.assert_close(got[-14:], plain[-14:] / 8, rtol=1e-6, atol=0)
    for i in range(15, 18):  # smooth between: s·f + (1-s)·f/8, s = (8192/wave - 1) / (4 - 1)
        s = (8192 / waves[i] - 1) / 3
        assert got[i].item() == pytest.approx((s * plain[i] + (1 - s) * plain[i] / 8).item(), rel=1e-6)


def test_linear_rope_divides_every_frequency():
    config = ModelConfig.from_dict(LLAMA | {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert M.rope_frequencies(config).tolist() == pytest.approx([100 ** (-i / 8) / 4 for i in range(8)], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_stays_exact_in_a_bf16_model(dtype, checkpoint):
    # `.to(bfloat16)` rounded the frequencies (3.87 rad off at position 4096) and turned position 257 into 256.
    config = LLAMA | {"head_dim": 64, "rope_theta": 1e6}
    for model in (
        load_model(str(checkpoint(config)), dtype=dtype),
        load_model(str(checkpoint(config))).to(dtype),
        Transformer(ModelConfig.from_dict(config)).to(torch.float64).to(dtype),
    ):
        at = torch.tensor([[256, 257, 4096]])
        cos, sin = model.model.rope(at, torch.float32)
        assert cos.shape == sin.shape == (1, 3, 1, 64)
        exact = at[0, :, None].double() * 1e6 ** (-torch.arange(0, 64, 2).double() / 64)
        off = torch.atan2(sin[0, :, 0, 32:].double(), cos[0, :, 0, :32].double()) - exact
        assert (off - 2 * math.pi * (off / (2 * math.pi)).round()).abs().max() < 1e-3
        rounded, _ = model.model.rope(at, torch.bfloat16)
        assert torch.equal(rounded, cos.to(torch.bfloat16))  # only the last step is cast


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported; known: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE scaling 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_the_model_cannot_compute_is_refused_by_name(change, said):
    config = {k: v for k, v in (LLAMA | change).items() if k != "hidden_size" or v}
    with pytest.raises(ValueError, match=said) as error:
        ModelConfig.from_dict(config)
    assert "\n" not in str(error.value)


WINDOW = {"sliding_window": 16}
SOME = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    "config, longest",
    [
        (golden.CASES["mistral_v5"] | WINDOW, 16),
        (golden.CASES["mistral_v5"] | {"sliding_window": None}, 512),
        (LLAMA | SOME | {"max_window_layers": 0}, 512),  # Llama has no such window, whatever its config says
        (QWEN2 | WINDOW | {"use_sliding_window": False}, 512),
        (QWEN2 | SOME | {"max_window_layers": 1}, 16),  # the layers from this one on slide
        (QWEN2 | SOME | {"max_window_layers": 2}, 512),  # none of the two
        (QWEN2 | SOME | {"layer_types": ["full_attention", "sliding_attention"]}, 16),
        (QWEN2 | SOME | {"layer_types": ["full_attention"] * 2}, 512),
        (QWEN3 | SOME | {"max_window_layers": 0}, 16),
        (QWEN3 | SOME | {"max_window_layers": 0, "sliding_window": 4096}, 512),
    ],
)
def test_sequences_past_a_sliding_window_are_refused(config, longest):
    # Up to the window, full attention is what the model computes; beyond it we would be silently wrong.
    model = Transformer(ModelConfig.from_dict(config))
    assert model.config.max_position_embeddings == longest
    with torch.no_grad():
        assert model(torch.zeros(1, longest, dtype=torch.long)).shape[1] == longest
        with pytest.raises(ValueError, match=f"{longest + 1} tokens is longer than the {longest} "):
            model(torch.zeros(1, longest + 1, dtype=torch.long))


def test_length_with_prefixes_is_that_of_the_longest_prefix_and_row_together():
    # A long prompt with short completions beside a short one with long ones: padded, they are longer than either.
    model = Transformer(ModelConfig.from_dict(golden.CASES["mistral_v5"] | WINDOW))
    lengths, owner, row_lengths = torch.tensor([12, 2]), torch.tensor([0, 1]), torch.tensor([4, 14])
    prefix = Prefix(torch.zeros(2, 12, dtype=torch.long), lengths, owner, row_lengths)
    with torch.no_grad():
        model(torch.zeros(2, 14, dtype=torch.long), prefix=prefix)
        with pytest.raises(ValueError, match="17 tokens is longer than the 16 "):
            model(torch.zeros(2, 14, dtype=torch.long), prefix=prefix._replace(row_lengths=torch.tensor([5, 14])))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints that are wrong


@pytest.mark.parametrize(
    "config, missing",
    [
        (LLAMA, "lm_head.weight"),  # transformers fills an untied head with random numbers and goes on
        (LLAMA, "model.layers.1.mlp.up_proj.weight"),
        (QWEN2, "model.layers.0.self_attn.k_proj.bias"),
        (QWEN3, "model.layers.1.self_attn.q_norm.weight"),
        (QWEN3, "model.embed_tokens.weight"),
    ],
)
def test_a_missing_tensor_is_an_error_with_its_name(config, missing, checkpoint):
    tensors = golden.weights(config)
    del tensors[missing]
    with pytest.raises(ValueError, match=f"missing: {missing}$"):
        load_model(str(checkpoint(config, tensors)))


def test_every_tensor_is_accounted_for_in_one_message(checkpoint):
    tensors = golden.weights(LLAMA)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].T.copy()
    with pytest.raises(ValueError) as error:
        load_model(str(checkpoint(LLAMA, tensors)))
    assert str(error.value).endswith(
        "the weights do not fit config.json; missing: model.norm.weight, lm_head.weight; "
        "unexpected: model.layers.0.self_attn.q_proj.bias; "
        "wrong shape: model.layers.1.mlp.down_proj.weight (80, 64) instead of (64, 80)"
    )


def test_long_lists_of_wrong_tensors_are_cut(checkpoint):
    with pytest.raises(ValueError, match=r"wrong shape: .* and 15 more$"):
        load_model(str(checkpoint(LLAMA | {"hidden_size": 32, "head_dim": 16}, golden.weights(LLAMA) | {})))


def test_rotary_buffers_of_old_llama_checkpoints_are_no_surprise(checkpoint):
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    load_model(str(checkpoint(LLAMA, golden.weights(LLAMA) | old)))


def pointer(directory):
    (directory / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 269060552\n"
    )


def truncated(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_shard(directory):
    (directory / "model-00002-of-00003.safetensors").unlink()


def wrong_index(directory):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))


def only_pickle(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def no_weights(directory):
    (directory / "model.safetensors").unlink()


def no_config(directory):
    (directory / "config.json").unlink()


def cut_config(directory):
    (directory / "config.json").write_text('{"model_type": "lla')


def config_of_another_kind(directory):
    (directory / "config.json").write_text("[]")


def empty_index(directory):
    (directory / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    "spoil, shards, said",
    [
        (pointer, 1, "model.safetensors is a Git LFS pointer.*download"),
        (truncated, 1, "model.safetensors is cut off or damaged.*download it again"),
        (no_shard, 3, "model-00002-of-00003.safetensors does not exist, though the index names it"),
        (wrong_index, 3, "index.json says model.norm.weight is in model-00001-of-00003.safetensors, which has no such"),
        (only_pickle, 1, "model.safetensors does not exist; pytorch_model.bin is not safetensors, convert it"),
        (no_weights, 1, "model.safetensors does not exist; download it again"),
        (no_config, 1, "config.json does not exist: not a Hugging Face model directory"),
        (cut_config, 1, "config.json is not valid JSON"),
        (config_of_another_kind, 1, "config.json holds a list instead of an object"),
        (empty_index, 3, "index.json has no weight_map"),
    ],
)
def test_a_broken_download_is_one_line_with_the_file_and_the_cause(spoil, shards, said, checkpoint):
    directory = checkpoint(LLAMA, shards=shards)
    spoil(directory)
    with pytest.raises(ValueError, match=said) as error:
        load_model(str(directory))
    assert str(directory) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, said",
    [
        ("qwen3-0.6", "did you mean 'qwen3-0.6b'"),
        ("tny", "did you mean 'tiny'"),
        ("xyzzy", "aliases: tiny, qwen3-0.6b, .*, smollm2-360m-instruct$"),
        ("./not-here", "no directory"),
        ("/not/here/at/all", "no directory"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_and_the_closest(name, said):
    with pytest.raises(ValueError, match=said) as error:
        load_model(name)
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def tensors_of(directory):
    return {k: v for file in sorted(Path(directory).glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", ["qwen2_tied_v4", "llama_biases_v5"])
def test_a_saved_model_has_the_same_keys_and_loads_to_the_same_bits(name, checkpoint, tmp_path):
    source = checkpoint(golden.CASES[name])
    model = load_model(str(source))
    with torch.no_grad():
        model.model.norm.weight += 1.0  # as if trained
    save_model(model, tmp_path / "saved" / "model")
    saved = tensors_of(tmp_path / "saved" / "model")
    assert saved.keys() == tensors_of(source).keys()  # a tied head once: no lm_head among the 26
    again = load_model(str(tmp_path / "saved" / "model"))
    ids = [golden.prompt(golden.CASES[name])]
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    with safe_open(tmp_path / "saved" / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it


def test_the_config_is_written_as_version_4_does(checkpoint, tmp_path):
    config = golden.CASES["qwen3_wide_heads_v5"] | {"eos_token_id": [5, 6], "architectures": None}
    save_model(load_model(str(checkpoint(config))), tmp_path / "saved", dtype=torch.bfloat16)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["rope_theta"] == 1000.0 and saved["rope_scaling"] is None and "rope_parameters" not in saved
    assert saved["torch_dtype"] == "bfloat16" and "dtype" not in saved
    assert saved["architectures"] == ["Qwen3ForCausalLM"] and saved["head_dim"] == 32
    assert saved["eos_token_id"] == [5, 6]
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(key).dtype) for key in file.keys()} == {"torch.bfloat16"}
    llama3 = golden.CASES["llama3_rope_v4"]
    save_model(load_model(str(checkpoint(llama3))), tmp_path / "llama3")
    assert json.loads((tmp_path / "llama3" / "config.json").read_text())["rope_scaling"] == llama3["rope_scaling"]


def test_shards_and_index_agree_and_stay_under_the_limit(checkpoint, tmp_path):
    source = checkpoint(QWEN2)
    model, limit = load_model(str(source)), 50_000
    tensors = ((name, p.detach()) for name, p in model.named_parameters())
    write_checkpoint(tmp_path / "saved", model.config, tensors, torch.float32, shard_bytes=limit)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 2
    found = {name: file for file in files for name in load_file(tmp_path / "saved" / file)}
    assert index["weight_map"] == found and found.keys() == tensors_of(source).keys()
    sizes = [sum(v.nbytes for v in load_file(tmp_path / "saved" / file).values()) for file in files]
    assert index["metadata"]["total_size"] == sum(sizes) and max(sizes) <= limit
    assert all(a + b > limit for a, b in zip(sizes, sizes[1:]))  # and no smaller than they need be
    again = load_model(str(tmp_path / "saved"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_tensor_larger_than_a_shard_gets_one_to_itself(tmp_path):
    model = random_model(QWEN2, torch.float32)
    write_checkpoint(tmp_path, model.config, model.state_dict().items(), torch.float32, shard_bytes=1)
    assert all(len(load_file(path)) == 1 for path in tmp_path.glob("*.safetensors"))


def test_saving_over_a_longer_save_leaves_none_of_its_shards(checkpoint, tmp_path):
    # An index of the last save would be read before the new single file.
    model = load_model(str(checkpoint(QWEN2)))
    tensors = [(name, p.detach()) for name, p in model.named_parameters()]
    write_checkpoint(tmp_path / "saved", model.config, tensors, torch.float32, shard_bytes=50_000)
    save_model(model, tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    load_model(str(tmp_path / "saved"))


def test_an_interrupted_save_leaves_the_old_model(checkpoint, tmp_path):
    directory = checkpoint(QWEN2)
    model = load_model(str(directory))

    def interrupted():
        yield "model.norm.weight", model.model.norm.weight.detach()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(directory, model.config, interrupted(), torch.float32)
    load_model(str(directory))


def test_tokenizer_files_travel_with_the_model(checkpoint, tmp_path):
    source = checkpoint(QWEN2)
    files = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    for name in (*files, "README.md"):
        (source / name).write_text(f"{name} 🙂\n", encoding="utf-8")
    save_model(load_model(str(source)), tmp_path / "saved")
    carried = {path.name for path in (tmp_path / "saved").iterdir()} - {"config.json", "model.safetensors"}
    assert carried == files
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    save_model(load_model(str(source)), source)  # onto itself
    assert (source / "tokenizer.json").read_text(encoding="utf-8") == "tokenizer.json 🙂\n"
    load_model(str(source))


# ---------------------------------------------------------------------------------------------------------------------
# Loading


class Doubled(nn.Module):
    """An adapter of a kind: wraps a Linear, whose weight keeps its name, and adds parameters that no file has."""

    order = []

    def __init__(self, base, name):
        super().__init__()
        self.weight, self.name = base.weight, name
        self.added = nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        Doubled.order.append(self.name)
        with torch.no_grad():
            self.added.normal_()
            self.weight.zero_()  # as a subclass of nn.Linear would: what the file has must win

    def forward(self, x):
        return F.linear(x, self.weight)


class Halved(nn.Module):
    """A quantised layer of a kind: takes its tensor itself."""

    def load_tensor(self, leaf, tensor):
        self.got = leaf, tensor * 0.5


def test_prepare_sees_a_model_without_memory_and_what_it_adds_is_initialised(checkpoint):
    directory, seen = checkpoint(QWEN3), []

    def prepare(model):
        seen.append({p.device.type for p in model.parameters()})
        for i, block in enumerate(model.model.layers):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(block.self_attn, name, Doubled(getattr(block.self_attn, name), f"{i}.{name}"))
            block.mlp.up_proj = Halved()
        model.model.norm.weight.requires_grad_(False)

    Doubled.order.clear()
    torch.manual_seed(0)
    model, weights = load_model(str(directory), prepare=prepare), golden.weights(QWEN3)
    assert seen == [{"meta"}] and {p.device.type for p in model.parameters()} == {"cpu"}
    # In the model's order: out of a set, the random numbers would land elsewhere in every process.
    assert Doubled.order == [f"{i}.{name}" for i in range(2) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    torch.manual_seed(0)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.added, torch.randn(3))
    key = "model.layers.1.self_attn.k_proj.weight"
    assert np.array_equal(model.get_parameter(key).detach().numpy(), weights[key])
    leaf, tensor = model.model.layers[1].mlp.up_proj.got
    assert leaf == "weight" and np.array_equal(tensor.numpy(), weights["model.layers.1.mlp.up_proj.weight"] * 0.5)
    assert not model.model.norm.weight.requires_grad and model.lm_head.weight is model.model.embed_tokens.weight


def test_dtype_is_as_asked_whatever_the_file_has(checkpoint):
    model = load_model(str(checkpoint(LLAMA)), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = torch.from_numpy(golden.weights(LLAMA)["lm_head.weight"])
    assert torch.equal(model.lm_head.weight, exact.to(torch.bfloat16))
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).float()).all()


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from Linux's /proc")
def test_loading_holds_no_second_copy_of_the_weights(tmp_path, monkeypatch):
    config = LLAMA | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4000}
    model = Transformer(ModelConfig.from_dict(config))
    size = sum(p.nbytes for p in model.parameters())
    assert size > 60 * 10**6
    write_checkpoint(tmp_path, model.config, model.state_dict().items(), torch.float32, shard_bytes=size // 3)
    largest = max(p.nbytes for p in model.parameters())
    del model
    gc.collect()
    before, held, fill = anonymous_bytes(), [], M.fill

    def watched(model, key, tensor):
        fill(model, key, tensor)
        held.append(anonymous_bytes() - before)

    monkeypatch.setattr(M, "fill", watched)
    model = load_model(str(tmp_path))
    assert len(held) == len(list(model.parameters()))
    assert max(held) < size + 2 * largest


def test_tiny_is_a_million_random_parameters_from_the_seed():
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(load_model("tiny", dtype=torch.bfloat16 if models else torch.float32))
    first, same, other = models
    assert 0.9e6 < sum(p.numel() for p in first.parameters()) < 1.2e6
    assert first.config.vocab_size == 98 and first.lm_head.weight is first.model.embed_tokens.weight
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(same.lm_head.weight, other.lm_head.weight)
    layer = first.model.layers[2]
    assert layer.mlp.gate_proj.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / (2 * len(first.model.layers)) ** 0.5, rel=0.03)
    assert first.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert (layer.input_layernorm.weight == 1).all()
    logp = logits_of(first, [list(range(98))]).log_softmax(-1)
    assert logp.abs().max() < 8 and logp.mean().item() == pytest.approx(-math.log(98), abs=0.1)  # near uniform at start


def test_every_alias_is_a_hub_id_under_its_own_name():
    assert M.ALIASES["qwen3-0.6b"] == "Qwen/Qwen3-0.6B"
    assert M.ALIASES["llama-3.2-1b-instruct"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert M.ALIASES["qwen2.5-0.5b-instruct"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert M.ALIASES["smollm2-135m-instruct"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    others = {"qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama-3.2-3b-instruct", "smollm2-360m-instruct"}
    assert others <= M.ALIASES.keys()


# ---------------------------------------------------------------------------------------------------------------------
# The hub, played by a server of our own: huggingface_hub reads its settings when imported, hence another process

HUB = '''
import http.server, json, os, sys, threading, urllib.parse
from pathlib import Path

source, home, repository = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
REPO, SHA = "Qwen/Qwen3-0.6B", "0123456789abcdef0123456789abcdef01234567"
files = {str(p.relative_to(source)): p.read_bytes() for p in source.rglob("*") if p.is_file()}
fetched = []

class Hub(http.server.BaseHTTPRequestHandler):
    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        name = path.partition(f"/{REPO}/resolve/{SHA}/")[2]
        if name in files:
            if self.command == "GET":
                fetched.append(name)
            self.reply(200, files[name], ETag=f'"{abs(hash(name))}"', X_Repo_Commit=SHA)
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            listing = [{"type": "file", "path": n, "size": len(b), "oid": f"{abs(hash(n))}"} for n, b in files.items()]
            self.reply(200, json.dumps(listing).encode(), Content_Type="application/json")
        elif path.startswith(f"/api/models/{REPO}"):
            info = {"id": REPO, "modelId": REPO, "sha": SHA, "siblings": [{"rfilename": n} for n in files]}
            self.reply(200, json.dumps(info).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/gated/model"):
            self.reply(403, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        else:
            self.reply(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository Not Found")

    do_HEAD = do_GET

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": home, "HF_HUB_DISABLE_XET": "1"}
for name in list(os.environ):
    if name.lower().endswith("_proxy") or name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        del os.environ[name]
sys.path.insert(0, repository)
import torch
import model

def attempt(name):
    try:
        return model.load_model(name)
    except (ConnectionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"

result, compiler = {}, "torch._dynamo" in sys.modules
first = attempt("qwen3-0.6b")
result["light"] = compiler or "torch._dynamo" not in sys.modules
result["fetched"] = sorted(fetched)
result["unknown"], result["gated"] = attempt("nobody/nothing"), attempt("gated/model")
server.shutdown()
server.server_close()  # the network is gone
second = attempt("Qwen/Qwen3-0.6B")
result["from the cache"] = all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
result["source"] = second.source.name
result["not cached"] = attempt("qwen3-1.7b")
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = True
result["offline, cached"] = isinstance(attempt("qwen3-0.6b"), model.Transformer)
result["offline, not cached"] = attempt("smollm2-135m-instruct")
print("RESULT", json.dumps(result))
'''


def test_a_hub_model_is_downloaded_cached_and_missed_in_one_clear_line(checkpoint, tmp_path):
    pytest.importorskip("huggingface_hub")
    source = checkpoint(QWEN3, shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).write_text("{}")
    wanted = {path.name for path in source.iterdir()}  # config, index, two shards and these three
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "original/a.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("never asked for")
    repository = str(Path(M.__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", HUB, str(source), str(tmp_path / "home"), repository],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "RESULT" in run.stdout, run.stderr
    result = json.loads(run.stdout.partition("RESULT")[2])
    assert set(result["fetched"]) == wanted and len(wanted) == 7
    assert result["light"]  # torch._dynamo takes two seconds to import, and loading needs nothing of it
    assert result["from the cache"] and result["offline, cached"] and len(result["source"]) == 40
    assert "'nobody/nothing' is no directory here and no hub model" in result["unknown"]
    assert "'gated/model': accept its licence" in result["gated"]
    absent = {"not cached": "Qwen/Qwen3-1.7B", "offline, not cached": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    for name, repo in absent.items():
        assert result[name].startswith(f"ConnectionError: {repo!r} is no directory here, not in the cache"), result[name]
        assert f"hf download {repo}" in result[name] and "--model DIRECTORY" in result[name]
    assert not any("\n" in result[name] for name in ("unknown", "gated", "not cached", "offline, not cached"))
