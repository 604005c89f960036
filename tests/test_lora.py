"""lora.py: adapters against numbers that PEFT computed, switching that always restores, files, and NF4."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import golden
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file

import lora
from lora import LoraLinear, NF4Linear, add_lora, disabled, load_adapter, merge_adapter, merged, reference, save_adapter
from model import ModelConfig, Transformer, load_model, save_model

ROOT = Path(lora.__file__).parent
CONFIG = golden.CASES["qwen2_tied_v4"]  # biases on q, k and v, and a tied head
IDS = torch.tensor([golden.prompt(CONFIG)])
ALL = list(lora.DEFAULT)

# Adapters whose numbers PEFT computed; the patterns are rank_pattern's and alpha_pattern's.
ADAPTERS = {
    "plain": {"r": 4, "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
              "target_modules": ALL},
    "patterns": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "mlp.up_proj", "down_proj"],
                 "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8},
                 "alpha_pattern": {"model.layers.0.*up_proj": 3}},
    "expression": {"r": 2, "lora_alpha": 5.0, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
                   "target_modules": r"model\.layers\.1\.self_attn\.(k|v|o)_proj"},
}  # fmt: skip

# PEFT's logits in fp64: the last position's first six, and the log-sum-exp of positions 0, 9, 19, 29, 39.
# Made by test_lora_oracle.py, which compares them with PEFT wherever that is installed.
GOLDEN = {
    "plain": [0.50204, 3.092576, -1.908555, -1.009769, -2.461201, -2.273023, 6.464197, 7.308967,
              7.185998, 7.872774, 6.328263],
    "patterns": [0.398665, -3.361036, -0.225746, 1.828324, 0.328156, 1.807269, 8.250735, 7.726876,
                 8.305777, 6.853128, 7.369163],
    "expression": [-0.12253, 1.824664, 2.301916, -2.67899, 1.318523, -0.572444, 7.089971, 8.057669,
                   7.256995, 7.958405, 7.341173],
}  # fmt: skip


def random_model(dtype=torch.float64):
    model = Transformer(ModelConfig.from_dict(CONFIG)).to(dtype)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in golden.weights(CONFIG).items()}, strict=False)
    return model


def logits(model, ids=IDS):
    return model(ids, head=F.linear)


def summary(logits) -> list[float]:
    """(1,T,V) -> the eleven numbers of GOLDEN."""
    return [*logits[0, -1, :6].tolist(), *logits[0, [0, 9, 19, 29, 39]].logsumexp(-1).tolist()]


def shapes(config: dict) -> dict:
    """PEFT's key -> shape, spelled out independently of lora.py."""
    D, I, H = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_attention_heads"]
    K = CONFIG["num_key_value_heads"] * D // H
    widths = {"self_attn.q_proj": (D, D), "self_attn.k_proj": (K, D), "self_attn.v_proj": (K, D),
              "self_attn.o_proj": (D, D), "mlp.gate_proj": (I, D), "mlp.up_proj": (I, D),
              "mlp.down_proj": (D, I)}  # fmt: skip
    result = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, (out, into) in widths.items():
            targets, leaf = config["target_modules"], name.split(".")[-1]
            if isinstance(targets, str) and not (layer == 1 and leaf in ("k_proj", "v_proj", "o_proj")):
                continue
            if isinstance(targets, list) and leaf not in targets and name not in targets:
                continue
            r = config["r"]
            if config["rank_pattern"]:
                r = 2 if leaf == "q_proj" else 8 if (layer, leaf) == (1, "down_proj") else r
            result[f"base_model.model.model.layers.{layer}.{name}.lora_A.weight"] = (r, into)
            result[f"base_model.model.model.layers.{layer}.{name}.lora_B.weight"] = (out, r)
    return result


