"""Rows -> micro-batches -> gradient: every way to cut a step, and every door of the head, gives the same numbers."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

import learner
from learner import Row, cut, learner_logprobs, learning_rate, optimizer_step, pack
from loss import LOSSES, find_loss, policy_loss
from model import TINY, ModelConfig, Transformer
from sample import Completion, generate
from train import Config

BUILT_IN = sorted(LOSSES)
VOCAB, STOP = 50, 1
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


def small_model(dtype=torch.float64):
    """Weights large enough that attention, positions and norms show in every number (std 0.02 would hide them)."""
    torch.manual_seed(1)
    model = Transformer(ModelConfig.from_dict(TINY | SIZES)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=torch.float64).to(dtype), alpha=0.3) if p.dim() == 1 else p.normal_(std=0.3)
    return model


def hand_made_rows(dtype=torch.float64):
    """Three groups of four, prompts of 1, 4 and 9 tokens, answers of 1 to 8; pad's and the stop token's ids everywhere,
    because nothing may be told from ids. One row counts for nothing."""
    draw, rows = random.Random(3), []
    for index, length in [(5, 4), (6, 1), (9, 9)]:
        prompt = [draw.choice([0, STOP, draw.randrange(VOCAB)]) for _ in range(length)]
        for sample in range(4):
            n = draw.randint(1, 8)
            tokens = [draw.choice([0, STOP, draw.randrange(VOCAB), draw.randrange(VOCAB)]) for _ in range(n)]
            row = Row({"prompt_ids": prompt}, index, sample, Completion(tokens, [], True), "", advantage=draw.gauss(0, 1))
            row.completion.logprobs = [draw.gauss(-3.5, 0.5) for _ in tokens]
            row.place = (5, 6, 9).index(index)
            row.counts = (index, sample) != (9, 1)
            rows.append(row)
    return rows


def alone(model, row, temperature=1.0):
    """(n,) log-probs and entropies of one row by the plainest route: the whole sequence, no padding, all logits."""
    prompt, tokens = row.problem["prompt_ids"], row.completion.tokens
    hidden = model(torch.tensor([prompt + tokens]))[0]
    logp = (hidden @ model.lm_head.weight.T / temperature).log_softmax(-1)[len(prompt) - 1 : -1]  # (n,V)
    return logp[torch.arange(len(tokens)), tokens], -(logp.exp() * logp).sum(-1)


def with_passes(model, rows, temperature=1.0):
    """Old and reference log-probs a little off the policy's, as after some updates."""
    noise = torch.Generator().manual_seed(4)
    for row in rows:
        logp = alone(model, row, temperature)[0].detach().float()
        row.old_logp = logp + 0.3 * torch.randn(logp.shape, generator=noise)
        row.ref_logp = logp + 0.3 * torch.randn(logp.shape, generator=noise)
        row.completion.logprobs = (row.old_logp + 0.3 * torch.randn(logp.shape, generator=noise)).tolist()
    return rows


def step(model, rows, cfg, optimizer=None, number=0):
    """One optimizer step that leaves its gradient in place -> (metrics, gradient of all parameters, flat)."""
    rows = [dataclasses.replace(row) for row in rows]
    metrics = optimizer_step(model, optimizer or torch.optim.SGD(model.parameters()), rows, cfg, number)
    return metrics, torch.cat([p.grad.flatten() for p in model.parameters()])


