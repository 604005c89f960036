"""sample.py against full forwards, hand-made distributions and models whose next token is known."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import golden
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import sample as S
from model import TINY, ModelConfig, RMSNorm, Transformer, load_model, save_model
from sample import Completion, bucket, draw, generate, packed_linears, pick, truncate, uniforms

ALMOST_ONE = 1 - 2**-53  # the largest number a generator of float64 in [0, 1) can give


def random_model(name="qwen3_wide_heads_v5", dtype=torch.float32):
    """A checkpoint of tests/golden.py: weights of std 0.3, so a wrong position or mask moves logits by whole units."""
    config = golden.CASES[name]
    model = Transformer(ModelConfig.from_dict(config)).to(dtype)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in golden.weights(config).items()}, strict=False)
    return model


def random_prompts(*lengths, seed=0, V=96):
    rng = np.random.RandomState(seed)
    return [rng.randint(0, V, length).tolist() for length in lengths]


@torch.no_grad()
def teacher_forced(model, prompt, tokens, temperature=1.0):
    """Log-probs of `tokens` after `prompt` by one plain forward over both."""
    logits = model(torch.tensor([list(prompt) + tokens]), head=F.linear)[0, len(prompt) - 1 : -1]  # (T,V)
    return (logits.double() / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def flat(groups):
    return [completion for group in groups for completion in group]


def tokens_of(groups):
    return [[completion.tokens for completion in group] for group in groups]


class Scripted(nn.Module):
    """A model whose next-token logits are row `token` of a table (V,V), whatever came before."""

    def __init__(self, table):
        super().__init__()
        V = len(table)
        self.config = SimpleNamespace(
            vocab_size=V, max_position_embeddings=10**6, num_hidden_layers=1, num_key_value_heads=1, head_dim=4
        )
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(V, 1)
        self.lm_head = nn.Linear(V, V, bias=False)
        self.lm_head.weight.data = torch.as_tensor(table, dtype=torch.float32).T.contiguous()

    def forward(self, tokens, cache):
        x = F.one_hot(tokens, self.config.vocab_size).float()
        k = x.new_zeros(*tokens.shape, 1, 4)
        cache.attend(0, k, k, k)
        return x


def chain(V, **follows):
    """A Scripted model in which token 5 is certainly followed by follows["t5"], and so on."""
    table = torch.zeros(V, V)
    for token, successor in follows.items():
        table[int(token[1:]), successor] = 1000.0
    return Scripted(table)


def same_logits(row):
    return Scripted([row] * len(row))


def countdown(V=40):
    """Token t is followed by t - 1: with 0 as the stop token the prompt [t] has a completion of exactly t tokens."""
    return chain(V, **{f"t{t}": t - 1 for t in range(1, V)})


# ---------------------------------------------------------------------------------------------------------------------
# The sampling rules


@pytest.mark.parametrize("p, top_p, kept", [
    ([0.5, 0.3, 0.15, 0.05], 0.6, {0, 1}),
    ([0.5, 0.3, 0.15, 0.05], 0.85, {0, 1, 2}),
    ([0.5, 0.35, 0.10, 0.05], 0.9, {0, 1, 2}),
    ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2}),
    ([0.97, 0.02, 0.01], 0.9, {0}),
    ([0.97, 0.02, 0.01], 1e-9, {0}),
    ([0.1, 0.2, 0.7], 1e-9, {2}),
    ([0.97, 0.02, 0.01], 1.0, {0, 1, 2}),
])  # fmt: skip
def test_top_p_keeps_the_fewest_tokens_whose_mass_reaches_p(p, top_p, kept):
    z = truncate(torch.tensor([p]).log(), top_p=top_p)
    assert set(z[0].isfinite().nonzero()[:, 0].tolist()) == kept
    assert torch.equal(z[z.isfinite()], torch.tensor([p]).log()[z.isfinite()])  # what stays is not renormalised


def test_top_k_and_min_p_by_hand():
    z = torch.tensor([[0.4, 0.05, 0.3, 0.15, 0.1], [0.05, 0.4, 0.15, 0.3, 0.1]]).log()
    kept = lambda **rule: truncate(z, **rule).isfinite().int().tolist()  # noqa: E731
    assert kept(top_k=2) == [[1, 0, 1, 0, 0], [0, 1, 0, 1, 0]]
    assert kept(min_p=0.3) == [[1, 0, 1, 1, 0], [0, 1, 1, 1, 0]]
    assert kept(min_p=1.0) == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_order_is_top_k_then_top_p_then_min_p():
    z = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # After top-k the first has .57 of the mass; top-p of .55 before it would keep two.
    assert truncate(z, top_k=2, top_p=0.55).isfinite().sum() == 1
    # After min-p the first would have .56 of the mass and top-p keep it alone.
    z = torch.tensor([[0.5, 0.21, 0.19, 0.1]]).log()
    assert truncate(z, top_p=0.55, min_p=0.3).isfinite().sum() == 2


@pytest.mark.parametrize("rules, kept", [
    (dict(temperature=0.5, top_p=0.8), {0}),  # truncated first: {0, 1}
    (dict(temperature=2.0, min_p=0.2), {0, 1, 2}),  # truncated first: {0, 1}
    (dict(temperature=0.5, min_p=0.2), {0}),
    (dict(temperature=1.0, top_k=2), {0, 1}),
])  # fmt: skip
def test_temperature_comes_before_truncation(rules, kept):
    [group] = generate(same_logits([3.0, 2.0, 1.0]), [[0]], 200, max_new_tokens=4, **rules)
    assert {token for completion in group for token in completion.tokens} == kept


@pytest.mark.parametrize("top_k", [0, None, -1, 96, 101])
def test_top_k_is_off_at_0_none_and_minus_1_and_keeps_all_from_the_vocabulary_on(top_k):
    model, prompts = random_model(), random_prompts(3, 9)
    assert generate(model, prompts, 2, max_new_tokens=6, top_k=top_k) == generate(model, prompts, 2, max_new_tokens=6)


def test_temperatures():
    model = same_logits([2.0, 1.0, 0.0])
    draws = [t for c in flat(generate(model, [[0]], 1000, max_new_tokens=10)) for t in c.tokens]
    assert draws.count(0) / len(draws) == pytest.approx(0.665, abs=0.02)
    for temperature in (0, 1e-6, 1e-4):  # 0 is the argmax, never a division
        for completion in generate(model, [[0]], 50, max_new_tokens=4, temperature=temperature)[0]:
            assert completion.tokens == [0] * 4 and all(math.isfinite(x) for x in completion.logprobs)
    with pytest.raises(ValueError, match="temperature is -1"):
        generate(model, [[0]], max_new_tokens=1, temperature=-1)


def test_log_probs_are_at_the_temperature_before_truncation_and_at_1_when_greedy():
    logits, u = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([0.5], dtype=torch.float64)
    at_half = -math.log(1 + math.exp(-2) + math.exp(-4))
    for cut in (dict(), dict(top_k=1), dict(top_p=0.1), dict(min_p=1.0)):
        ids, logp = draw(logits.clone(), u, 0.5, **cut)
        assert ids.item() == 0 and logp.item() == pytest.approx(at_half, abs=1e-6)
    assert draw(logits.clone(), u, 0)[1].item() == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)), abs=1e-6)


def test_draws_from_bfloat16_logits_are_in_fp32():
    logits, u = torch.randn(8, 300, generator=torch.manual_seed(0)).bfloat16(), torch.rand(8, dtype=torch.float64)
    for rules in (dict(temperature=1.0), dict(temperature=0.7, top_k=9), dict(temperature=0)):
        ids, logp = draw(logits, u, **rules)
        z = logits.double() / (rules["temperature"] or 1.0)
        expected = z.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        assert logp.dtype == torch.float32 and (logp - expected).abs().max() < 1e-6


def test_a_group_is_of_independent_draws():
    # All 16 of a group once got one random number.
    [group] = generate(Scripted(torch.zeros(1000, 1000)), [[0]], 16, max_new_tokens=1)
    assert len({c.tokens[0] for c in group}) >= 13  # 15.88 expected
    [group] = generate(random_model(), random_prompts(5), 8, max_new_tokens=8)
    assert len({tuple(c.tokens) for c in group}) >= 2


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def doubles(*u):
    return torch.tensor(u, dtype=torch.float64)


@pytest.mark.parametrize("V", [1, 2, 100, 128, 129, 640, 1000])
def test_evenly_spaced_numbers_give_every_token_its_share(V):
    # N evenly spaced numbers fall on a token of probability p either floor(Np) or ceil(Np) times: no chance is left.
    rng, N = np.random.RandomState(V), 5000
    weights = torch.from_numpy(rng.rand(V) ** 8 * (rng.rand(V) < 0.7) + (np.arange(V) == V // 2)).float()
    u = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    ids, totals = pick(weights.expand(N, V).contiguous(), u)
    share = weights.double() / weights.double().sum()
    assert (torch.bincount(ids, minlength=V) - N * share).abs().max() < 1.01
    assert torch.allclose(totals, weights.double().sum(), rtol=1e-6)


@pytest.mark.parametrize("tail", [1e-7, 1e-9, 1e-4])
def test_a_large_vocabulary_is_inverted_to_fp32s_rounding(tail):
    # Half of the mass on a few tokens and a long tail of tiny ones: a running sum in fp32 stands still in it.
    V, N, rng = 151936, 64, np.random.RandomState(0)
    weights = torch.from_numpy(tail * rng.rand(V)).float()
    weights[torch.from_numpy(rng.choice(V, 20, replace=False))] = torch.rand(20, generator=torch.manual_seed(0))
    weights[rng.randint(V)] = 1.0
    cdf = weights.double().cumsum(0) / weights.double().sum()
    u = torch.from_numpy(rng.rand(N))
    ids = torch.cat([pick(weights[None].expand(16, V).contiguous(), part)[0] for part in u.split(16)])
    below = torch.where(ids > 0, cdf[ids - 1], 0.0)
    assert (u > below - 1e-7).all() and (u < cdf[ids] + 1e-7).all()
    # Where the draw is decided by more than rounding it is the same token.
    exact = torch.searchsorted(cdf, u, right=True)
    clear = torch.minimum(cdf[exact] - u, u - torch.where(exact > 0, cdf[exact - 1], 0.0)) > 1e-7
    assert torch.equal(ids[clear], exact[clear]) and clear.sum() > 0.4 * N


def test_a_tail_of_tokens_below_fp32s_last_digit_is_drawn_token_by_token():
    # All sums here are exact in float64; a cumulative sum stored in fp32 makes steps of a thousand tokens.
    weights = torch.full((151936,), 2.0**-33)
    weights[:128] = 0
    weights[5] = 1.0
    cdf = weights.double().cumsum(0)
    expected = torch.arange(128, 151936, 997)
    ids, _ = pick(weights.expand(len(expected), -1).contiguous(), (cdf[expected] - 2.0**-34) / cdf[-1])
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("V", [2, 128, 129, 300, 1000])
def test_a_token_of_probability_zero_never_comes_out(V):
    rng = np.random.RandomState(V)
    for trial in range(60):
        weights = torch.from_numpy((rng.rand(V) + 1e-3) * (rng.rand(V) < rng.choice([0.02, 0.3, 0.9]))).float()
        weights[rng.randint(V)] = 1.0
        alive = weights.nonzero()[:, 0]
        edges = (weights.double().cumsum(0) / weights.double().sum()).numpy()[rng.randint(0, V, 20)]
        around = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 1)])
        u = np.concatenate([[0.0, 5e-324, 1e-17, ALMOST_ONE], around, rng.rand(8)]).clip(0, ALMOST_ONE)
        u = torch.from_numpy(u)
        ids, _ = pick(weights.expand(len(u), V).contiguous(), u)
        assert (weights[ids] > 0).all()
        assert ids[0] == alive[0] and ids[3] == alive[-1]


@pytest.mark.parametrize("cut", [dict(top_k=3), dict(top_p=0.3), dict(min_p=0.5), dict(top_k=40, top_p=0.9, min_p=0.1)])
def test_a_truncated_token_never_comes_out(cut):
    logits = torch.from_numpy(np.random.RandomState(0).randn(64, 300)).float()
    for u in (0.0, 1e-300, 0.5, ALMOST_ONE):
        ids, _ = draw(logits.clone(), torch.full((64,), u, dtype=torch.float64), 0.7, **cut)
        assert truncate(logits / 0.7, **cut).gather(1, ids[:, None]).isfinite().all()


def test_a_draw_is_a_function_of_seed_key_sample_and_position_alone():
    names = dict(seed=1, key=2, sample=3)
    u = uniforms(**names, count=50)
    assert u.dtype == np.float64 and (u >= 0).all() and (u < 1).all() and len(set(u)) == 50
    assert np.array_equal(uniforms(**names, count=5), u[:5])
    streams = [u] + [uniforms(**names | other, count=50) for other in (
        dict(seed=2), dict(key=1), dict(sample=2), dict(seed=2, key=1), dict(seed=-1), dict(key=-2),
        dict(key=2**63 + 2), dict(key=np.int64(-5)), dict(sample=0))]  # fmt: skip
    assert len(set(np.concatenate(streams))) == 50 * len(streams)  # no stream is a shifted copy
    # The numbers themselves: a run can be repeated on another day with another numpy.
    assert uniforms(0, 0, 0, 2).tolist() == [0.011546754286331562, 0.24154919656271812]


def test_many_streams_are_uniform_together():
    u = np.concatenate([uniforms(0, key, sample, 4) for key in range(40) for sample in range(40)])
    counts = np.histogram(u, 16, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 40  # chi-square with 15 degrees of freedom: one in 2000
    first = np.array([uniforms(0, key, 0, 1)[0] for key in range(400)])
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.15


# ---------------------------------------------------------------------------------------------------------------------
# Against a full forward


@pytest.mark.parametrize("name", golden.CASES)
def test_greedy_ids_are_those_of_transformers(name):
    expected = json.loads(golden.FILE.read_text())[name]["greedy"]
    prompt = golden.prompt(golden.CASES[name])
    [[completion]] = generate(random_model(name), [prompt], max_new_tokens=len(expected), temperature=0)
    assert completion.tokens == expected


@pytest.mark.parametrize("name", ["qwen3_wide_heads_v5", "llama3_rope_v4", "mistral_v5", "qwen2_v5", "llama_biases_v5"])
def test_logits_of_every_cached_step_are_a_full_forwards(name, monkeypatch):
    # Prompts of 3, 9 and 1 tokens in one batch. A position off by one moves a logit by 6, a missing padding mask by 12.
    model, prompts, seen = random_model(name), random_prompts(3, 9, 1, 33), []
    monkeypatch.setattr(S, "draw", lambda logits, *a, **k: seen.append(logits.clone()) or draw(logits, *a, **k))
    groups = generate(model, prompts, max_new_tokens=21, temperature=0)
    for row, (prompt, [completion]) in enumerate(zip(prompts, groups)):
        with torch.no_grad():
            full = model(torch.tensor([prompt + completion.tokens]), head=F.linear)[0]
        for step in (1, 2, 20, 21):
            assert (seen[step - 1][row] - full[len(prompt) + step - 2]).abs().max() < 1e-4


def test_a_batch_gives_each_prompt_what_it_gets_alone():
    # Five more columns of padding, from a longer neighbour, change nothing either.
    model = random_model()
    three, nine, fourteen = random_prompts(3, 9, 14)
    alone = [generate(model, [prompt], max_new_tokens=20, temperature=0)[0] for prompt in (three, nine)]
    assert tokens_of(generate(model, [three, nine], max_new_tokens=20, temperature=0)) == tokens_of(alone)
    assert tokens_of(generate(model, [fourteen, three, nine], max_new_tokens=20, temperature=0)[1:]) == tokens_of(alone)


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0, 1.5])
def test_log_probs_equal_teacher_forced_ones(temperature):
    torch.manual_seed(0)
    model, prompts = load_model("tiny"), random_prompts(1, 5, 20, 64)
    groups = generate(model, prompts, 3, max_new_tokens=24, temperature=temperature, top_k=50)
    for prompt, group in zip(prompts, groups):
        for c in group:
            expected = teacher_forced(model, prompt, c.tokens, temperature or 1.0)
            assert (expected - torch.tensor(c.logprobs)).abs().max() < 1e-5


def test_one_token_prompts():
    model = random_model()
    groups = generate(model, [[7], [90]], 2, max_new_tokens=5)
    for prompt, group in zip([[7], [90]], groups):
        for c in group:
            assert (teacher_forced(model, prompt, c.tokens) - torch.tensor(c.logprobs)).abs().max() < 1e-4


def test_the_cache_grows_with_what_is_written_and_no_further_than_needed(monkeypatch):
    grow, capacities = S.KVCache.grow, []

    def recorded(cache, needed):
        grow(cache, needed)
        capacities.append(cache.keys[0].shape[2])
        assert cache.capacity == cache.keys[-1].shape[2] == cache.values[0].shape[2] >= needed

    monkeypatch.setattr(S.KVCache, "grow", recorded)
    model, prompts = random_model(), random_prompts(3, 30)
    groups = generate(model, prompts, max_new_tokens=190)
    assert len(set(capacities)) == 3 and capacities[0] == bucket(30 + 64) and capacities[-1] == bucket(30 + 190)
    for prompt, [c] in zip(prompts, groups):
        assert (teacher_forced(model, prompt, c.tokens) - torch.tensor(c.logprobs)).abs().max() < 1e-4


def bfloat16_gaps():
    """Mean distances a token: sampler to learner, both in bfloat16, and of each to fp32 over the same weights."""
    torch.manual_seed(0)
    config = ModelConfig.from_dict(TINY | {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8})
    model, exact = Transformer(config), Transformer(config)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.08)
    model.to(torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    prompts, gaps = random_prompts(40, 7, 60, 2), []
    for prompt, group in zip(prompts, generate(model, prompts, 2, max_new_tokens=32)):
        for c in group:
            learner, fp32 = (teacher_forced(m, prompt, c.tokens) for m in (model, exact))
            sampler = torch.tensor(c.logprobs)
            gaps.append(torch.stack([sampler - learner, learner - fp32, sampler - fp32]).abs())
    return torch.cat(gaps, 1).mean(1).tolist()


def test_bfloat16(monkeypatch):
    # However products are rounded, the sampler is as close to fp32 as the learner is.
    _, learner_to_fp32, sampler_to_fp32 = bfloat16_gaps()
    assert 0.005 < learner_to_fp32 < 0.03 and sampler_to_fp32 < 1.2 * learner_to_fp32
    # With the learner's products the two agree but for attention's last digits. Scores rounded to bfloat16 were ten
    # times as far: 0.014 a token.
    monkeypatch.setattr(S, "packed_type", lambda dtype: None)
    sampler_to_learner, _, _ = bfloat16_gaps()
    assert sampler_to_learner < 0.005


# ---------------------------------------------------------------------------------------------------------------------
# Neither batch size nor order nor company


STOPS = [3, 17, 40]


def products_do_not_depend_on_the_batch():
    """Whether oneDNN, on this CPU, gives a row the same bits alone and among others."""
    ops, x = torch.ops.mkldnn, torch.randn(33, 64)
    if not torch.backends.mkldnn.is_available():
        return False
    weight = ops._reorder_linear_weight(torch.randn(96, 64), 32)
    multiply = lambda rows: ops._linear_pointwise(x[:rows], weight, None, "none", [], "")  # noqa: E731
    return all(torch.equal(multiply(33)[:rows], multiply(rows)) for rows in (1, 2, 5))


@pytest.mark.parametrize("name", ["qwen3_wide_heads_v5", "llama_v4"])
def test_the_same_completions_whatever_the_batch_the_order_and_the_company(name):
    model, prompts, keys = random_model(name), random_prompts(1, 9, 40, 7, 100, 3), [-7, 5, 0, 2**40, 1, 12]
    want = dict(max_new_tokens=40, stop_ids=STOPS, seed=3)
    expected = generate(model, prompts, 3, keys=keys, max_batch=1, **want)
    lengths = [len(c.tokens) for c in flat(expected)]
    assert len(set(lengths)) > 5 and any(not c.finished for c in flat(expected))  # ragged, some cut
    others = [generate(model, prompts, 3, keys=keys, max_batch=rows, **want) for rows in (2, 5, 64)]
    order = [4, 0, 2, 1, 5, 3]
    shuffled = generate(model, [prompts[i] for i in order], 3, keys=[keys[i] for i in order], max_batch=4, **want)
    others.append([shuffled[order.index(i)] for i in range(len(prompts))])
    others.append([generate(model, [prompt], 2, keys=[key], **want)[0] for prompt, key in zip(prompts, keys)])
    exact = products_do_not_depend_on_the_batch()
    for other in others:
        cut = [group[: len(other[0])] for group in expected]  # fewer samples are the first ones
        assert tokens_of(other) == tokens_of(cut)
        assert [c.finished for c in flat(other)] == [c.finished for c in flat(cut)]
        assert other == cut or not exact  # to the last bit of the log-probs
    assert tokens_of(generate(model, prompts, 3, keys=keys, **want | dict(seed=4))) != tokens_of(expected)


def test_default_keys_are_the_prompts_indices_and_equal_keys_draw_alike():
    model, prompts = random_model(), random_prompts(3, 9)
    assert generate(model, prompts, 2, max_new_tokens=6) == generate(model, prompts, 2, max_new_tokens=6, keys=[0, 1])
    prompt = prompts[0]
    a, b, c = generate(model, [prompt, prompt, prompt], max_new_tokens=12, keys=[4, 4, 5])
    assert a[0].tokens == b[0].tokens != c[0].tokens


def test_looking_for_finished_rows_every_eighth_step_changes_nothing(monkeypatch):
    # As on CUDA: finished rows go on for up to seven tokens, past their room in the model, and are cut.
    model, prompts = random_model(), random_prompts(1, 3, 9, 40, 7, 100, 2)
    model.config.max_position_embeddings = 150
    want = dict(max_new_tokens=50, stop_ids=STOPS, max_batch=4)
    calls, expected_calls = [], []
    expected = generate(model, prompts, 3, on_token=lambda *call: expected_calls.append(call), **want)
    for every in (3, 8):
        calls.clear()
        monkeypatch.setitem(S.LOOK_EVERY, "cpu", every)
        groups = generate(model, prompts, 3, on_token=lambda *call: calls.append(call), **want)
        assert tokens_of(groups) == tokens_of(expected)
        assert sorted(calls) == sorted(expected_calls)


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def test_finished_rows_leave_and_waiting_rows_take_their_slots(monkeypatch):
    begin_step, rows = S.KVCache.begin_step, []
    monkeypatch.setattr(S.KVCache, "begin_step", lambda cache, B, L: rows.append(B) or begin_step(cache, B, L))
    lengths = [5, 2, 9, 1, 3, 1]
    want = dict(max_new_tokens=20, temperature=0, stop_ids=[0])
    groups = generate(countdown(), [[t] for t in lengths], max_batch=3, **want)
    assert [c.tokens for c in flat(groups)] == [list(range(t - 1, -1, -1)) for t in lengths]
    # Slots hold (5, 2, 9), then 1, 3 and 1 follow in the second and, at step 6, the first; the 9 ends alone.
    assert rows == [3, 3, 3, 3, 3, 3, 1, 1, 1] and sum(rows) == sum(lengths)
    rows.clear()
    generate(countdown(), [[t] for t in lengths], **want)
    assert rows == [6, 4, 3, 2, 2, 1, 1, 1, 1]


def test_a_distinct_prompt_is_prefilled_once(monkeypatch):
    model, prefilled = random_model(), []
    forward = model.forward

    def recorded(tokens, cache):
        if isinstance(cache, S.Prefill):
            prefilled.append(tuple(tokens.shape))
        return forward(tokens, cache=cache)

    monkeypatch.setattr(model, "forward", recorded)
    a, b, c = random_prompts(6, 9, 4)
    prompts, want = [a, b, list(a), c, a], dict(max_new_tokens=12, stop_ids=STOPS)
    expected = generate(model, prompts, 4, **want)
    assert prefilled == [(3, 8)]  # three distinct prompts, their last tokens left for the first step
    for max_batch in (1, 2, 5):
        prefilled.clear()
        assert tokens_of(generate(model, prompts, 4, max_batch=max_batch, **want)) == tokens_of(expected)
        assert sum(P for P, T in prefilled) == 3
    prefilled.clear()
    monkeypatch.setattr(S, "PREFILL_TOKENS", 12)  # in portions: the longest alone, then two
    assert tokens_of(generate(model, prompts, 4, **want)) == tokens_of(expected)
    assert prefilled == [(1, 8), (2, 5)]


def test_keys_and_values_of_a_prompt_are_dropped_with_its_last_row():
    rollouts = []
    class Watched(S.Rollout):  # noqa: E301
        def __init__(self, *args):
            super().__init__(*args)
            rollouts.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S, "Rollout", Watched)
        generate(random_model(), random_prompts(3, 9, 5), 3, max_new_tokens=4, max_batch=2)
    assert rollouts[0].prefilled == {} and not rollouts[0].queue


def test_little_memory_means_fewer_rows_at_a_time_not_failure(monkeypatch):
    begin_step, rows = S.KVCache.begin_step, []
    monkeypatch.setattr(S.KVCache, "begin_step", lambda cache, B, L: rows.append(B) or begin_step(cache, B, L))
    model, prompts, want = random_model(), random_prompts(3, 9), dict(max_new_tokens=20, stop_ids=STOPS)
    expected = tokens_of(generate(model, prompts, 4, **want))
    row_bytes = 2 * 2 * 2 * 32 * 4 * bucket(29)  # keys and values, layers, heads, width, fp32, tokens
    for kv_bytes, most in ((1, 1), (row_bytes, 1), (3 * row_bytes, 3), (4 * row_bytes - 1, 3), (1 << 30, 8)):
        rows.clear()
        assert tokens_of(generate(model, prompts, 4, kv_bytes=kv_bytes, max_batch=64, **want)) == expected
        assert max(rows) == most


def test_tokens_are_reported_as_they_come():
    calls = []
    want = dict(max_new_tokens=10, stop_ids=STOPS, max_batch=3)
    groups = generate(random_model(), random_prompts(3, 9), 3, on_token=lambda *call: calls.append(call), **want)
    for p, group in enumerate(groups):
        for s, completion in enumerate(group):
            assert [token for prompt, sample, token in calls if (prompt, sample) == (p, s)] == completion.tokens
    assert len(calls) == sum(len(c.tokens) for c in flat(groups))
    assert {(p, s) for p, s, _ in calls[:3]} == {(0, 0), (0, 1), (0, 2)}  # three rows at a time, side by side


def test_no_prompts():
    assert generate(random_model(), [], 4, max_new_tokens=3) == []


# ---------------------------------------------------------------------------------------------------------------------
# Where a completion ends


@pytest.mark.parametrize("follows, stop_ids, tokens, finished", [
    (dict(t9=5, t5=6, t6=3), {2, 3}, [5, 6, 3], True),  # the second of two end tokens, as generation_config lists them
    (dict(t9=7, t7=8, t8=2, t2=2), {2}, [7, 8, 2], True),  # what follows the first end token is no part of it
    (dict(t9=7, t7=2, t2=9), {2}, [7, 2], True),
    (dict(t9=7, t7=8, t8=9), {2}, [7, 8, 9, 7, 8], False),  # out of length: all of it counts
    (dict(t9=7, t7=8, t8=6, t6=5, t5=2), {2}, [7, 8, 6, 5, 2], True),  # the stop token is the last one allowed
    (dict(t9=2), {2}, [2], True),
    (dict(t9=2, t2=2), (), [2, 2, 2, 2, 2], False),  # nothing stops
])  # fmt: skip
def test_the_first_stop_token_is_kept_and_ends_a_completion(follows, stop_ids, tokens, finished):
    [[c]] = generate(chain(10, **follows), [[1, 9]], max_new_tokens=5, temperature=0, stop_ids=stop_ids)
    assert c == Completion(tokens, c.logprobs, finished) and len(c.logprobs) == len(tokens)


def test_a_stop_token_in_the_prompt_ends_nothing():
    # A chat prompt ends with the very token that ends a completion.
    [[c]] = generate(chain(10, t2=6, t6=7), [[5, 2, 6, 2]], max_new_tokens=2, temperature=0, stop_ids=[2])
    assert c.tokens == [6, 7] and not c.finished
    model = random_model()
    [[c]] = generate(model, [[5, 3, 6, 3]], max_new_tokens=4, stop_ids=[3])
    assert c.tokens and (c.finished or len(c.tokens) == 4)
    assert (teacher_forced(model, [5, 3, 6, 3], c.tokens) - torch.tensor(c.logprobs)).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.mark.parametrize("rules", [{}, dict(temperature=0), dict(top_k=4), dict(top_p=0.9), dict(min_p=0.1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_that_names_the_row(rules, bad):
    # A NaN once became token 0 in silence, and once an index out of range.
    model, calls = random_model(), []

    def spoil(module, inputs, logits):
        calls.append(len(logits))
        if len(calls) == 3:
            logits[3, 5 if bad == math.inf else slice(None)] = bad

    model.lm_head.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="not finite .NaN or inf. at token 2 of sample 1 of prompt 1"):
        generate(model, random_prompts(3, 9), 2, max_new_tokens=5, **rules)


@pytest.mark.parametrize("wrong, message", [
    (dict(n=0), "n is 0, but must be at least 1"),
    (dict(max_new_tokens=0), "max_new_tokens is 0, but must be at least 1"),
    (dict(temperature=-0.1), "temperature is -0.1, but must be 0 (greedy) or more"),
    (dict(temperature=math.nan), "temperature is nan, but must be 0 (greedy) or more"),
    (dict(top_k=-2), "top_k is -2, but must be the number to keep; 0, -1 or None: all"),
    (dict(top_p=0.0), "top_p is 0.0, but must be above 0, at most 1"),
    (dict(top_p=1.5), "top_p is 1.5, but must be above 0, at most 1"),
    (dict(min_p=-0.5), "min_p is -0.5, but must be from 0 to 1"),
    (dict(min_p=1.1), "min_p is 1.1, but must be from 0 to 1"),
    (dict(max_batch=0), "max_batch is 0, but must be at least 1, or None"),
    (dict(keys=[1]), "1 keys for 2 prompts: one a prompt is needed"),
    (dict(prompts=[[1], []]), "prompt 1 is empty: there is nothing to continue"),
    (dict(prompts=[[1], [5, 96]]), "prompt 1 has token ids from 5 to 96; the vocabulary has 96"),
    (dict(prompts=[[-1], [5]]), "prompt 0 has token ids from -1 to -1; the vocabulary has 96"),
    (dict(prompts=[[5] * 510, [2]]),
     "prompt 0 has 510 tokens, with max_new_tokens 3 more than the 512 this model reads"),
])  # fmt: skip
def test_a_request_that_makes_no_sense_is_one_clear_line(wrong, message):
    request = dict(prompts=[[1], [2]], n=1, max_new_tokens=3) | wrong
    with pytest.raises(ValueError) as error:
        generate(random_model(), **request)
    assert str(error.value) == message


def test_a_prompt_and_its_answer_may_fill_the_model_exactly():
    [[c]] = generate(random_model(), [[5] * 509], max_new_tokens=3)
    assert len(c.tokens) == 3


class WithDropout(Scripted):
    def forward(self, tokens, cache):
        return F.dropout(super().forward(tokens, cache), 0.5, self.training)


def test_dropout_is_off_while_sampling_and_training_mode_comes_back():
    model = WithDropout(torch.randn(20, 20, generator=torch.manual_seed(0)))

    def stop(*call):
        raise KeyboardInterrupt

    for mode in (True, False):
        model.train(mode)
        assert generate(model, [[1]], 4, max_new_tokens=9) == generate(model, [[1]], 4, max_new_tokens=9)
        assert model.training == mode
        with pytest.raises(KeyboardInterrupt):
            generate(model, [[1]], max_new_tokens=9, on_token=stop)
        assert model.training == model.lm_head.training == mode
        with pytest.raises(ValueError):
            generate(model, [[]], max_new_tokens=9)
        assert model.training == mode


# ---------------------------------------------------------------------------------------------------------------------
# Recorded steps


@pytest.mark.parametrize("look, rules", [(8, {}), (1, dict(temperature=0.7, top_k=30, top_p=0.9, min_p=0.02))])
def test_recorded_steps_give_the_same_completions(recorded, rules, look, monkeypatch):
    # Slots refilled, rows moved, widths padded, lengths that pass from one record's to the next's.
    model, prompts = random_model(), random_prompts(1, 9, 40, 7, 3)
    want = dict(n=2, max_new_tokens=86, stop_ids=STOPS[:1], **rules)
    with monkeypatch.context() as plain:
        plain.setattr(S, "RECORDED", set())
        expected = generate(model, prompts, **want)
    assert not recorded
    advance, widths = S.Decoder.advance, set()

    def watched(decoder, B, longest, count):
        drawn = advance(decoder, B, longest, count)
        assert not decoder.cache.lengths[B:].any() and not decoder.alive[B:].any()  # idle rows stand still
        assert decoder.cache.capacity == bucket(40 + 86 + look - 1)  # with what rows may run past their end
        widths.update(decoder.records)
        return drawn

    monkeypatch.setattr(S.Decoder, "advance", watched)
    monkeypatch.setitem(S.LOOK_EVERY, "cpu", look)
    exact = products_do_not_depend_on_the_batch()
    for max_batch in (6, 64):
        widths.clear()
        recorded.clear()
        made = generate(model, prompts, max_batch=max_batch, **want)
        assert tokens_of(made) == tokens_of(expected)
        assert made == expected or not exact
        assert {B for B, *_ in widths} <= {1, 2, 4, 8, min(max_batch, 10)}
        assert {L for _, L, *_ in widths} <= {32, 64, 96, 128, 160}
        assert recorded.count("record") <= len(widths) and recorded.count("replay") > 50


def test_a_step_that_waits_for_the_device_cannot_be_recorded(recorded):
    class Waits(Scripted):
        def forward(self, tokens, cache):
            assert tokens.sum().item() >= 0
            return super().forward(tokens, cache)

    with pytest.raises(RuntimeError, match="waits for the device"):
        generate(Waits(torch.zeros(9, 9)), [[1]], max_new_tokens=9)


@pytest.fixture
def unpacked(monkeypatch):
    """As on a GPU, whose products read the weights where they lie."""
    monkeypatch.setattr(S, "packed_type", lambda dtype: None)


def right(model, prompt, completion, temperature=1.0):
    wanted = teacher_forced(model, prompt, completion.tokens, temperature)
    return (wanted - torch.tensor(completion.logprobs)).abs().max() < 1e-4


def test_a_rollout_on_its_own_leaves_no_records(recorded):
    model, prompts = random_model(), random_prompts(5)
    for _ in range(2):
        generate(model, prompts, max_new_tokens=8)
    assert recorded.count("record") == 2


def test_records_serve_the_next_rollout_with_weights_that_changed_in_place(recorded, unpacked):
    model, decoder, want = random_model(), S.Decoder(), dict(n=4, max_new_tokens=24)
    generate(model, random_prompts(5, 9), decoder=decoder, **want)
    cache, kinds = decoder.cache, dict(decoder.records)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.1)
    recorded.clear()
    prompts = random_prompts(9, 3, seed=1)  # 8 rows again, of other lengths
    made = generate(model, prompts, decoder=decoder, **want)
    assert recorded.count("record") == 0 and recorded.count("replay") == 24 and decoder.cache is cache
    assert all(decoder.records[kind] is kinds[kind] for kind in kinds)
    assert all(right(model, p, c) for p, group in zip(prompts, made) for c in group)
    assert tokens_of(made) == tokens_of(generate(model, prompts, **want))


def test_each_set_of_rules_has_its_own_records(recorded, unpacked):
    model, prompts, decoder = random_model(), random_prompts(5), S.Decoder()
    for rules in (dict(), dict(temperature=0), dict(temperature=0.5), dict(temperature=0.5, top_k=3), dict(top_p=0.5)):
        want = dict(n=2, max_new_tokens=9, **rules)
        recorded.clear()
        for n in (1, 2):
            assert generate(model, prompts, decoder=decoder, **want) == generate(model, prompts, **want)
        assert recorded.count("record") == 3  # one of the kept decoder, and one of each that was not kept


@pytest.mark.parametrize("what", ["parameters", "frequencies"])
def test_records_are_not_replayed_over_what_lies_elsewhere(recorded, unpacked, what):
    model, prompts, decoder = random_model(), random_prompts(5), S.Decoder()
    generate(model, prompts, max_new_tokens=8, decoder=decoder)
    cache = decoder.cache
    for p in model.parameters() if what == "parameters" else []:
        p.data = p.data * -1.1
    if what == "frequencies":  # a tensor that is neither parameter nor buffer
        model.model.frequencies = model.model.frequencies * 2
    [[c]] = generate(model, prompts, max_new_tokens=8, decoder=decoder)
    assert recorded.count("record") == 2 and decoder.cache is cache and right(model, prompts[0], c)


def test_records_are_not_replayed_for_modules_that_compute_something_else(recorded, unpacked):
    # As adapters that are switched off, or scaled.
    model, prompts, decoder = random_model(), random_prompts(5), S.Decoder()
    generate(model, prompts, max_new_tokens=8, decoder=decoder)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1.0
    [[c]] = generate(model, prompts, max_new_tokens=8, decoder=decoder)
    assert recorded.count("record") == 2 and right(model, prompts[0], c)


def test_a_decoder_becomes_as_large_as_was_asked_and_not_larger_than_kv_bytes(recorded, unpacked):
    model, decoder = random_model(), S.Decoder()
    row = 2 * 4 * 32 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    sizes = []
    for lengths, n, new, rows in [
        ((5,), 3, 8, 99), ((5, 7), 2, 8, 99), ((9,), 1, 8, 99), ((5,), 9, 8, 99), ((40,), 9, 8, 8), ((5,), 9, 30, 8)
    ]:  # fmt: skip
        prompts = random_prompts(*lengths)
        made = generate(model, prompts, n, max_new_tokens=new, kv_bytes=rows * row, decoder=decoder)
        assert made == generate(model, prompts, n, max_new_tokens=new, kv_bytes=rows * row)
        sizes.append((decoder.rows, decoder.limit, decoder.max_new_tokens, decoder.cache.capacity))
    # rows; tokens of the longest; then 64 tokens a row, of which 8 · 32 make four
    assert sizes == [(3, 13, 8, 32), (4, 15, 8, 32), (4, 17, 8, 32), (9, 17, 8, 32), (4, 48, 8, 64), (4, 48, 30, 64)]


def test_a_decoder_that_was_interrupted_starts_anew(recorded, unpacked):
    model, prompts, decoder = random_model(), random_prompts(5, 20), S.Decoder()

    def stop(prompt, sample, token):
        if prompt == 1 and len(recorded) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, prompts, 4, max_new_tokens=20, on_token=stop, decoder=decoder)
    assert decoder.alive.any()
    after = generate(model, prompts[:1], max_new_tokens=9, decoder=decoder)
    assert after == generate(model, prompts[:1], max_new_tokens=9)
    assert not decoder.alive.any() and not decoder.cache.lengths.any()


def test_a_decoder_that_saw_nan_starts_anew():
    model, decoder = random_model(), S.Decoder()
    good = model.model.layers[0].self_attn.v_proj.weight.detach().clone()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        generate(model, random_prompts(30), 2, max_new_tokens=9, decoder=decoder)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.copy_(good)
    [[c]] = generate(model, random_prompts(4), max_new_tokens=9, decoder=decoder)
    assert right(model, random_prompts(4)[0], c)


def test_a_decoder_serves_another_model(recorded, unpacked):
    decoder = S.Decoder()
    for name in ("qwen3_wide_heads_v5", "qwen2_tied_v4"):
        [[c]] = generate(random_model(name), [[5, 6, 7]], max_new_tokens=8, decoder=decoder)
        assert right(random_model(name), [5, 6, 7], c)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records for a GPU, and there is none")
def test_recorded_steps_give_the_same_completions_on_cuda(monkeypatch):
    model, prompts = random_model().cuda(), random_prompts(1, 9, 40, 7, 3)
    want = dict(n=3, max_new_tokens=110, stop_ids=STOPS[:1], max_batch=8)
    record, records = S.record, []
    monkeypatch.setattr(S, "record", lambda step, pool: records.append(1) or record(step, pool))
    decoder = S.Decoder()
    made = [generate(model, prompts, decoder=decoder, **want) for _ in range(2)]
    assert records and made[0] == made[1]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.1)
    count = len(records)
    made = [generate(model, prompts, decoder=decoder, **want)]
    assert len(records) == count
    monkeypatch.setattr(S, "RECORDED", set())
    made.append(generate(model, prompts, **want))
    assert len(records) == count and tokens_of(made[0]) == tokens_of(made[1])


# ---------------------------------------------------------------------------------------------------------------------
# Packed products


def test_packed_linears_multiply_as_plain_ones_and_are_gone_afterwards():
    model = random_model("qwen2_tied_v4")  # with biases, and a head that is the embedding
    x = torch.randn(5, 7, 64, generator=torch.manual_seed(0))
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features == 64]
    with torch.no_grad():
        plain = [layer(x) for layer in layers]
        with packed_linears(model):
            for layer, expected in zip(layers, plain):
                for rows in (1, 5):
                    torch.testing.assert_close(layer(x[:rows]), expected[:rows], atol=1e-5, rtol=1e-5)
    assert not any({"forward", "qkv", "gated"} & vars(m).keys() for m in model.modules())
    with pytest.raises(RuntimeError, match="on purpose"):
        with packed_linears(model):
            raise RuntimeError("on purpose")
    assert not any({"forward", "qkv", "gated"} & vars(m).keys() for m in model.modules())
    assert torch.equal(layers[0](x), plain[0])


def test_short_norms_are_the_models_whatever_rows_are_beside():
    norm = RMSNorm(96, 1e-3)
    norm.weight.data.uniform_(-2, 2, generator=torch.manual_seed(0))
    short, x = S.short_norm(norm), torch.randn(40, 1, 96, generator=torch.manual_seed(1)) * torch.logspace(-4, 4, 40)[:, None, None]
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm.weight.double()
    torch.testing.assert_close(short(x).double(), exact, rtol=1e-6, atol=1e-9)
    assert all(torch.equal(short(x[:rows]), short(x)[:rows]) for rows in (1, 2, 7, 33))
    assert S.short_norm(RMSNorm(96, 1e-3).bfloat16()) is None


@pytest.mark.parametrize("name", ["qwen3_wide_heads_v5", "qwen2_tied_v4", "llama_biases_v5"])
def test_layers_that_read_the_same_input_are_one_product(name):
    model = random_model(name)  # norms of queries and keys, biases of the three, biases of all
    block, D = model.model.layers[1], model.config.hidden_size
    x = torch.randn(5, 3, D, generator=torch.manual_seed(0))
    cos, sin = model.model.rope(torch.tensor([[0, 1, 2], [7, 8, 300], *[[5, 6, 7]] * 3]), x.dtype)
    with torch.no_grad():
        expected = [*block.self_attn.qkv(x, cos, sin), block.mlp.gated(x)]
        with packed_linears(model):
            assert {"qkv", "gated"} <= {name for m in block.modules() for name in vars(m)}
            assert "forward" not in vars(block.self_attn.k_proj)  # packed once, not twice
            made = [*block.self_attn.qkv(x, cos, sin), block.mlp.gated(x)]
    for y, plain in zip(made, expected):
        torch.testing.assert_close(y, plain, atol=1e-4, rtol=1e-4)
    assert not {"qkv", "gated"} & {name for m in model.modules() for name in vars(m)}


def test_packed_weights_are_those_of_the_moment():
    # Weights packed once a run would sample from the first step's model for ever.
    model, prompts = random_model(), random_prompts(5)
    before = generate(model, prompts, max_new_tokens=8, temperature=0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.1)
    [[c]] = generate(model, prompts, max_new_tokens=8, temperature=0)
    assert c.tokens != before[0][0].tokens
    assert (teacher_forced(model, prompts[0], c.tokens) - torch.tensor(c.logprobs)).abs().max() < 1e-4


def test_layers_that_are_more_than_linear_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(8, 8), nn.Linear(8, 8).double())
    with packed_linears(model):
        assert not any("forward" in vars(m) for m in model)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def command_line(*args):
    script = Path(S.__file__)
    command = [sys.executable, script, *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=script.parent, timeout=120)


def test_the_command_line_continues_a_prompt(tmp_path):
    from data.tokenizer import load_tokenizer

    torch.manual_seed(0)
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    save_model(model, tmp_path)
    tokenizer.save(tmp_path)
    prompt = tokenizer.encode("3 1 2")
    [[c]] = generate(model, [prompt], max_new_tokens=12, temperature=0, stop_ids=tokenizer.stop_ids)
    done = command_line("--model", str(tmp_path), "--raw", "3 1 2", "--temperature", "0", "--max-new-tokens", "12")
    assert (done.returncode, done.stdout, done.stderr) == (0, tokenizer.decode(c.tokens) + "\n", "")


def test_an_unknown_model_is_one_line_on_the_command_line():
    done = command_line("--model", "qwen3-0.6", "hello")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("sample.py: model 'qwen3-0.6' is no directory here") and done.stderr.count("\n") == 1
    assert "did you mean 'qwen3-0.6b'?" in done.stderr