def adapter(directory: Path, name="plain", **changes) -> Path:
    """PEFT's two files, with numbers large enough that a wrong scale shows."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none", **ADAPTERS[name]}
    config |= changes
    rng = np.random.RandomState(3)
    tensors = {k: (0.2 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes(ADAPTERS[name]).items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture
def adapted(tmp_path):
    """A model whose adapter is not zero, so that on, off and merged all differ."""
    return load_adapter(random_model(), adapter(tmp_path / "adapter"))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.out_proj, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.x = nn.ModuleDict({"proj": nn.Linear(4, 4)})


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_on_off_and_merged_are_those_of_peft(name, tmp_path):
    model = load_adapter(random_model(), adapter(tmp_path, name))
    with torch.no_grad():
        assert summary(logits(model)) == pytest.approx(GOLDEN[name], abs=5e-5)
        with merged(model):
            assert summary(logits(model)) == pytest.approx(GOLDEN[name], abs=5e-5)
        with disabled(model):
            assert torch.equal(logits(model), logits(random_model()))


@pytest.mark.parametrize("rslora, added", [(False, 64.0), (True, 181.0193)])
def test_added_value_of_ones_by_hand(rslora, added):
    """Scaling by alpha alone, forgetting to divide by r, would add 512."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    add_lora(model, r=8, alpha=16, targets=["0"], rslora=rslora)
    x, base = torch.ones(1, 4), model[0].weight.sum(1)
    model[0].lora_A.data.fill_(1.0), model[0].lora_B.data.fill_(1.0)
    assert (model(x) - base).tolist() == [pytest.approx([added] * 3, rel=1e-5)]
    with merged(model):
        assert (model(x) - base).tolist() == [pytest.approx([added] * 3, rel=1e-5)]
    assert (merge_adapter(model)(x) - base).tolist() == [pytest.approx([added] * 3, rel=1e-5)]


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained():
    model = add_lora(random_model(torch.float32), r=4, alpha=8)
    with torch.no_grad():
        assert torch.equal(logits(model), logits(random_model(torch.float32)))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-1] for name in trainable} == {"lora_A", "lora_B"} and len(trainable) == 2 * 7 * 2
    logits(model).square().mean().backward()
    assert all((p.grad is not None) == (name in trainable) for name, p in model.named_parameters())
    assert all(p.grad.abs().max() > 0 for name, p in trainable.items() if name.endswith("lora_B"))