def whole_step(model, rows, cfg):
    """The same loss and gradient without micro-batches, shared prefixes or chunks -> (loss, gradient)."""
    logp, entropy = ([torch.nn.functional.pad(x, (0, 8 - len(x))) for x in part]
                     for part in zip(*(alone(model, row, cfg.temperature) for row in rows)))  # fmt: skip
    logp, entropy = torch.stack(logp), torch.stack(entropy)
    mask = torch.tensor([[t < len(row.completion.tokens) and row.counts for t in range(8)] for row in rows])

    def pad(values):
        if values[0] is None:
            return None
        return torch.stack([torch.nn.functional.pad(torch.as_tensor(value), (0, 8 - len(value))) for value in values])

    old, ref = pad([row.old_logp for row in rows]), pad([row.ref_logp for row in rows])
    sampler = pad([row.completion.logprobs for row in rows])
    denominator = int(mask.sum()) if find_loss(cfg.loss_type).aggregate == "tokens" else len(rows)
    keep = correction = None
    if cfg.top_entropy_quantile < 1:
        keep = entropy.float() >= entropy[mask].detach().float().quantile(1 - cfg.top_entropy_quantile)
    if cfg.sampler_correction != "none":
        w, cap = (old - sampler).exp(), cfg.sampler_correction_cap
        correction = w.clamp(max=cap) if cfg.sampler_correction == "truncate" else w * (w <= cap)
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32)
    loss, _ = policy_loss(cfg.loss, logp, old, ref, advantages, mask, denominator, entropy, keep, correction, sampler)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([g.flatten() for g in gradient])


# micro_batch_tokens, shared_prefix, chunked_head, chunk_bytes: 1, 2 or more micro-batches, logits of 3 tokens at a time
WAYS = [(4096, True, True, 256 << 20), (60, True, True, 4 * VOCAB * 3), (12, True, False, 1 << 20),
        (70, False, False, 1 << 20), (1, False, True, 1)]  # fmt: skip
PLAIN = dict(temperature=0.7, max_grad_norm=math.inf, learning_rate=0.0, max_completion_length=8)
LOADED = PLAIN | dict(beta=0.04, entropy_coef=0.02, top_entropy_quantile=0.6, sampler_correction="truncate",
                      sampler_correction_cap=1.2)  # fmt: skip
OPTIONS = {
    "one update a rollout": PLAIN,
    "all terms at once": LOADED,
    "the off-policy mask": LOADED | dict(off_policy_threshold=0.05, sampler_correction="mask"),
    "sequence ratios": PLAIN | dict(importance_sampling_level="sequence", beta=0.1, kl="k3"),
}
EVERY = [(loss_type, options) for loss_type in BUILT_IN for options in ("one update a rollout", "all terms at once")]
SOME = [("grpo", "the off-policy mask"), ("gspo", "the off-policy mask"), ("dr_grpo", "sequence ratios"),
        ("sapo", "sequence ratios")]  # fmt: skip


@pytest.mark.parametrize("loss_type, options", EVERY + SOME)
def test_a_step_cut_in_any_way_has_the_whole_steps_loss_and_gradient(loss_type, options):
    """A mean taken per micro-batch, a prefix without gradient, a quantile per micro-batch: each shows here."""
    options = OPTIONS[options] | ({"sampler_correction": "none"} if loss_type == "vespo" else {})
    options = options | ({"epsilon_high": 5.0} if loss_type == "cispo" else {})
    model, rows = small_model(), hand_made_rows()
    if options.get("beta"):
        with_passes(model, rows, options["temperature"])
    cfg = Config(loss_type=loss_type, **options)
    loss, gradient = whole_step(model, rows, cfg)
    assert gradient.norm() > 1e-3
    for way in WAYS:
        names = ("micro_batch_tokens", "shared_prefix", "chunked_head", "chunk_bytes")
        metrics, found = step(model, rows, dataclasses.replace(cfg, **dict(zip(names, way))))
        exact = 1e-6 if way[2] else 1e-5  # the plain head's logits are fp32 whatever the model is
        assert metrics["loss"] == pytest.approx(loss, rel=exact, abs=1e-7), way
        assert (found - gradient).norm() <= exact * gradient.norm(), way
        assert metrics["grad_norm"] == pytest.approx(gradient.norm().item(), rel=exact)


def test_the_ways_to_cut_a_step_are_different_ones():
    """Else the test above compares one thing with itself."""
    rows = hand_made_rows()
    counts = {way[:2]: len(cut(rows, Config(micro_batch_tokens=way[0], shared_prefix=way[1]))) for way in WAYS}
    assert counts[4096, True] == 1 and counts[1, False] == 12
    assert 2 <= counts[60, True] < counts[12, True] <= 12 and 2 <= counts[70, False] < 12


