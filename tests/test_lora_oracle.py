"""lora.py beside PEFT and bitsandbytes themselves, where they are installed."""

import json
import warnings

import golden
import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file
from test_lora import ADAPTERS, CONFIG, GOLDEN, IDS, adapter, logits, random_model, shapes, summary

import lora
from lora import add_lora, disabled, load_adapter, merge_adapter, save_adapter
from model import load_model


@pytest.fixture
def with_peft(tmp_path):
    """with_peft(files) -> transformers' model with PEFT's adapter of these files, in fp64."""
    peft = pytest.importorskip("peft", reason="PEFT is the oracle")
    transformers = pytest.importorskip("transformers", reason="PEFT works on its models")
    directory = golden.write(tmp_path / "base", CONFIG)

    def build(files):
        base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys.*")  # PEFT would go on without them
            return peft.PeftModel.from_pretrained(base, files, autocast_adapter_dtype=False).double()

    return build


@pytest.mark.parametrize("name", ADAPTERS)
@torch.no_grad()
def test_peft_files_give_pefts_logits(name, with_peft, tmp_path):
    files = adapter(tmp_path / "adapter", name)
    theirs, ours = with_peft(files), load_adapter(random_model(), files)
    expected = theirs(IDS).logits
    assert summary(expected) == pytest.approx(GOLDEN[name], abs=5e-5), [round(x, 6) for x in summary(expected)]
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-4)
    with theirs.disable_adapter(), disabled(ours):
        torch.testing.assert_close(logits(ours), theirs(IDS).logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(merge_adapter(ours)), theirs.merge_and_unload()(IDS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ADAPTERS)
@torch.no_grad()
def test_peft_loads_what_we_save(name, with_peft, tmp_path):
    ours = load_adapter(random_model(), adapter(tmp_path / "adapter", name))
    for module in lora.linears(ours, lora.LoraLinear).values():
        nn.init.normal_(module.lora_B, std=0.3)
    save_adapter(ours, tmp_path / "out")
    theirs = with_peft(tmp_path / "out")
    torch.testing.assert_close(logits(ours), theirs(IDS).logits, rtol=0, atol=1e-4)
    theirs.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again/adapter_model.safetensors")
    assert {key: tuple(value.shape) for key, value in again.items()} == shapes(ADAPTERS[name])
    assert torch.equal(logits(load_adapter(random_model(), tmp_path / "again")), logits(ours))


def test_peft_picks_the_same_linears_and_starts_alike(tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is the oracle")
    transformers = pytest.importorskip("transformers", reason="PEFT works on its models")
    directory = golden.write(tmp_path / "base", CONFIG)
    for targets in (["q_proj", "v_proj"], ["self_attn.o_proj"], r".*\.1\..*(up|down)_proj", "all-linear"):
        base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
        theirs = peft.get_peft_model(base, config).state_dict()
        ours = add_lora(load_model(str(directory)), r=3, alpha=6, targets=targets)
        found = {key.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight")
                 for key in theirs if "lora_A" in key}  # fmt: skip
        assert set(lora.linears(ours, lora.LoraLinear)) == found
        for name, module in lora.linears(ours, lora.LoraLinear).items():
            A = theirs[f"base_model.model.{name}.lora_A.default.weight"]
            bound = module.in_features**-0.5
            assert A.abs().max() <= bound and module.lora_A.abs().max() <= bound
            assert A.abs().max() > 0.9 * bound and module.lora_A.abs().max() > 0.9 * bound


def test_a_two_layer_adapter_has_pefts_four_keys_a_layer(with_peft, tmp_path):
    ours = add_lora(random_model(), r=2, targets=["q_proj", "v_proj"])
    save_adapter(ours, tmp_path / "out")
    with_peft(tmp_path / "out").save_pretrained(tmp_path / "theirs")
    keys = set(load_file(tmp_path / "out/adapter_model.safetensors"))
    assert keys == set(load_file(tmp_path / "theirs/adapter_model.safetensors")) and len(keys) == 8
    config = json.loads((tmp_path / "theirs/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (2, 32, ["q_proj", "v_proj"])


# ---------------------------------------------------------------------------------------------------------------------
# bitsandbytes


@pytest.fixture
def bnb():
    return pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the oracle of NF4")


def one_ulp(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2**-23 if ours.dtype == torch.float32 else 2**-8, atol=0)


def test_code_books_are_those_of_bitsandbytes(bnb):
    nf4, dynamic = lora.code_books(torch.device("cpu"))
    assert torch.equal(nf4, bnb.get_4bit_type("nf4", device="cpu")) and torch.equal(dynamic, bnb.create_dynamic_map())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 192), (64, 64), (5, 66), (1000, 1000)])
def test_nf4_is_that_of_bitsandbytes(shape, dtype, bnb):
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(shape)).to(dtype)
    codes, scale_codes, scale_absmax, mean = lora.quantise_nf4(weight)
    theirs, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(codes[: theirs.numel()], theirs.flatten())
    assert torch.equal(scale_absmax, state.state2.absmax) and mean == state.offset

    # bitsandbytes rounds scales to the nearest code on CUDA and in its portable version, as we do; its CPU library
    # rounds them to 16 bits first. So some 0.2 % of scales, next to a tie, differ by one code there, and no others.
    _, absmax = lora.quantise_blocks(weight, 64, torch.tensor(lora.NF4))
    book, size = lora.code_books(torch.device("cpu"))[1], len(absmax)
    value = ((absmax - mean) / scale_absmax.repeat_interleave(256)[:size]).double()
    differ = scale_codes != state.absmax.flatten()
    apart = (value - book[scale_codes.int()]).abs() - (value - book[state.absmax.flatten().int()]).abs()
    assert differ.float().mean() < 0.005 and (apart <= 0).all() and (apart.abs() < 2**-14).all()

    # What one packs, the other unpacks; and where the scale codes agree, that is all there is to agree on.
    back = lora.dequantise_nf4(codes, state.absmax.flatten(), scale_absmax, mean, shape, dtype)
    one_ulp(back, bnb.dequantize_4bit(theirs, state))
    same = ~differ.repeat_interleave(64)[: weight.numel()].view(shape)
    one_ulp(lora.dequantise_nf4(codes, scale_codes, scale_absmax, mean, shape, dtype)[same], back[same])