def test_start_is_kaiming_uniform_and_zero_in_fp32_whatever_the_base():
    """A uniform within ±1/sqrt(in): a = √5 in Kaiming's formula, as PEFT starts; std 1/sqrt(3 in)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 8).to(torch.bfloat16))
    add_lora(model, r=64, targets=["0"])
    A, B = model[0].lora_A.detach(), model[0].lora_B.detach()
    assert A.dtype == B.dtype == torch.float32 and model[0].weight.dtype == torch.bfloat16
    assert (A.shape, B.shape) == ((64, 400), (8, 64))
    assert A.abs().max() <= 400**-0.5 and A.std() == pytest.approx((3 * 400) ** -0.5, rel=0.02) and not B.any()


def test_gradients_in_float64_are_those_of_the_formula(adapted):
    """dB = s · gᵀ(x Aᵀ), dA = s · (g B)ᵀ x, dx = g (W + s B A)."""
    module = adapted.model.layers[0].mlp.up_proj.double()
    x = torch.randn(5, module.in_features, dtype=torch.float64, requires_grad=True)
    g = torch.randn(5, module.out_features, dtype=torch.float64)
    module(x).backward(g)
    A, B, W, s = module.lora_A.data, module.lora_B.data, module.weight.data, 2.0
    torch.testing.assert_close(module.lora_B.grad, s * g.T @ (x.detach() @ A.T))
    torch.testing.assert_close(module.lora_A.grad, s * (g @ B).T @ x.detach())
    torch.testing.assert_close(x.grad, g @ (W + s * B @ A))


@pytest.mark.parametrize("base", ["keep", "nf4"])
def test_checkpointing_gives_the_same_gradients_with_frozen_embeddings(base):
    """Re-entrant checkpointing under a frozen embedding sees no input that wants a gradient, and trains nothing."""
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = add_lora(random_model(torch.float32), r=4, dropout=0.5, base=base)
        for module in lora.linears(model, LoraLinear).values():
            nn.init.normal_(module.lora_B, std=0.1)
        model.model.checkpointing = checkpointing
        torch.manual_seed(1)  # dropout's draws
        logits(model).logsumexp(-1).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert len(grads[0]) == 28 and all(grad is not None and grad.any() for grad in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-5)


def test_scoring_is_deterministic_under_dropout():
    """With lora_dropout 0.5 the reference and old log-probs were noise, and the first ratio was not 1."""
    torch.manual_seed(0)
    model = add_lora(random_model(torch.float32), r=4, dropout=0.5)
    model.train()

    def logp():
        return logits(model).log_softmax(-1)[0, :-1].gather(-1, IDS[0, 1:, None])

    with torch.no_grad():
        old, again = logp(), logp()
    assert torch.equal(old, again) and model.training
    assert (logp() - old).exp().sub(1).abs().max() < 1e-3  # the first update: B is zero, whatever is dropped
    for module in lora.linears(model, LoraLinear).values():
        nn.init.normal_(module.lora_B, std=0.1)
    with torch.no_grad():
        old, again = logp(), logp()
    assert torch.equal(old, again)
    assert not torch.equal(logp(), logp())  # with a gradient, dropout is really there
    model.eval()
    assert torch.equal(logp(), old)


# ---------------------------------------------------------------------------------------------------------------------
# Switching


@pytest.mark.parametrize("switch", [disabled, reference, merged])
def test_each_switch_restores_what_it_found(switch, adapted):
    with torch.no_grad():
        on = logits(adapted)
        with disabled(adapted):
            off = logits(adapted)
        assert (on - off).abs().max() > 0.1

        with pytest.raises(KeyError):
            with switch(adapted):
                raise KeyError
        assert torch.equal(logits(adapted), on)

        for outer, inside in [(disabled, off), (merged, on), (reference, on)]:  # the state at entry is not always "on"
            with outer(adapted):
                before = logits(adapted)
                torch.testing.assert_close(before, inside)
                with switch(adapted):
                    with switch(adapted):
                        pass
                assert torch.equal(logits(adapted), before)
        assert torch.equal(logits(adapted), on)


def test_inner_switches_win(adapted):
    with torch.no_grad():
        on = logits(adapted)
        with disabled(adapted):
            off = logits(adapted)
            with reference(adapted):
                assert torch.equal(logits(adapted), on)
            with merged(adapted):  # folds in what is on: nothing
                torch.testing.assert_close(logits(adapted), off)
        with merged(adapted), disabled(adapted):
            assert torch.equal(logits(adapted), off)


def test_merging_a_hundred_times_leaves_every_bit(tmp_path):
    """Adding and subtracting the delta in bf16 a hundred times changes 16 % of the weights; in fp32 not none either."""
    model = load_adapter(random_model(torch.float32), adapter(tmp_path))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        on = logits(model)
        for _ in range(100):
            with merged(model):
                pass
        with merged(model):
            torch.testing.assert_close(logits(model), on, rtol=1e-5, atol=1e-4)
        assert torch.equal(logits(model), on)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_merging_in_bf16_rounds_once_and_only_for_export():
    """At 1.0 bf16 steps by 0.0078: a delta of 0.003 vanishes, one of 0.005 rounds up; A·B in bf16 would err twice."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False).to(torch.bfloat16))
    model[0].weight.data.fill_(1.0)
    add_lora(model, r=1, alpha=1, targets=["0"])
    model[0].lora_A.data.fill_(1.0)
    model[0].lora_B.data.copy_(torch.tensor([[0.003], [0.005]]))
    with pytest.raises(ValueError, match="bfloat16.*float32"):
        with merged(model):
            pass
    assert merge_adapter(model)[0].weight.tolist() == [[1.0], [1.0078125]]
    assert type(model[0]) is nn.Linear and model[0].weight.dtype == torch.bfloat16


def test_merged_weights_round_to_the_sum_in_any_type(tmp_path):
    exact = load_adapter(random_model(torch.float64), adapter(tmp_path))
    rounded = load_adapter(random_model(torch.bfloat16), adapter(tmp_path))
    base = {name: m.weight.double() for name, m in lora.linears(rounded).items()}
    for name, module in lora.linears(merge_adapter(rounded)).items():
        m = lora.linears(exact)[name]
        whole = base[name] + m.scale * m.lora_B.double() @ m.lora_A.double()
        half_a_step = whole.abs() * 2**-8 + 1e-6
        assert ((module.weight.double() - whole).abs() <= half_a_step).all()