def test_the_order_of_rows_changes_nothing():
    model, rows = small_model(), hand_made_rows()
    cfg = Config(**PLAIN, micro_batch_tokens=40)
    metrics, gradient = step(model, rows, cfg)
    groups = [rows[i : i + 4] for i in (4, 8, 0)]
    other, found = step(model, [row for group in groups for row in reversed(group)], cfg)
    assert (found - gradient).norm() <= 1e-9 * gradient.norm()
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-9)
    assert other["entropy"] == pytest.approx(metrics["entropy"], rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# cut and pack


def many_rows(groups):
    """{index: (prompt length, [completion lengths])} -> rows."""
    return [Row({"prompt_ids": [2] * prompt}, index, sample, Completion([3] * n, [-1.0] * n, True), "")
            for index, (prompt, lengths) in groups.items() for sample, n in enumerate(lengths)]  # fmt: skip


def tokens_of(batch, shared):
    """What a micro-batch really costs: each of its prompts once, or once a row."""
    prompts = {row.index: len(row.problem["prompt_ids"]) for row in batch}
    answers = sum(len(row.completion.tokens) for row in batch)
    return answers + sum(prompts.values() if shared else (prompts[row.index] for row in batch))


@pytest.mark.parametrize("shared", [True, False])
def test_cut_keeps_every_row_once_within_the_budget(shared):
    """A group that goes on in the next micro-batch brings its prompt along: 50 + 10 answers of 9 once made 140 of 100."""
    draw = random.Random(0)
    rows = many_rows({i: (draw.randint(1, 60), [draw.randint(1, 30) for _ in range(8)]) for i in range(12)})
    for budget in (100, 200, 20000):
        batches = cut(rows, Config(micro_batch_tokens=budget, shared_prefix=shared))
        found = sorted((row.index, row.sample) for batch in batches for row in batch)
        assert found == [(row.index, row.sample) for row in rows]
        assert all(tokens_of(batch, shared) <= budget for batch in batches)
    assert len(batches) == 1


def test_cut_splits_a_group_only_where_it_exceeds_the_budget():
    rows = many_rows({0: (10, [10] * 4), 1: (20, [9] * 4), 2: (10, [8] * 4), 3: (10, [40, 40, 40, 40])})
    batches = cut(rows, Config(micro_batch_tokens=100))
    homes = {i: {k for k, batch in enumerate(batches) for row in batch if row.index == i} for i in range(4)}
    assert len(homes[0]) == len(homes[1]) == len(homes[2]) == 1
    assert len(homes[3]) == 2  # 10 + 4 · 40 tokens
    assert len(batches) == 4  # 90 + 90; 50, where a part of the next would fit, but not all 56 of it; 56 + 42


def test_a_row_above_the_budget_goes_alone():
    batches = cut(many_rows({0: (10, [300, 5, 5]), 1: (3, [4])}), Config(micro_batch_tokens=50))
    assert [len(row.completion.tokens) for row in batches[0]] == [300]
    assert len(batches) == 2


def test_a_rank_with_fewer_micro_batches_gets_empty_ones(monkeypatch):
    """Ranks that call a sharded model a different number of times wait for each other for ever."""
    monkeypatch.setattr(learner.fsdp, "gather_objects", lambda items: items + [4])
    assert [len(batch) for batch in cut(many_rows({0: (3, [4, 4])}), Config())] == [2, 0, 0, 0]
    assert [len(batch) for batch in cut([], Config())] == [0, 0, 0, 0]


@pytest.mark.parametrize("options", ["one update a rollout", "all terms at once", "the off-policy mask"])
@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
@pytest.mark.parametrize("chunked", [True, False])
def test_an_empty_micro_batch_takes_part_and_adds_nothing(monkeypatch, options, loss_type, chunked):
    """A rank without rows once died of the reference log-probs that its filler did not have, and its peers hung."""
    model = small_model()
    rows = with_passes(model, hand_made_rows(), 0.7)
    if options == "one update a rollout":
        rows = hand_made_rows()
    cfg = Config(loss_type=loss_type, chunked_head=chunked, **OPTIONS[options])
    metrics, gradient = step(model, rows, cfg)
    monkeypatch.setattr(learner.fsdp, "gather_objects", lambda items: items + [3] if items == [1] else items)
    assert len(cut(rows, cfg)) == 3
    with_empty, found = step(model, rows, cfg)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=0)
    assert with_empty == pytest.approx(metrics, rel=1e-9)
    elsewhere = {"[]": [1.0], "[0]": [0, 1]}  # another rank's entropies, and its one micro-batch
    monkeypatch.setattr(learner.fsdp, "gather_objects", lambda items: elsewhere.get(str(items), items))
    only_empty, found = step(model, [], cfg)
    assert found.abs().max() == 0
    assert only_empty.keys() == metrics.keys()  # each is a collective: another set of names hangs
    assert all(math.isfinite(value) for value in only_empty.values())


