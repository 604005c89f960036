"""The peers of `bench.py sample` and `bench.py step` are driven as the benchmarks say."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from test_bench_sample_step import job, toy  # noqa: F401

from benchmarks import measure, sample, step

pytest.importorskip("transformers")


def test_transformers_counts_tokens_up_to_and_with_the_first_end(toy, monkeypatch):  # noqa: F811
    peer = sample.Transformers(toy, SimpleNamespace(torch_dtype=torch.float32, device="cpu"))
    assert peer.model.config._attn_implementation == "sdpa"
    prompts = [[5, 6, 7], [8]]
    assert peer.generate(prompts, 9, 1.0) == 18
    assert peer.generate(prompts, 9, sample.UNIFORM, set(range(512))) == 2

    def scripted(input_ids, attention_mask, **rules):
        assert input_ids.tolist() == [[5, 6, 7], [0, 0, 8]] and attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
        assert rules["do_sample"] and rules["top_k"] == 0 and rules["top_p"] == 1 and rules["eos_token_id"] == [3, 4]
        return torch.tensor([[5, 6, 7, 1, 4, 0, 0], [0, 0, 8, 1, 1, 1, 1]])

    monkeypatch.setattr(peer.model, "generate", scripted)
    assert peer.generate(prompts, 4, 1.0, {4, 3}) == 2 + 4


class Counted(list):
    """Turns that are begun and ended until there have been two."""

    def begin(self):
        if self == ["begin", "end"] * 2:
            raise SystemExit
        self.append("begin")
        return ("default",)

    def end(self):
        self.append("end")


def test_a_turn_of_trl_is_one_step_of_its_trainer(toy, tmp_path, monkeypatch):  # noqa: F811
    for package in step.PEER:
        pytest.importorskip(package)
    made, make = [], step.trl_trainer
    monkeypatch.setattr(step, "trl_trainer", lambda *args: made.append(make(*args)) or made[0])
    turns = Counted()
    with pytest.raises(SystemExit):
        step.trl_steps(turns, job(toy, tmp_path, lora=True, beta=0.04))
    (trainer,) = made
    assert trainer.state.global_step == 2
    assert trainer._metrics["train"]["completions/mean_length"] == [5, 5]
    assert trainer._metrics["train"]["completions/min_length"] == [5, 5]
    assert trainer._metrics["train"]["kl"][0] == pytest.approx(0, abs=1e-6)
    ours, args = step.Ours(job(toy, tmp_path, lora=True, beta=0.04)).cfg, trainer.args
    for name in ("loss_type", "scale_rewards", "beta", "epsilon", "num_iterations", "num_generations", "learning_rate",
                 "max_grad_norm", "temperature", "weight_decay", "adam_beta1", "adam_beta2",
                 "max_completion_length"):  # fmt: skip
        assert getattr(args, name) == getattr(ours, name), name
    assert ours.kl == "k3w" and args.use_bias_correction_kl and not args.bf16 and not args.gradient_checkpointing
    assert args.per_device_train_batch_size == 6 and args.gradient_accumulation_steps == 1


def test_trl_takes_turns_in_a_process_of_its_own(toy, tmp_path):  # noqa: F811
    for package in step.PEER:
        pytest.importorskip(package)
    (row,) = step.time_steps(SimpleNamespace(repeats=1, device="cpu"), measure.MatmulRoutes("cpu"), [job(toy, tmp_path)], True)
    assert row["times as fast as TRL"] == pytest.approx(row["s, TRL"] / row["s, ours"])
    assert not multiprocessing.active_children()