def test_reference_is_where_training_started(adapted, tmp_path):
    """A snapshot taken at a resume, or the base under an adapter that came from a file, would give KL > 0 at step 0."""
    fresh = add_lora(random_model(), r=4)
    for model in (fresh, adapted):
        with torch.no_grad():
            start = logits(model)
            with reference(model):
                assert torch.equal(logits(model), start)  # KL at step 0 is exactly 0
            for p in model.parameters():
                if p.requires_grad:
                    p += 0.1 * torch.randn_like(p)  # trained
            now = logits(model)
            assert (now - start).abs().max() > 0.1
            with reference(model):
                assert torch.equal(logits(model), start)
            with reference(model):
                save_adapter(model, tmp_path / "start") if model is adapted else None
        resumed = add_lora(random_model(), r=4) if model is fresh else load_adapter(random_model(), tmp_path / "start")
        resumed.load_state_dict(dict(model.named_parameters()), strict=False)  # what a checkpoint of the training holds
        with torch.no_grad():
            assert torch.equal(logits(resumed), now)
            with reference(resumed):
                assert torch.equal(logits(resumed), start)


def test_reference_without_adapters_is_refused():
    """It would be the policy itself: a KL that is 0 for ever."""
    with pytest.raises(ValueError, match="no adapters"):
        with reference(random_model()):
            pass


# ---------------------------------------------------------------------------------------------------------------------
# Targets


def test_targets_match_whole_path_components():
    """`proj` as a mere suffix would take out_proj too."""
    assert list(lora.linears(add_lora(Toy(), targets=["proj"]), LoraLinear)) == ["proj", "x.proj"]
    assert list(lora.linears(add_lora(Toy(), targets=["x.proj"]), LoraLinear)) == ["x.proj"]
    assert list(lora.linears(add_lora(Toy(), targets=r".*proj"), LoraLinear)) == ["proj", "out_proj", "x.proj"]
    assert list(lora.linears(add_lora(Toy(), targets="all-linear"), LoraLinear)) == ["proj", "out_proj", "x.proj"]
    assert len(lora.linears(add_lora(random_model(), targets=["q_proj", "self_attn.k_proj"]), LoraLinear)) == 4


@pytest.mark.parametrize("arguments, said", [
    ({"targets": ["nonexist"]}, "'nonexist' matches no linear; known: out_proj, proj"),
    ({"targets": ["proj", "nonexist"]}, "'nonexist' matches no linear"),
    ({"targets": ["out_prj"]}, "did you mean 'out_proj'"),
    ({"targets": ["lm_head"]}, "the head is called with its weight"),
    ({"targets": r"k_.*"}, "regular expression 'k_.*'"),
    ({"targets": []}, "targets is empty"),
    ({"targets": ["proj"], "rank_pattern": {"q_proj": 4}}, "rank_pattern: 'q_proj' matches none"),
    ({"targets": ["proj"], "alpha_pattern": {"proj": 4, "up": 1}}, "alpha_pattern: 'up' matches none"),
    ({"targets": ["proj"], "r": 0}, "r is 0 for proj"),
    ({"targets": ["proj"], "dropout": 1.0}, "dropout is 1.0"),
    ({"targets": ["proj"], "base": "int8"}, "base is 'int8', but must be keep or nf4"),
])  # fmt: skip
def test_bad_requests_are_one_clear_line(arguments, said):
    model = Toy()
    with pytest.raises(ValueError) as error:
        add_lora(model, **arguments)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert all(p.requires_grad for p in model.parameters()) and not lora.linears(model, LoraLinear)


def test_adapters_are_added_once():
    with pytest.raises(ValueError, match="already"):
        add_lora(add_lora(Toy(), targets=["proj"]), targets=["out_proj"])


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager"),
                                  lambda model: nn.ModuleDict({"module": model})])  # fmt: skip