@pytest.mark.parametrize("tokens, counts, expected", [
    ([7, 8, 2, 2, 2], 3, [1, 1, 1, 0, 0]),  # the end token is in the loss, padding of the same id is not
    ([7, 2, 9, 2, 2], 2, [1, 1, 0, 0, 0]),
    ([7, 8, 9, 4, 5], 5, [1, 1, 1, 1, 1]),  # cut off: no end token, all count
])  # fmt: skip
@pytest.mark.parametrize("shared", [True, False])
def test_masks_come_from_lengths_not_from_ids(tokens, counts, expected, shared):
    """pad = eos = 2, and the prompt has that id in its middle, where it must stay."""
    prompt = [5, 2, 6]
    row = Row({"prompt_ids": prompt}, 0, 0, Completion(tokens[:counts], [-1.0] * counts, counts < 5), "")
    long = Row({"prompt_ids": [9]}, 1, 0, Completion([3, 3, 3, 3, 3], [-1.0] * 5, False), "")
    mb = pack([row, long], Config(shared_prefix=shared), "cpu")
    assert mb.mask.int().tolist() == [expected, [1] * 5]
    assert mb.targets.tolist() == tokens[:counts] + [3] * 5
    if shared:
        assert mb.prefix.tokens.tolist() == [[5, 2], [0, 0]] and mb.prefix.lengths.tolist() == [2, 0]
        assert mb.prefix.row_lengths.tolist() == [counts, 5]
        assert mb.tokens[0, :counts].tolist() == [6, *tokens[: counts - 1]]
    else:
        assert mb.tokens[0, : 2 + counts].tolist() == [5, 2, 6, *tokens[: counts - 1]]


@pytest.mark.parametrize("shared", [True, False])
def test_a_position_predicts_the_next_token(shared):
    """`at` by a model whose hidden state is the token itself: the state at `at` must be the token before the target."""
    rows = hand_made_rows()
    mb = pack(rows, Config(shared_prefix=shared), "cpu")
    before = [([*row.problem["prompt_ids"], *row.completion.tokens])[len(row.problem["prompt_ids"]) - 1 :][t]
              for row in rows if row.counts for t in range(len(row.completion.tokens))]  # fmt: skip
    assert mb.tokens.flatten()[mb.at].tolist() == before
    assert mb.targets.tolist() == [token for row in rows if row.counts for token in row.completion.tokens]


def test_only_counted_tokens_feel_a_gradient():
    """Completion tokens 1 and 2 of 3 masked: nothing but the prompt's last position may reach the loss."""
    model = small_model()
    row = Row({"prompt_ids": [4, 5, 6, 7]}, 0, 0, Completion([8], [-1.0], False), "", advantage=1.0)
    hidden = []
    keep = model.model.norm.register_forward_hook(lambda module, args, out: (out.retain_grad(), hidden.append(out))[0])
    optimizer_step(model, torch.optim.SGD(model.parameters()), [row], Config(**PLAIN, shared_prefix=False), 0)
    keep.remove()
    felt = hidden[0].grad[0].norm(dim=-1) > 0
    assert felt.tolist() == [False, False, False, True]


