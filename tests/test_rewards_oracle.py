"""rewards.py beside TRL's own functions, where TRL is installed (requirements-oracles.txt)."""
import random

import pytest

import rewards

trl_rewards = pytest.importorskip("trl.rewards", reason="compares with TRL")


def test_soft_overlong_is_trls():
    ids = [[1] * n for n in range(0, 130)]
    for length, cache in [(100, 20), (128, 128), (64, 1), (100, 0)]:
        theirs = trl_rewards.get_soft_overlong_punishment(length, cache)(completion_ids=ids)
        ours = rewards.soft_overlong_reward(completion_ids=ids, max_completion_length=length, soft_punish_cache=cache)
        assert ours == pytest.approx(theirs)


def test_think_format_is_trls():
    rng = random.Random(0)
    pieces = ["<think>", "</think>", "\n", "x", "<answer>", " "]
    texts = [rng.choice(["<think>", ""]) + "".join(rng.choices(pieces, k=rng.randrange(6))) for _ in range(2000)]
    theirs = trl_rewards.think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
    assert 0 < sum(theirs) < len(texts)
    assert rewards.think_format_reward(completions=texts) == theirs