def test_what_is_saved_is_what_was_loaded_whatever_wraps_the_model(name, wrap, tmp_path):
    model = wrap(load_adapter(random_model(), adapter(tmp_path / "in", name)))
    save_adapter(model, tmp_path / "out")
    there = load_file(tmp_path / "in/adapter_model.safetensors")
    back = load_file(tmp_path / "out/adapter_model.safetensors")
    assert {k: v.shape for k, v in back.items()} == shapes(ADAPTERS[name])
    assert all(np.array_equal(back[key], there[key]) for key in there)
    again = load_adapter(random_model(), tmp_path / "out")
    with torch.no_grad():
        assert summary(logits(again)) == pytest.approx(GOLDEN[name], abs=5e-5)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == ADAPTERS[name]["r"]
    if name == "plain":
        assert config["target_modules"] == sorted(ALL) and config["rank_pattern"] == {} and config["lora_alpha"] == 8


def test_load_fills_adapters_that_fit_and_refuses_others(tmp_path):
    files = adapter(tmp_path)
    with torch.no_grad():
        filled = load_adapter(add_lora(random_model(), r=4, alpha=8), files)
        assert summary(logits(filled)) == pytest.approx(GOLDEN["plain"], abs=5e-5)
    with pytest.raises(ValueError, match=r"is \(4, 8, False\), but the model has \(4, 16, False\)"):
        load_adapter(add_lora(random_model(), r=4, alpha=16), files)
    with pytest.raises(ValueError, match="but the model has None"):
        load_adapter(add_lora(random_model(), r=4, alpha=8, targets=["q_proj"]), files)


@pytest.mark.parametrize("changes, said", [
    ({"lora_alpha": ...}, "lacks lora_alpha"),
    ({"r": ...}, "lacks r"),
    ({"target_modules": None}, "lacks target_modules"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"use_dora": True}, "use_dora is True"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"layers_to_transform": 0}, "layers_to_transform is 0"),  # layer 0, not "no layers"
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"target_modules": [*ALL, "c_attn"]}, "'c_attn' matches no linear"),
    ({"target_modules": [*ALL, "lm_head"]}, "takes no adapter"),
    ({"target_modules": ALL[:-1]}, "has what its config does not name: base_model.model.model.layers.0.mlp.down_proj"),
    ({"r": 8}, "has another shape than its config says"),
])  # fmt: skip
def test_files_that_are_not_plain_lora_are_refused_by_name(changes, said, tmp_path):
    model = random_model()
    with pytest.raises(ValueError) as error:
        load_adapter(model, adapter(tmp_path, **changes))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert all(p.requires_grad for p in model.parameters()) and not lora.linears(model, LoraLinear)


