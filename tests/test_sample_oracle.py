"""sample.py against transformers, live: greedy ids and log-probs, and the processors that truncate."""

import golden
import pytest
import torch

from model import load_model
from sample import generate, truncate

transformers = pytest.importorskip("transformers", reason="an oracle: pip install -r requirements-oracles.txt")
PROMPTS = [[5, 9, 11], [90, 2, 44, 7, 61, 33, 8, 8, 70], [17], list(range(20, 60))]


@pytest.fixture
def both(tmp_path):
    """both(name) -> the checkpoint of tests/golden.py in our model and in transformers'."""

    def load(name):
        directory = str(golden.write(tmp_path / name, golden.CASES[name]))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return load_model(directory), theirs.eval()

    return load


def generate_theirs(model, prompts, **settings):
    """transformers.generate of a left-padded batch, with no default of the checkpoint's between us."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_scores=True, output_logits=True,
        top_k=settings.pop("top_k", 0), **settings)  # fmt: skip
    return model.generate(tokens, attention_mask=mask), longest


@pytest.mark.parametrize("name", ["llama_v4", "llama3_rope_v4", "mistral_v5", "qwen2_v5", "qwen3_wide_heads_v5"])
def test_greedy_ids_and_log_probs(name, both):
    ours, theirs = both(name)
    out, start = generate_theirs(theirs, PROMPTS, do_sample=False, max_new_tokens=16)
    logp = torch.stack(out.logits, 1).log_softmax(-1)  # (B,T,V)
    for i, [completion] in enumerate(generate(ours, PROMPTS, max_new_tokens=16, temperature=0)):
        tokens = out.sequences[i, start:]
        assert completion.tokens == tokens.tolist()
        expected = logp[i].gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature, top_k, top_p, min_p", [
    (1.0, 20, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 0.3, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.6, 20, 0.95, 0.0),
    (1.7, 40, 0.7, 0.05),
    (0.7, 5, 0.99, 0.02),
])  # fmt: skip
def test_truncation_is_that_of_transformers_processors(temperature, top_k, top_p, min_p):
    logits = 3 * torch.randn(50, 400, generator=torch.manual_seed(0))
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(transformers.TopPLogitsWarper(top_p))
    if min_p:
        processors.append(transformers.MinPLogitsWarper(min_p))
    expected = processors(None, logits)
    ours = truncate(logits / temperature, top_k, top_p, min_p)
    assert torch.equal(ours.isfinite(), expected.isfinite())
    torch.testing.assert_close(ours, expected)


def test_the_order_of_the_rules_is_that_of_transformers_generate(both):
    # What their generate hands to the draw, all rules at once, against ours on the logits it started from.
    rules = dict(temperature=0.7, top_k=20, top_p=0.8, min_p=0.3)
    ours, theirs = both("llama_v4")
    with torch.no_grad():
        for model in (ours.model, theirs.model):  # milder logits: the rules then cut differently in each order
            model.norm.weight.mul_(0.2)
    out, _ = generate_theirs(theirs, PROMPTS, do_sample=True, max_new_tokens=6, **rules)
    logits, scores = torch.cat(out.logits), torch.cat(out.scores)  # (6*B,V)
    z = logits / 0.7
    kept = truncate(z, 20, 0.8, 0.3).isfinite()
    assert torch.equal(kept, scores.isfinite())
    other_orders = [
        truncate(truncate(truncate(z, top_p=0.8), top_k=20), min_p=0.3),
        truncate(truncate(truncate(z, min_p=0.3), top_k=20), top_p=0.8),
        truncate(logits, 20, 0.8, 0.3),
    ]
    assert all(not torch.equal(kept, other.isfinite()) for other in other_orders)
    # And a draw of ours never leaves what transformers would keep for the same sequence.
    for prompt, group in zip(PROMPTS, generate(ours, PROMPTS, 8, max_new_tokens=1, **rules)):
        out, _ = generate_theirs(theirs, [prompt], do_sample=True, max_new_tokens=1, **rules)
        assert all(out.scores[0][0, completion.tokens[0]].isfinite() for completion in group)


def test_draws_follow_transformers_probabilities(both):
    ours, theirs = both("qwen3_wide_heads_v5")
    with torch.no_grad():
        for model in (ours.model, theirs.model):
            model.norm.weight.mul_(0.2)
        p = theirs(torch.tensor([PROMPTS[1]])).logits[0, -1].softmax(-1)
    n = 4000
    [group] = generate(ours, [PROMPTS[1]], n, max_new_tokens=1, seed=1)
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in group]), minlength=len(p))
    often = n * p > 5
    chi2 = ((counts - n * p) ** 2 / (n * p))[often].sum()
    assert often.sum() > 20 and chi2 < often.sum() + 4 * (2 * often.sum()) ** 0.5