# ---------------------------------------------------------------------------------------------------------------------
# The learner's log-probs


@pytest.mark.parametrize("way", WAYS)
def test_learner_logprobs_are_the_full_forwards_at_the_temperature(way):
    """logp[t] = log_softmax(logits[P+t-1] / τ)[y_t], and not the next position's, and not at τ = 1."""
    model, rows = small_model(), hand_made_rows()
    cfg = Config(temperature=0.7, micro_batch_tokens=way[0], shared_prefix=way[1], chunked_head=way[2], chunk_bytes=way[3])
    learner_logprobs(model, rows, cfg, "old_logp")
    for row in rows:
        logp, entropy = alone(model, row, 0.7)
        assert row.old_logp.shape == (len(row.completion.tokens),)
        if row.counts:
            torch.testing.assert_close(row.old_logp, logp.detach().float(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(row.entropy, entropy.detach().float(), rtol=1e-6, atol=1e-6)
            assert (row.old_logp - alone(model, row, 1.0)[0]).abs().max() > 0.05


def test_logits_are_divided_by_the_temperature_before_the_softmax():
    """By hand: logits 2, 1, 0 at 0.7."""
    mb = pack([Row({"prompt_ids": [0]}, 0, 0, Completion([0, 1, 2], [0.0] * 3, True), "")], Config(), "cpu")
    hidden, weight = torch.ones(1, 3, 1), torch.tensor([[2.0], [1.0], [0.0]])
    for chunked in (True, False):
        logp, _ = learner.logprob_head(mb, Config(temperature=0.7, chunked_head=chunked))(hidden, weight)
        assert logp.tolist() == pytest.approx([-0.260118, -1.688690, -3.117261], abs=2e-6)


def test_learner_logprobs_are_deterministic_and_restore_training(monkeypatch):
    model, rows = small_model(), hand_made_rows()
    model.model.norm.register_forward_hook(lambda module, args, out: torch.dropout(out, 0.5, module.training))
    model.train()
    learner_logprobs(model, rows, Config(), "old_logp")
    assert model.training and model.model.norm.training
    first = torch.cat([row.old_logp for row in rows])
    learner_logprobs(model, rows, Config(), "ref_logp")
    assert torch.equal(first, torch.cat([row.ref_logp for row in rows]))
    model.eval()
    learner_logprobs(model, rows, Config(), "old_logp")
    assert not model.training
    model.train()
    monkeypatch.setattr(learner, "logprob_head", lambda mb, cfg: lambda hidden, weight: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner_logprobs(model, rows, Config(), "old_logp")
    assert model.training


def sampled_rows(model, cfg, prompts=((4, 5, 6), (7,), (8, 9, 10, 11, 12)), stop=range(40, 50)):
    groups = generate(model, [list(p) for p in prompts], 4, max_new_tokens=8, temperature=cfg.temperature, stop_ids=stop, seed=1)
    return [Row({"prompt_ids": list(prompts[i])}, i, j, completion, "", advantage=(-1.0) ** j, place=i)
            for i, group in enumerate(groups) for j, completion in enumerate(group)]  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_sampler_and_learner_agree_and_the_first_ratio_is_one(shared):
    model = small_model(torch.float32)
    cfg = Config(temperature=0.7, shared_prefix=shared, max_completion_length=8, num_iterations=2, max_steps=100)
    rows = sampled_rows(model, cfg)
    assert len({len(row.completion.tokens) for row in rows}) > 2  # ragged
    learner_logprobs(model, rows, cfg, "old_logp")
    metrics, gradient = step(model, rows, cfg)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    assert 0 < metrics["sampling/sampling_logp_difference/mean"] <= metrics["sampling/sampling_logp_difference/max"]
    assert metrics["clip_ratio/region_mean"] == metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0
    assert metrics["grad_norm"] > 1e-2


def test_the_sampling_difference_is_measured_in_one_update_runs_too():
    """Without old log-probs the policy's own are compared: a sampler off by 0.5 must show as 0.5."""
    model = small_model(torch.float32)
    rows = sampled_rows(model, Config())
    for row in rows:
        row.completion.logprobs = [value - 0.5 for value in row.completion.logprobs]
    metrics, _ = step(model, rows, Config())
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("chunked", [True, False])
def test_old_logprobs_stay_frozen_over_the_updates_of_a_rollout(chunked):
    """With a large step the second update's ratio must leave 1; recomputed old log-probs would keep it there."""
    model = small_model(torch.float32)
    cfg = Config(loss_type="grpo", num_iterations=2, learning_rate=0.5, max_completion_length=8, chunked_head=chunked)
    rows = sampled_rows(model, cfg)
    learner_logprobs(model, rows, cfg, "old_logp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first, _ = step(model, rows, cfg, optimizer)
    second, _ = step(model, rows, cfg, optimizer, 1)
    assert first["clip_ratio/region_mean"] == 0 and abs(first["loss"]) < 1e-5
    assert second["clip_ratio/region_mean"] > 0
    after = [dataclasses.replace(row) for row in rows]
    learner_logprobs(model, after, cfg, "ref_logp")
    ratio = torch.cat([(new.ref_logp - old.old_logp).exp() for new, old in zip(after, rows)])
    assert (ratio - 1).abs().max() > 1e-3


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_the_kl_to_an_equal_reference_is_zero(loss_type):
    model = small_model(torch.float32)
    cfg = Config(loss_type=loss_type, beta=0.1, max_completion_length=8)
    rows = sampled_rows(model, cfg)
    learner_logprobs(model, rows, cfg, "ref_logp")
    assert step(model, rows, cfg)[0]["kl"] == pytest.approx(0, abs=1e-8)
    for row in rows:
        row.ref_logp = row.ref_logp + 0.5  # e^.5 - .5 - 1
    assert step(model, rows, cfg)[0]["kl"] == pytest.approx(0.148721, abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# The update


@pytest.mark.parametrize("loss_type", BUILT_IN)
def test_a_step_where_nothing_counts_changes_nothing(loss_type):
    """All completions cut off and masked: loss 0, gradient 0, no NaN in any number, the same weights."""
    model, rows = small_model(torch.float32), hand_made_rows()
    for row in rows:
        row.counts = False
    with_passes(model, rows)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    cfg = Config(loss_type=loss_type, beta=0.1, entropy_coef=0.1, top_entropy_quantile=0.5, max_completion_length=8,
                 learning_rate=0.1)  # fmt: skip
    metrics, gradient = step(model, rows, cfg, optimizer)
    assert metrics["loss"] == 0 and gradient.abs().max() == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_masked_rows_count_in_the_denominator_of_sequences_but_not_of_tokens():
    """Answers of 4 tokens (cut off, masked) and 2: term 1 each makes 2/2 for dapo and (0 + 1)/2 for grpo."""
    model = small_model()
    rows = [Row({"prompt_ids": [4]}, 0, i, Completion([5] * n, [-1.0] * n, i == 1), "", advantage=-1.0, counts=i == 1)
            for i, n in enumerate((4, 2))]  # fmt: skip
    for loss_type, expected in [("dapo", 1.0), ("bnpo", 1.0), ("grpo", 0.5), ("dr_grpo", 2 / (2 * 8))]:
        for budget in (4096, 1):
            cfg = Config(loss_type=loss_type, micro_batch_tokens=budget, max_completion_length=8, learning_rate=0.0)
            assert step(model, rows, cfg)[0]["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [4096, 12])
def test_an_update_that_is_not_finite_is_skipped_and_counted(chunked, micro_batch_tokens):
    """One NaN in one row of one micro-batch must not reach the weights, nor the optimizer's state."""
    model, rows = small_model(torch.float32), hand_made_rows()
    optimizer = torch.optim.AdamW(model.parameters())
    cfg = Config(chunked_head=chunked, micro_batch_tokens=micro_batch_tokens, learning_rate=0.01)
    assert step(model, rows, cfg, optimizer)[0]["skipped_update"] == 0
    weights = [p.detach().clone() for p in model.parameters()]
    state = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    rows[2].advantage = math.nan
    metrics, _ = step(model, rows, cfg, optimizer, 1)
    assert metrics["skipped_update"] == 1
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert torch.equal(state, optimizer.state_dict()["state"][0]["exp_avg"])
    rows[2].advantage = 0.5
    assert step(model, rows, cfg, optimizer, 2)[0]["skipped_update"] == 0
    assert all(p.isfinite().all() for p in model.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))


def test_the_gradient_is_clipped_to_its_global_norm_and_logged_as_it_was():
    model, rows = small_model(), hand_made_rows()
    free, gradient = step(model, rows, Config(**PLAIN))
    limit = free["grad_norm"] / 4
    clipped, found = step(model, rows, Config(**PLAIN | {"max_grad_norm": limit}, micro_batch_tokens=30))
    assert clipped["grad_norm"] == pytest.approx(free["grad_norm"], rel=1e-6)
    torch.testing.assert_close(found, gradient / 4, rtol=1e-5, atol=1e-9)


def test_weights_move_by_the_scheduled_rate_from_the_first_step_on():
    model, rows = small_model(), hand_made_rows()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    cfg = Config(**PLAIN | {"learning_rate": 0.1}, max_steps=50, warmup_ratio=0.2)
    metrics, gradient = step(model, rows, cfg)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert metrics["learning_rate"] == pytest.approx(0.01)
    torch.testing.assert_close(before - after, 0.01 * gradient, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind, floor", [*itertools.product(["linear", "cosine", "constant"], [0.0, 0.1])])
def test_the_learning_rate_warms_up_in_optimizer_steps_and_ends_at_its_floor(kind, floor):
    """Warm-up of 10 of 50 steps: a tenth first, the peak at the tenth step, then down to the floor at the very last."""
    cfg = Config(learning_rate=1e-6, warmup_ratio=0.2, max_steps=50, lr_scheduler_type=kind, min_lr_ratio=floor)
    rates = [learning_rate(cfg, i) for i in range(50)]
    assert rates[:10] == pytest.approx([i * 1e-7 for i in range(1, 11)])
    assert max(rates) == rates[9] == pytest.approx(1e-6)
    if kind == "constant":
        assert rates[10:] == [1e-6] * 40
    else:
        assert all(a > b for a, b in itertools.pairwise(rates[9:]))
        assert rates[-1] == pytest.approx(floor * 1e-6, abs=1e-18)
        assert rates[29] == pytest.approx((1 + floor) / 2 * 1e-6)  # half-way down both, by symmetry


def test_the_learning_rate_at_the_edges():
    assert [learning_rate(Config(learning_rate=1.0, max_steps=3), i) for i in range(3)] == [1.0] * 3
    assert learning_rate(Config(learning_rate=1.0, max_steps=1, lr_scheduler_type="linear"), 0) >= 0
    whole = Config(learning_rate=1.0, max_steps=4, warmup_ratio=1.0, lr_scheduler_type="cosine")
    assert [learning_rate(whole, i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(Config(learning_rate=1.0, max_steps=50, warmup_ratio=1e-3), 0) == 1.0


def test_the_entropy_quantile_is_taken_over_the_whole_step():
    """One row of near-certain tokens and one of uncertain ones: a quantile per micro-batch would keep half of each."""
    model = small_model(torch.float32)
    rows = sampled_rows(model, Config(max_completion_length=8))
    cfg = Config(top_entropy_quantile=0.25, micro_batch_tokens=1, max_completion_length=8)
    learner.keep_high_entropy(model, rows, cfg)
    entropies = torch.cat([alone(model, row)[1] for row in rows])
    keep = torch.cat([row.keep for row in rows])
    assert keep.sum().item() == pytest.approx(len(keep) / 4, abs=1)
    assert entropies[keep].min() > entropies[~keep].max()