@pytest.mark.parametrize("rename", [
    lambda key: key.replace("base_model.model.", ""),
    lambda key: key.replace(".lora_A.", ".lora_A.default."),
    lambda key: key.replace("layers.1", "layers.2"),
])  # fmt: skip
def test_foreign_keys_are_an_error_not_a_fresh_adapter(rename, tmp_path):
    """PEFT warns and goes on with an adapter that changes nothing."""
    file = adapter(tmp_path) / "adapter_model.safetensors"
    save_file({rename(key): value for key, value in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="lacks base_model.model.model.layers"):
        load_adapter(random_model(), tmp_path)


def test_a_directory_without_the_files_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="adapter_config.json cannot be read"):
        load_adapter(random_model(), tmp_path)
    (adapter(tmp_path) / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be read"):
        load_adapter(random_model(), tmp_path)


@pytest.mark.parametrize("base", ["keep", "nf4"])
def test_adapters_before_the_weights_are_those_after(base, tmp_path):
    """load_model's `prepare` sees a model on the meta device; what it adds must end up with the same numbers."""
    directory, files = str(golden.write(tmp_path / "base", CONFIG)), adapter(tmp_path / "adapter")
    after = load_adapter(load_model(directory), files, base=base)
    before = load_model(directory, prepare=lambda model: load_adapter(model, files, base=base))
    fresh = load_model(directory, prepare=lambda model: add_lora(model, r=4, base=base))
    with torch.no_grad():
        assert torch.equal(logits(before), logits(after))
        with reference(before), disabled(after):
            assert (logits(before) - logits(after)).abs().max() > 0.1
        with disabled(after):
            assert torch.equal(logits(fresh), logits(after))
    A = fresh.model.layers[1].mlp.down_proj.lora_A
    assert 0 < A.abs().max() <= A.shape[1] ** -0.5
    assert not any(p.is_meta for p in [*before.parameters(), *before.buffers()])


def test_the_command_writes_a_plain_model(tmp_path):
    golden.write(tmp_path / "base", CONFIG)
    adapter(tmp_path / "adapter")
    command = [sys.executable, ROOT / "lora.py", "--model", tmp_path / "base", "--adapter", tmp_path / "adapter"]
    subprocess.run([*command, "--out", tmp_path / "out"], check=True)
    with torch.no_grad():
        assert summary(logits(load_model(str(tmp_path / "out")))) == pytest.approx(GOLDEN["plain"], abs=1e-4)


@pytest.mark.parametrize("base", ["keep", "nf4"])
def test_saving_a_model_before_its_adapter_is_merged_is_refused(base, tmp_path):
    """The base without the adapter, under names that nobody loads, was written without a word."""
    model = add_lora(random_model(), base=base)
    with pytest.raises(ValueError, match="mlp.down_proj.* not of a plain model: lora.merge_adapter"):
        save_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# NF4


def test_every_code_comes_back_exactly():
    """Weights that are code values times a power of two, absmax alike in every block: nothing is rounded anywhere."""
    weight = 2.0**-5 * torch.tensor(lora.NF4).repeat(4, 32)  # (4,512)
    quantised = lora.quantise_nf4(weight)
    assert [tuple(q.shape) for q in quantised] == [(1024,), (32,), (1,), ()]
    assert quantised[0][:3].tolist() == [0x01, 0x23, 0x45]  # the first weight in the high half
    assert torch.equal(lora.dequantise_nf4(*quantised, weight.shape, torch.float32), weight)


def test_rounding_is_to_the_nearest_code_by_hand():
    """-0.3 lies nearer to -0.2844 than to -0.3949, 0.05 nearer to 0.0796 than to 0, and a tie goes down."""
    book = torch.tensor(lora.NF4)
    values = torch.tensor([-0.3, 0.05, 0.0397, 0.0398, -1.0, 1.0, 0.0, (lora.NF4[8] + lora.NF4[7]) / 2])
    assert lora.round_to(values, book).tolist() == [4, 8, 7, 8, 0, 15, 7, 7]


def test_the_dynamic_type_by_hand():
    """Decade 1e-6 has one value, the middle of [0.1, 1]; the largest has 64; with signs, 0 and 1 they are 256."""
    book = lora.code_books(torch.device("cpu"))[1]
    assert len(book) == 256 and book[127] == 0 and book[255] == 1
    assert book[128].item() == pytest.approx(0.55e-6) and book[129].item() == pytest.approx(0.325e-5)
    assert book[254].item() == pytest.approx(1 - 0.9 / 128) and book[0].item() == pytest.approx(-(1 - 0.9 / 128))


@pytest.mark.parametrize("shape", [(130, 130), (7, 66), (3, 5), (1, 64)])
def test_error_is_within_half_the_widest_gap(shape):
    """Sizes that fill no block of 64, or no byte, included. Gaps near ±1 are 0.30 wide, so half is 0.152 of absmax."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    back = lora.dequantise_nf4(*lora.quantise_nf4(weight), shape, torch.float32)
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1).repeat_interleave(64)[: weight.numel()].view(shape)
    assert ((back - weight).abs() <= 0.16 * absmax).all()
    # For normal weights the expected squared error of NF4 is known: about 0.09 of the standard deviation, as a root.
    if weight.numel() > 1000:
        assert 0.08 < (back - weight).square().mean().sqrt() < 0.10


def test_zeros_stay_zero():
    """An absmax of 0 divides 0 by 0."""
    weight = torch.zeros(4, 64)
    weight[2, 3] = 0.5
    back = lora.dequantise_nf4(*lora.quantise_nf4(weight), weight.shape, torch.float32)
    assert not back[0].any() and back[2, 3] == pytest.approx(0.5, rel=1e-2)
    assert not lora.dequantise_nf4(*lora.quantise_nf4(torch.zeros(64)), (64,), torch.float32).any()


def test_bytes_a_weight():
    """Single-precision scales would cost 0.5625; without the second quantisation QLoRA is no QLoRA."""
    model = add_lora(nn.Sequential(nn.Linear(256, 512, bias=False)), r=4, targets=["0"], base="nf4")
    held = sum(b.nbytes for b in model.buffers())
    assert held / (256 * 512) <= 0.52 and [name for name, _ in model.named_parameters()] == ["0.lora_A", "0.lora_B"]
    assert list(model.state_dict()) == ["0.lora_A", "0.lora_B"]  # the base comes from its own checkpoint again


def test_nf4_models_quantise_all_linears_but_the_head(tmp_path):
    directory = str(golden.write(tmp_path, CONFIG))
    model = load_model(directory, prepare=lambda model: add_lora(model, r=4, targets=["q_proj"], base="nf4"))
    assert len(lora.linears(model, NF4Linear)) == 14 and len(lora.linears(model, LoraLinear)) == 2
    assert type(model.lm_head) is nn.Linear
    dense = add_lora(random_model(torch.float32), r=4, targets=["q_proj"])
    for name, module in lora.linears(model).items():
        shape = dense.get_submodule(name).weight.shape
        expected = lora.dequantise_nf4(*lora.quantise_nf4(dense.get_submodule(name).weight), shape, torch.float32)
        dense.get_submodule(name).weight.data.copy_(expected)
        if module.bias is not None:
            assert torch.equal(module.bias, dense.get_submodule(name).bias)
    with torch.no_grad():  # a model of the dequantised weights is the same model
        assert torch.equal(logits(model), logits(dense))


def test_nf4_gradients_are_those_of_the_dequantised_weight_which_nobody_keeps():
    torch.manual_seed(0)
    linear = nn.Linear(128, 64)
    module = add_lora(nn.Sequential(linear), r=4, targets=["0"], base="nf4")[0]
    nn.init.normal_(module.lora_B)
    x = torch.randn(3, 128, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = module(x)
    assert not any(t.shape in ((64, 128), (128, 64)) for t in kept)
    g = torch.randn(3, 64)
    y.backward(g)
    torch.testing.assert_close(x.grad, g @ (module.weight + 8 * module.lora_B @ module.lora_A))
    torch.testing.assert_close(y, x @ module.weight.T + module.bias + 8 * x @ module.lora_A.T @ module.lora_B.T)


def test_merging_nf4_leaves_plain_linears_of_the_sum(tmp_path):
    directory = str(golden.write(tmp_path / "base", CONFIG))
    model = load_model(directory, prepare=lambda m: load_adapter(m, adapter(tmp_path / "adapter"), base="nf4"))
    with torch.no_grad():
        on = logits(model)
        with merged(model):
            torch.testing.assert_close(logits(model), on, rtol=1e-5, atol=1e-4)
        assert torch.equal(logits(model), on)
        save_model(merge_adapter(model), tmp_path / "out")
        assert {type(module) for module in lora.linears(model).values()} == {nn.Linear} and not list(model.buffers())
        torch.testing.assert_close(logits(load_model(str(tmp_path / "out"))), on, rtol=1e-5, atol=1e-4)


def test_bf16_inputs_meet_bf16_weights():
    module = add_lora(nn.Sequential(nn.Linear(64, 64)), r=4, targets=["0"], base="nf4")[0]
    module.bias.data = module.bias.data.bfloat16()
    assert module(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def script(text: str, **environment):
    """Runs Python in a fresh process of one thread, from the repository."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(lora.triton is None, reason="triton is not installed")
def test_the_kernel_interpreted_is_the_torch_version():
    """One ulp at most: the kernel may fuse absmax's product and sum, and the interpreter cuts bf16 off instead of
    rounding. Sizes with more than one block of scales, with a part block, and with half a byte."""
    script("""
        import torch, lora
        torch.manual_seed(0)
        for shape, BYTES in [((130, 130), 2048), ((7, 66), 64), ((3, 5), 64)]:
            for dtype in (torch.float32, torch.bfloat16):
                quantised = lora.quantise_nf4(torch.randn(shape))
                ours = lora.dequantise_triton(*quantised, shape, dtype, BYTES)
                torch.testing.assert_close(ours, lora.dequantise_nf4(*quantised, shape, dtype),
                                           rtol=2**-23 if dtype == torch.float32 else 2**-7, atol=0)
    """, TRITON_INTERPRET="1")  # fmt: skip


@pytest.mark.skipif(lora.triton is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("out", ["*bf16", "*fp32"])
def test_the_kernel_compiles_for_hopper(out):
    from triton.backends.compiler import GPUTarget

    signature = {"out": out, "codes": "*u8", "scale_codes": "*u8", "scale_absmax": "*fp32", "scale_mean": "*fp32",
                 "nf4": "*fp32", "dynamic": "*fp32", "n": "i32", "BYTES": "constexpr"}  # fmt: skip
    source = lora.triton.compiler.ASTSource(fn=lora.dequantise_kernel, signature=signature, constexprs={"BYTES": 1024},
                                            attrs={(0,): [["tt.divisibility", 16]]})  # fmt: skip
    compiled = lora.triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90a" in compiled.asm["ptx"] and compiled.metadata.shared <= 16 * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_on_the_gpu_is_the_torch_version(dtype):
    quantised = lora.quantise_nf4(torch.randn(1000, 333))
    ours = lora.dequantise_nf4(*(q.cuda() for q in quantised), (1000, 333), dtype).cpu()
    expected = lora.dequantise_nf4(*quantised, (1000, 333), dtype)
    torch.testing.assert_close(ours, expected, rtol=2**-23 if dtype == torch.float32 else 2**-8, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Sharded


TWO_RANKS = """
    import sys, torch, torch.nn.functional as F
    import fsdp, lora
    from model import load_model
    base, files, out, ids = sys.argv[1], sys.argv[2], sys.argv[3], torch.arange(40)[None]
    world = fsdp.setup("cpu")

    def build(kind, shard, dtype=torch.float32):
        torch.manual_seed(0)
        def prepare(model):
            lora.load_adapter(model, files, base=kind)
            if shard:
                fsdp.shard(model, world, dtype=dtype)
        return load_model(base, prepare=prepare)

    for kind in ("keep", "nf4"):
        alone, model = build(kind, False), build(kind, True)
        for m, ranks in ((alone, 1), (model, 2)):
            (m(ids, head=F.linear).logsumexp(-1).sum() / ranks).backward()
        for (name, p), q in zip(alone.named_parameters(), model.parameters()):
            assert (p.grad is None) == (q.grad is None) == (not p.requires_grad), name
            if p.requires_grad:
                torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for switch in (lora.disabled, lora.reference):
                with switch(alone), switch(model):
                    torch.testing.assert_close(model(ids), alone(ids), rtol=1e-5, atol=1e-5)
            with fsdp.unsharded(model) as plain, lora.merged(plain):
                torch.testing.assert_close(plain(ids), alone(ids), rtol=1e-4, atol=1e-4)
            try:
                with lora.merged(model):
                    raise SystemExit("sharded weights were merged")
            except ValueError:
                pass
            half = build(kind, True, torch.bfloat16)
            with lora.reference(half):
                start = half(ids)
            assert torch.equal(half(ids), start)  # KL at step 0, in bf16 too
        lora.save_adapter(model, out + kind)
        torch.testing.assert_close(lora.load_adapter(model, out + kind)(ids), alone(ids), rtol=1e-5, atol=1e-5)
    fsdp.shutdown()
"""


def test_two_ranks_train_switch_and_save_as_one(tmp_path):
    golden.write(tmp_path / "base", CONFIG)
    adapter(tmp_path / "adapter")
    (tmp_path / "ranks.py").write_text(textwrap.dedent(TWO_RANKS))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    files = [tmp_path / name for name in ("ranks.py", "base", "adapter", "out-")]
    done = subprocess.run([*torchrun, *files], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    there = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for kind in ("keep", "nf4"):
        back = load_file(tmp_path / f"out-{kind}/adapter_model.safetensors")
        assert back.keys() == there.keys() and all(np.array_equal(back[key], there[key]) for key in there)
