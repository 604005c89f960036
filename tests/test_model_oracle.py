"""model.py beside transformers itself, where it is installed: the same checkpoints, in both directions."""

import json

import golden
import pytest
import torch
import torch.nn.functional as F

from model import load_model, save_model, write_checkpoint

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-oracles.txt")


def reference(directory, dtype=torch.float32):
    """transformers' model of a directory, every tensor accounted for."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model.eval()


def ours(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids), head=F.linear)


def theirs(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", golden.CASES)
def test_logits_and_greedy_ids_equal_and_what_is_saved_loads_back(name, shards, tmp_path):
    config = golden.CASES[name]
    golden.write(tmp_path / "source", config, shards=shards)
    mine, original, ids = load_model(str(tmp_path / "source")), reference(tmp_path / "source"), [golden.prompt(config)]
    torch.testing.assert_close(ours(mine, ids), theirs(original, ids), atol=1e-4, rtol=0)
    ours_ids, their_ids = list(ids[0]), list(ids[0])
    for _ in range(golden.NEW_TOKENS):
        ours_ids.append(int(ours(mine, [ours_ids])[0, -1].argmax()))
        their_ids.append(int(theirs(original, [their_ids])[0, -1].argmax()))
    assert ours_ids == their_ids

    with torch.no_grad():
        for p in mine.parameters():
            p.mul_(1.1)  # as if trained
    if shards == 1:
        save_model(mine, tmp_path / "saved")
    else:
        write_checkpoint(tmp_path / "saved", mine.config, mine.named_parameters(), torch.float32, shard_bytes=60_000)
        index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "saved").glob("*.safetensors")}
    again = reference(tmp_path / "saved")
    assert again.config.tie_word_embeddings is config.get("tie_word_embeddings", False)
    torch.testing.assert_close(theirs(again, ids), ours(mine, ids), atol=1e-4, rtol=0)
    assert (theirs(again, ids) - theirs(original, ids)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama_biases_v5", "qwen2_v5", "qwen3_wide_heads_v5"])
def test_bf16_is_saved_as_asked_and_computes_alike(name, tmp_path):
    golden.write(tmp_path / "source", golden.CASES[name])
    save_model(load_model(str(tmp_path / "source")), tmp_path / "saved", dtype=torch.bfloat16)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16
    mine = load_model(str(tmp_path / "saved"), dtype=torch.bfloat16)
    original = reference(tmp_path / "saved", torch.bfloat16)
    exact, ids = reference(tmp_path / "saved", torch.float64), [golden.prompt(golden.CASES[name])]
    truth = theirs(exact, ids)
    our_error = (ours(mine, ids).double() - truth).norm() / truth.norm()
    their_error = (theirs(original, ids).double() - truth).norm() / truth.norm()
    assert our_error < 1.3 * their_error < 0.1  # both round, differently; ours no worse


def test_parameter_names_are_those_of_hugging_face(tmp_path):
    for name, config in golden.CASES.items():
        golden.write(tmp_path / name, config)
        names = {key for key, _ in reference(tmp_path / name).named_parameters()}
        assert {key for key, _ in load_model(str(tmp_path / name)).named_parameters()} == names


@pytest.mark.parametrize(
    "name, more",
    [
        ("mistral_v5", {"sliding_window": 16}),
        ("qwen2_tied_v4", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3_wide_heads_v5", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    ],
)
def test_up_to_a_sliding_window_we_are_exact_and_just_past_it_we_refuse(name, more, tmp_path):
    config = golden.CASES[name] | more
    golden.write(tmp_path, config)
    mine, original, ids = load_model(str(tmp_path)), reference(tmp_path), golden.prompt(config)
    torch.testing.assert_close(ours(mine, [ids[:16]]), theirs(original, [ids[:16]]), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="longer than the 16"):
        ours(mine, [ids[:17]])
    mine.config.max_position_embeddings = 24  # what would have come out
    wrong = (ours(mine, [ids[:24]]) - theirs(original, [ids[:24]])).abs()[0]
    assert wrong[:16].max() < 1e-4 and wrong[16:].max() > 1e-2


def test_sequences_of_a_window_unused_are_read_to_their_end(tmp_path):
    # Qwen2 writes sliding_window beside use_sliding_window: false; it must not be honoured then.
    config = golden.CASES["qwen2_tied_v4"] | {"use_sliding_window": False, "sliding_window": 8}
    golden.write(tmp_path, config)
    mine, original, ids = load_model(str(tmp_path)), reference(tmp_path), [golden.prompt(config)]
    torch.testing.assert_close(ours(mine, ids), theirs(original, ids), atol=1e-4, rtol=0)


def test_the_built_in_tiny_model_is_a_qwen3_of_transformers(tmp_path):
    torch.manual_seed(0)
    tiny = load_model("tiny")
    save_model(tiny, tmp_path)
    ids = [list(range(98))]
    torch.testing.assert_close(theirs(reference(tmp_path), ids), ours(tiny, ids), atol=1e-4, rtol=0)
