"""The algorithm around the update: what may be asked for, collecting and scoring, advantages, evaluation, whole runs."""

import json
import math
import sys
import threading
from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

import data
import fsdp
import model as model_file
import plan
import sample
import train
from data.tokenizer import load_tokenizer
from learner import Row
from loss import LOSSES
from rewards import Reward
from sample import Completion
from train import PRESETS, Config, config_from

# ---------------------------------------------------------------------------------------------------------------------
# What may be asked for


def test_the_model_picks_the_preset_and_flags_win_over_it():
    assert config_from([]).preset == "sort" and config_from(["--model", "tiny"]).preset == "sort"
    assert config_from(["--model", "qwen3-0.6b"]).preset == "gsm8k"
    assert config_from(["--preset", "gsm8k"]).data == "gsm8k"
    for name, preset in PRESETS.items():
        cfg = config_from(["--preset", name])
        assert {key: getattr(cfg, key) for key in preset} == preset
    cfg = config_from(["--max_steps", "7", "--learning-rate", "2e-5"])
    assert (cfg.max_steps, cfg.learning_rate, cfg.prompts_per_step) == (7, 2e-5, PRESETS["sort"]["prompts_per_step"])


def test_qwen_alone_trains_on_gsm8k_with_the_five_rewards():
    cfg = config_from(["--model", "qwen3-0.6b"])
    assert cfg.data == "gsm8k" and cfg.rewards.split(",") == ["correctness", "int", "strict_format", "soft_format", "xmlcount"]
    assert (cfg.learning_rate, cfg.num_generations, cfg.beta, cfg.solved) == (1e-6, 8, 0.0, "gsm8k_number")


def test_the_data_brings_its_rewards_and_a_file_needs_some():
    assert config_from([]).rewards == "sort_distance,sort_inclusion_ordering,sort_exact"
    assert config_from(["--data", "countdown"]).rewards == "countdown"
    assert config_from(["--data", "sort:6", "--rewards", "sort_exact:2"]).rewards == "sort_exact:2"
    with pytest.raises(ValueError, match="mine.jsonl needs --rewards"):
        config_from(["--data", "mine.jsonl"])
    assert config_from(["--data", "mine.jsonl", "--rewards", "int:0.5,xmlcount"]).solved == "int:0.5"


def test_cispo_has_a_cap_of_its_own(capsys):
    """Its epsilon_high caps the weight itself: 0.2 would cut every weight down to a fifth."""
    assert config_from(["--loss_type", "cispo"]).loss.epsilon_high == 5.0
    assert "5.0" in capsys.readouterr().out
    assert config_from(["--loss_type", "cispo", "--epsilon_high", "3"]).loss.epsilon_high == 3.0
    assert config_from(["--epsilon", "0.3"]).loss.epsilon_high == 0.3


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_can_be_asked_for(name):
    assert config_from(["--loss_type", name]).loss.loss_type == name


@pytest.mark.parametrize("words, said", [
    ("--temperature 0", "--temperature is 0.0"),
    ("--temperature -1", "--temperature is -1.0"),
    ("--num_generations 1", "every advantage would be 0"),
    ("--num_generations 0", "--num_generations is 0"),
    ("--max_steps 0", "--max_steps is 0"),
    ("--prompts_per_step 0", "--prompts_per_step is 0"),
    ("--micro_batch_tokens -5", "--micro_batch_tokens is -5"),
    ("--dynamic_sampling -1", "--dynamic_sampling is -1"),  # no round at all: no rows
    ("--eval_problems -1", "--eval_problems is -1"),  # test[:-1]
    ("--top_entropy_quantile 1.5", "top_entropy_quantile 1.5"),
    ("--kl_in_reward", "--beta is 0"),  # once a crash at the first step
    ("--kl_in_reward --beta 0.1 --scale_rewards normalize_then_sum", "normalize_then_sum"),
    ("--loss_type vespo --sampler_correction truncate", "vespo"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_loaded(words, said):
    with pytest.raises(ValueError, match=said) as caught:
        config_from(words.split())
    assert "\n" not in str(caught.value)


def test_one_completion_a_prompt_is_allowed_where_no_baseline_is_needed():
    assert config_from(["--num_generations", "1", "--scale_rewards", "raw"]).num_generations == 1


def test_kl_is_in_the_reward_or_in_the_loss_but_not_in_both():
    assert config_from(["--beta", "0.1"]).loss.beta == 0.1
    cfg = config_from(["--beta", "0.1", "--kl_in_reward"])
    assert cfg.beta == 0.1 and cfg.loss.beta == 0.0


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory to run in, a smaller tiny model, and no process group left behind."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    for module in (model_file, plan):
        monkeypatch.setattr(module, "TINY", model_file.TINY | small)
    monkeypatch.setattr(train, "fast_cpu_matmul", lambda: None)  # a switch of the whole process
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    fsdp.shutdown()


def last_word(monkeypatch, words):
    """What `train.py WORDS` says as it gives up."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code not in (0, None)
    return str(caught.value.code)


@pytest.mark.parametrize("words, closest, another", [
    ("--loss_type dpao", "dapo", "cispo"),
    ("--rewards corectness", "correctness", "xmlcount"),
    ("--solved sort_exat", "sort_exact", "xmlcount"),
    ("--model qwen3-06b --data sort --rewards sort_exact", "qwen3-0.6b", "llama-3.2-1b-instruct"),
    ("--data gsm8", "gsm8k", "sort"),
    ("--data srot", "sort", "jsonl"),  # once: "needs --rewards"
    ("--dtype float3", "float32", "bfloat16"),
    ("--device cudo", "cuda", "cpu"),
    ("--preset sorted", "sort", "gsm8k"),
    ("--kl k3ww", "k3w", "k1"),
    ("--scale_rewards groups", "group", "rloo"),
    ("--importance_sampling_level tokens", "token", "sequence"),
    ("--lr_scheduler_type cosin", "cosine", "linear"),
    ("--sampler_correction trunc", "truncate", "mask"),
])  # fmt: skip
def test_an_unknown_name_is_one_line_with_the_choices_and_the_closest(here, monkeypatch, words, closest, another):
    said = last_word(monkeypatch, words)
    assert "\n" not in said and words.split()[1] in said
    assert f"did you mean {closest}" in said.replace("'", "") and another in said
    assert not (here / "runs").exists()


def test_an_unknown_sharding_lists_the_known_ones(here, monkeypatch):
    assert "full, hybrid, none" in last_word(monkeypatch, "--shard fully")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_one_line(here, monkeypatch):
    said = last_word(monkeypatch, "--device cuda")
    assert "cuda" in said and "GPU" in said and "\n" not in said


def test_a_model_that_is_neither_here_nor_cached_is_one_line_without_a_network(here, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    said = last_word(monkeypatch, "--model qwen3-0.6b --data sort")
    assert "Qwen/Qwen3-0.6B" in said and "--model DIRECTORY" in said and "\n" not in said


def test_a_run_does_not_write_over_another(here, monkeypatch):
    (here / "old").mkdir()
    (here / "old" / "metrics.jsonl").write_text('{"step": 1}\n')
    said = last_word(monkeypatch, "--output_dir old")
    assert "old holds a run already" in said and "--resume" in said
    assert (here / "old" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_lengths_beyond_the_models_are_refused_at_the_start(here, monkeypatch):
    said = last_word(monkeypatch, "--max_prompt_length 5000 --max_completion_length 3193")
    assert "5000" in said and "3193" in said and "8192" in said


def test_help_shows_every_flag_and_preset(capsys, monkeypatch):
    for flag in ("--help", "-h"):
        monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "1", flag])
        train.main()
        shown = capsys.readouterr().out
        assert all(f"--{f.name} " in shown for f in fields(Config))
        assert all(f"{preset}: " in shown for preset in PRESETS)


# ---------------------------------------------------------------------------------------------------------------------
# Collecting, scoring, comparing: with completions that are made up


def bare_run(cfg, reward, world=fsdp.World(0, 1, torch.device("cpu")), weights=(1.0,), test=()):
    """A Run without a model. reward: one function or several."""
    run = object.__new__(train.Run)
    functions = reward if isinstance(reward, list) else [reward]
    run.cfg, run.world, run.tokenizer, run.model = cfg, world, load_tokenizer("tiny"), None
    run.rewards = [Reward(f.__name__, w, f) for f, w in zip(functions, weights)]
    run.weights, run.judge = list(weights), [Reward("judge", 1.0, functions[0])]
    run.step = run.next_problem = run.num_tokens = 0
    run.user_metrics, run.user_columns = defaultdict(list), {}
    run.train = data.Stream(lambda i: {"prompt": f"problem {i}", "prompt_ids": [i], "number": i})
    run.test = list(test)
    run.logged = []
    run.journal = SimpleNamespace(samples=lambda entries, show: run.logged.extend(entries), metrics=lambda step, values: None)
    return run


@pytest.fixture
def made_up(monkeypatch):
    """sample_rows without a model: the text of completion j is "j". Records what was asked for."""
    asked = []

    def sample_rows(run, cfg, problems, n, temperature, key=lambda i: i):
        asked.append((run.world.rank, list(problems), n, temperature, [key(i) for i in problems]))
        return [Row(problem, i, j, Completion([10 + j, 1], [-1.0, -1.0], j != 1), str(j))
                for i, problem in problems.items() for j in range(n)]  # fmt: skip

    monkeypatch.setattr(train, "sample_rows", sample_rows)
    return asked


def flat_for(*numbers):
    """A reward that cannot tell completions of these problems apart."""

    def mark(completions, number, **kwargs):
        return [0.5 if i in numbers else float(text) for text, i in zip(completions, number)]

    return mark


def test_collecting_takes_the_next_problems(made_up):
    cfg = Config(prompts_per_step=3, num_generations=4, steps_per_generation=2, mask_truncated_completions=True)
    run = bare_run(cfg, flat_for(1, 2))
    rows = train.collect(run, cfg)
    assert [(row.index, row.sample) for row in rows] == [(i, j) for i in range(6) for j in range(4)]
    assert [row.place for row in rows[::4]] == [0, 1, 2, 3, 4, 5]
    assert [row.rewards.tolist() for row in rows[:8]] == [[0.0], [1.0], [2.0], [3.0]] + [[0.5]] * 4
    assert [row.counts for row in rows[:4]] == [True, False, True, True]  # completion 1 ran out of length
    assert {row.index for row in train.collect(run, cfg)} == set(range(6, 12))
    assert all(row.counts for row in train.collect(run, Config(prompts_per_step=1)))


def test_dynamic_sampling_replaces_flat_groups_by_new_problems(made_up):
    cfg = Config(prompts_per_step=4, num_generations=3, dynamic_sampling=5)
    run = bare_run(cfg, flat_for(1, 2, 4))
    rows = train.collect(run, cfg)
    assert [row.index for row in rows[::3]] == [0, 3, 5, 6]  # and in the order of problems
    assert [row.place for row in rows[::3]] == [0, 1, 2, 3] and len(rows) == 12
    assert [asked[1] for asked in made_up] == [[0, 1, 2, 3], [4, 5], [6]]  # only what is missing, and then it stops
    assert run.next_problem == 7


def test_dynamic_sampling_is_bounded_and_a_step_never_shrinks(made_up):
    cfg = Config(prompts_per_step=4, num_generations=3, dynamic_sampling=2)
    run = bare_run(cfg, flat_for(*range(100)))
    rows = train.collect(run, cfg)
    assert [row.index for row in rows[::3]] == [0, 1, 2, 3]
    assert len(made_up) == 3 and run.next_problem == 12
    run = bare_run(cfg, flat_for(*range(5), *range(6, 100)))
    rows = train.collect(run, cfg)
    assert len({row.index for row in rows}) == 4 and 5 in {row.index for row in rows}


def test_set_advantages_compares_within_each_prompts_group():
    """Rewards [1,0,0,0] and [1,1,1,0]; groups of the wrong four rows give quite other numbers."""
    rows = [Row({}, i, j, None, "", rewards=torch.tensor([r])) for i, group in enumerate([[1.0, 0, 0, 0], [1.0, 1, 1, 0]])
            for j, r in enumerate(group)]  # fmt: skip
    train.set_advantages(rows, Config(num_generations=4), [1.0])
    expected = [1.4997, -0.4999, -0.4999, -0.4999, 0.4999, 0.4999, 0.4999, -1.4997]
    assert [row.advantage for row in rows] == pytest.approx(expected, abs=1e-4)
    rows = [rows[i] for i in (4, 5, 6, 7, 0, 1, 2, 3)]  # the order of groups is not what tells them apart
    train.set_advantages(rows, Config(num_generations=4), [1.0])
    assert [row.advantage for row in rows] == pytest.approx(expected[4:] + expected[:4], abs=1e-4)


def test_the_kl_is_taken_off_each_reward_over_all_its_tokens():
    """By hand: rewards 1 and 0, KL sums of 0.6 and -0.2, β 0.5: 0.7 and 0.1."""
    rows = [Row({}, 0, j, None, "", rewards=torch.tensor([r])) for j, r in enumerate([1.0, 0.0])]
    rows[0].old_logp, rows[0].ref_logp = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.2, -1.2, -1.2])
    rows[1].old_logp, rows[1].ref_logp = torch.tensor([-1.0]), torch.tensor([-0.8])
    train.set_advantages(rows, Config(num_generations=2, beta=0.5, kl_in_reward=True, scale_rewards="none"), [1.0])
    assert [row.advantage for row in rows] == pytest.approx([0.3, -0.3], abs=1e-6)


def half(completions, **kwargs):
    return [float(int(text) % 2 == 0) for text in completions]


def other_half(completions, **kwargs):
    return [float(int(text) % 2 == 1) for text in completions]


def test_the_logged_reward_is_the_weighted_total(made_up):
    """f1 = [1,0,1,0], f2 = [0,1,0,1]. With weights 1 and 1 every total is alike; with 1 and .5 the mean is .75, not 1."""
    cfg = Config(prompts_per_step=1, num_generations=4)
    for weights, reward, flat, advantage in [((1.0, 1.0), 1.0, 1.0, 0.0), ((1.0, 0.5), 0.75, 0.0, 0.865726)]:
        run = bare_run(cfg, [half, other_half], weights=weights)
        rows = train.collect(run, cfg)
        train.set_advantages(rows, cfg, run.weights)
        metrics = train.describe(run, rows)
        assert metrics["reward"] == pytest.approx(reward) and metrics["frac_reward_zero_std"] == flat
        assert metrics["rewards/half/mean"] == 0.5 and metrics["rewards/half/std"] == pytest.approx(0.57735, abs=1e-5)
        assert [row.advantage for row in rows] == pytest.approx([advantage, -advantage] * 2, abs=1e-5)


def test_lengths_are_described_as_they_are(made_up):
    cfg = Config(prompts_per_step=2, num_generations=4)
    run = bare_run(cfg, half)
    rows = train.collect(run, cfg)
    rows[1].completion.tokens = [5] * 9  # the ones that ran out of length
    rows[5].completion.tokens = [5] * 9
    metrics = train.describe(run, rows)
    assert metrics["completions/mean_length"] == 30 / 8 and metrics["completions/mean_terminated_length"] == 2
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (2, 9)
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["num_tokens"] == 30 + 8
    assert train.describe(run, rows)["num_tokens"] == 2 * 38  # counted over the run


def test_what_a_reward_logs_stands_beside_its_own_completion(made_up):
    """With resampling, columns of one round once stood beside completions of another that had as many rows."""

    def logging(completions, prompts, log_metric, log_extra, trainer_state, **kwargs):
        assert trainer_state.global_step == 0 and trainer_state.max_steps == 9
        log_metric("mine", float(len(completions)))
        log_extra("seen", [f"{prompt}/{text}" for prompt, text in zip(prompts, completions)])
        return [0.5] * len(completions)

    cfg = Config(prompts_per_step=2, num_generations=2, dynamic_sampling=1, max_steps=9)
    run = bare_run(cfg, logging)
    metrics = train.describe(run, train.collect(run, cfg))
    assert metrics["mine"] == 4.0
    assert [entry["seen"] for entry in run.logged] == ["problem 0/0", "problem 0/1", "problem 1/0", "problem 1/1"]
    assert {"step", "prompt", "completion", "rewards", "advantage"} <= run.logged[0].keys()
    assert run.logged[0]["step"] == 1 and run.logged[0]["rewards"] == {"logging": 0.5}
    assert "mine" not in train.describe(run, train.collect(bare_run(cfg, half), cfg))


def test_rewards_get_keyword_lists_of_equal_length_in_trls_forms(made_up):
    """Chat prompts come with completions as messages, plain ones with strings, also in one batch; a column a keyword."""
    seen = {}

    def spy(prompts, completions, completion_ids, level, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids, level=level)
        return [0.0] * len(prompts)

    chat = [{"role": "user", "content": "hi"}]
    cfg = Config(prompts_per_step=2, num_generations=2)
    run = bare_run(cfg, spy)
    run.train = [{"prompt": chat, "prompt_ids": [3], "level": 7, "tag": "x"},
                 {"prompt": "plain", "prompt_ids": [4], "level": 8, "tag": "y"}]  # fmt: skip
    train.collect(run, cfg)
    assert seen["prompts"] == [chat, chat, "plain", "plain"]
    assert seen["completions"] == [[{"role": "assistant", "content": "0"}], [{"role": "assistant", "content": "1"}], "0", "1"]
    assert seen["completion_ids"] == [[10, 1], [11, 1], [10, 1], [11, 1]]
    assert seen["level"] == [7, 7, 8, 8] and seen["tag"] == ["x", "x", "y", "y"]
    assert "prompt_ids" not in seen and "prompt" not in seen


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def right_for(*right):
    """right: (problem, completion) pairs."""

    def judge(completions, number, **kwargs):
        return [float((i, int(text)) in right) for text, i in zip(completions, number)]

    return judge


HELD_OUT = [{"prompt": f"test {i}", "prompt_ids": [i], "number": i} for i in range(5)]


def test_evaluation_is_greedy_and_pass_at_k(made_up):
    """Greedy solves 0 and 1; of three draws some solve 0 (completion 0), 2 (completion 2) and 4 (both)."""

    def judge(completions, number, **kwargs):
        greedy = len(completions) == 5
        good = {(0, 0), (1, 0)} if greedy else {(0, 0), (2, 2), (4, 1), (4, 2)}
        return [float((i, int(text)) in good) for text, i in zip(completions, number)]

    cfg = Config(eval_samples=3, temperature=0.6)
    run = bare_run(cfg, judge, test=HELD_OUT)
    metrics = train.evaluate(run, cfg)
    assert metrics["eval/solved"] == pytest.approx(0.4) and metrics["eval/pass@3"] == pytest.approx(0.6)
    assert metrics["eval/reward"] == metrics["eval/rewards/judge/mean"] == pytest.approx(0.4)
    assert metrics["eval/mean_length"] == 2
    (_, first, n, temperature, keys), (_, second, k, warm, _) = made_up
    assert (first, n, temperature) == ([0, 1, 2, 3, 4], 1, 0.0)
    assert (second, k, warm) == ([0, 1, 2, 3, 4], 3, 0.6)
    assert len(set(keys)) == 5 and all(key < 0 for key in keys)  # training's are problem numbers


def test_evaluation_without_draws_or_without_problems(made_up):
    cfg = Config(eval_samples=0)
    metrics = train.evaluate(bare_run(cfg, half, test=HELD_OUT), cfg)
    assert not [name for name in metrics if "pass@" in name] and len(made_up) == 1
    assert train.evaluate(bare_run(cfg, half), cfg) == {}


def test_evaluation_leaves_no_trace_in_the_training_log(made_up):
    def logging(completions, log_metric, log_extra, **kwargs):
        log_metric("mine", 1.0)
        log_extra("column", completions)
        return [1.0] * len(completions)

    cfg = Config(eval_samples=2, prompts_per_step=1, num_generations=2)
    run = bare_run(cfg, logging, test=HELD_OUT)
    train.evaluate(run, cfg)
    assert not run.user_metrics and not run.user_columns and run.next_problem == 0


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks, as threads


@pytest.fixture
def two_ranks(monkeypatch):
    """run_both(f): f(world) in two threads whose collectives meet -> both results."""
    local, meet, parts = threading.local(), threading.Barrier(2, timeout=20), [None, None]

    def gather_objects(items):
        if not hasattr(local, "rank"):
            return items
        parts[local.rank] = items
        meet.wait()
        everything = parts[0] + parts[1]
        meet.wait()
        return everything

    monkeypatch.setattr(fsdp, "gather_objects", gather_objects)

    def run_both(f):
        results, errors = [None, None], []

        def work(rank):
            local.rank = rank
            try:
                results[rank] = f(fsdp.World(rank, 2, torch.device("cpu")))
            except BaseException as error:
                errors.append(error)
                meet.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
        [thread.start() for thread in threads]
        [thread.join(30) for thread in threads]
        if errors:
            raise errors[0]
        return results

    return run_both


@pytest.mark.parametrize("prompts, dynamic", [(3, 0), (4, 2), (1, 0)])
def test_two_ranks_share_the_groups_of_one(made_up, two_ranks, prompts, dynamic):
    """The same problems, replacements, places, advantages and metrics; an odd group is neither lost nor taken twice."""
    cfg = Config(prompts_per_step=prompts, num_generations=4, dynamic_sampling=dynamic, scale_rewards="batch")

    def work(world):
        def logging(completions, number, log_metric, **kwargs):
            for i in number:
                log_metric("mine", float(i))
            return flat_for(1, 4)(completions, number)

        run = bare_run(cfg, logging, world)
        rows = train.collect(run, cfg)
        train.set_advantages(rows, cfg, run.weights)
        groups = {(row.index, row.sample): (row.place, row.advantage) for row in rows}
        return groups, train.describe(run, rows), run.next_problem

    alone, metrics, after = work(fsdp.World(0, 1, torch.device("cpu")))
    (first, one, _), (second, other, _) = results = two_ranks(work)
    assert first.keys() & second.keys() == set() and first | second == alone
    assert {index for index, _ in first} & {index for index, _ in second} == set()  # a group stays on one rank
    assert one == other == pytest.approx(metrics)
    assert [result[2] for result in results] == [after, after]


def test_two_ranks_evaluate_each_problem_once(made_up, two_ranks):
    cfg = Config(eval_samples=2)

    def work(world):
        return train.evaluate(bare_run(cfg, right_for((0, 0), (3, 1), (4, 0)), world, test=HELD_OUT), cfg)

    alone = work(fsdp.World(0, 1, torch.device("cpu")))
    made_up.clear()
    assert two_ranks(work) == [pytest.approx(alone)] * 2
    assert sorted(i for _, problems, n, *_ in made_up if n == 1 for i in problems) == [0, 1, 2, 3, 4]
    assert alone["eval/solved"] == pytest.approx(0.4) and alone["eval/pass@2"] == pytest.approx(0.6)


def test_a_rank_without_problems_takes_part_all_the_same(made_up, two_ranks):
    cfg = Config(eval_samples=2)
    one, other = two_ranks(lambda world: train.evaluate(bare_run(cfg, right_for((0, 0)), world, test=HELD_OUT[:1]), cfg))
    assert one == other and one["eval/solved"] == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs of a smaller tiny model, in this process


WORDS = ("--device cpu --prompts_per_step 2 --num_generations 4 --max_steps 3 --max_completion_length 6 --eval_every 0 "
         "--print_every 0 --rewards my_rewards.py:mixed")  # fmt: skip


MIXED = """
def mixed(completion_ids, **kwargs):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


def start(here, words=""):
    """A Run in `here` with a reward that random answers differ in."""
    (here / "my_rewards.py").write_text(MIXED)
    cfg = config_from([*WORDS.split(), *words.split()])
    return cfg, train.Run(cfg)


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run.directory / name).read_text().splitlines()]


def count_passes(monkeypatch):
    """Names of the no-gradient passes, in order, and which model each used."""
    passes, real = [], train.learner_logprobs

    def counted(model, rows, cfg, name):
        passes.append((name, model))
        return real(model, rows, cfg, name)

    monkeypatch.setattr(train, "learner_logprobs", counted)
    return passes


def count_forwards(run):
    """Whole forwards of the learner, the ones with a head."""
    calls = []

    def count(module, args, kwargs):
        if kwargs.get("head"):
            calls.append(1)

    run.model.register_forward_pre_hook(count, with_kwargs=True)
    return calls


@pytest.mark.parametrize("level", ["", "--importance_sampling_level sequence"])
def test_without_a_kl_there_is_no_reference_and_one_update_needs_no_old_pass(here, monkeypatch, level):
    passes = count_passes(monkeypatch)
    cfg, run = start(here, level)
    calls = count_forwards(run)
    train.train(cfg, run)
    assert passes == [] and len(calls) == 3  # one micro-batch a step
    assert "kl" not in lines(run)[0]


def test_the_first_line_says_what_there_is_to_watch(here, capsys):
    cfg, run = start(here)
    train.train(cfg, run)
    first = lines(run)[0]
    assert first["step"] == 1 and first["grad_norm"] > 0 and first["skipped_update"] == 0
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/mixed/mean", "rewards/mixed/std", "loss", "entropy",
                 "learning_rate", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "num_tokens",
                 "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
                 "completions/mean_terminated_length", "sampling/sampling_logp_difference/mean",
                 "sampling/sampling_logp_difference/max", "step_time"):  # fmt: skip
        assert math.isfinite(first[name]), name
    assert first["sampling/sampling_logp_difference/max"] < 1e-5
    said = capsys.readouterr()
    said = said.out + said.err
    assert "near 0" in said and "cpu" in said and "chunked" in said and str(run.directory) in said
    assert Config(**json.loads((run.directory / "config.json").read_text())) == cfg


def test_the_kl_starts_at_zero_against_a_reference_that_stays(here, monkeypatch):
    passes = count_passes(monkeypatch)
    cfg, run = start(here, "--beta 0.1 --learning_rate 0.01 --warmup_ratio 0")
    with run.reference() as frozen:
        before = {name: p.detach().clone() for name, p in frozen.named_parameters()}
        assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
        assert not any(p.requires_grad for p in frozen.parameters())
    train.train(cfg, run)
    kl = [line["kl"] for line in lines(run)]
    assert kl[0] == pytest.approx(0, abs=1e-7) and kl[1] > 1e-4
    assert [name for name, _ in passes] == ["ref_logp"] * 3 and all(model is frozen for _, model in passes)
    assert all(torch.equal(p, before[name]) for name, p in frozen.named_parameters())
    assert not any(torch.equal(p, before[name]) for name, p in run.model.named_parameters() if p.dim() == 2)


def test_a_second_update_has_another_ratio(here, monkeypatch):
    passes = count_passes(monkeypatch)
    cfg, run = start(here, "--num_iterations 2 --learning_rate 0.01 --max_steps 4 --warmup_ratio 0")
    train.train(cfg, run)
    assert [name for name, _ in passes] == ["old_logp"] * 2  # once a rollout
    clipped = [line["clip_ratio/region_mean"] for line in lines(run)]
    assert clipped[0] == clipped[2] == 0 and max(clipped[1], clipped[3]) > 0
    assert [line["num_tokens"] for line in lines(run)][0] == [line["num_tokens"] for line in lines(run)][1]


def test_the_updates_of_a_rollout_take_their_own_prompts_in_turn(here, monkeypatch):
    """Two passes over a rollout of two steps' prompts, cut short by max_steps; then nothing of it is left over."""
    seen, real = [], train.optimizer_step

    def spy(model, optimizer, rows, cfg, step):
        seen.append((step, sorted({row.index for row in rows}), len(rows)))
        return real(model, optimizer, rows, cfg, step)

    monkeypatch.setattr(train, "optimizer_step", spy)
    cfg, run = start(here, "--num_iterations 2 --steps_per_generation 2 --max_steps 7")
    train.train(cfg, run)
    assert [indices for _, indices, _ in seen] == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [6, 7], [4, 5]]
    assert [step for step, _, _ in seen] == list(range(7)) and {n for *_, n in seen} == {8}
    assert [line["step"] for line in lines(run)] == list(range(1, 8)) and run.next_problem == 8


def test_checkpoints_are_saved_between_rollouts_after_each_multiple(here, monkeypatch):
    cfg, run = start(here, "--num_iterations 3 --save_every 2 --max_steps 9")
    saved = []
    monkeypatch.setattr(run, "save", lambda: saved.append(run.step))
    train.train(cfg, run)
    assert saved == [3, 6, 9]


def test_evaluation_comes_first_every_k_steps_and_last(here):
    cfg, run = start(here, "--eval_every 2 --eval_problems 3 --eval_samples 2")
    train.train(cfg, run)
    assert [line["step"] for line in lines(run) if "eval/solved" in line] == [0, 2, 3]
    assert [line["step"] for line in lines(run)] == [0, 1, 2, 3]
    assert all(0 <= line["eval/pass@2"] <= 1 for line in lines(run) if line["step"] in (0, 2, 3))


@pytest.mark.parametrize("words", [
    "--kl_in_reward --beta 0.1", "--sampler_correction mask", "--top_entropy_quantile 0.5 --entropy_coef 0.01",
    "--dynamic_sampling 2 --off_policy_threshold 0.1", "--mask_truncated_completions", "--no-shared_prefix --no-chunked_head",
    "--loss_type gspo --gradient_checkpointing", "--scale_rewards normalize_then_sum", "--dtype bfloat16 --beta 0.1",
    "--loss_type cispo --num_iterations 2 --micro_batch_tokens 20",
])  # fmt: skip
def test_every_option_runs(here, words):
    cfg, run = start(here, f"{words} --max_steps 2")
    train.train(cfg, run)
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert all(math.isfinite(value) for line in lines(run) for value in line.values())
    if "mask_truncated" not in words:
        assert any(line["grad_norm"] > 0 for line in lines(run))


@pytest.mark.parametrize("words", ["", "--dtype bfloat16 --beta 0.1", "--lora_r 4 --dtype bfloat16"])
def test_steps_recorded_in_one_rollout_serve_all(here, recorded, monkeypatch, words):
    """Where the weights are the masters themselves, and where they are gathered anew for each rollout."""
    monkeypatch.setattr(sample, "packed_type", lambda dtype: None)  # as on a GPU
    results, words = [], f"{words} --max_steps 4 --warmup_ratio 0 --learning_rate 1e-2 --eval_every 2 --eval_problems 4"
    words += " --eval_samples 2"
    for kinds in ({"cpu"}, set()):
        sample.RECORDED.clear()
        sample.RECORDED.update(kinds)
        cfg, run = start(here, words)
        assert bool(run.plan.kept) == bool(kinds) == (run.decoder is not None)
        train.train(cfg, run)
        results.append((lines(run), [line["completion"] for line in lines(run, "samples.jsonl")]))
        if kinds:  # greedy and drawn; greedy again, after the first evaluation's draws needed more rows
            assert len(run.decoder.records) == 2 and recorded.count("record") == 3
        fsdp.shutdown()
    (metrics, samples), (expected, expected_samples) = results
    assert samples == expected_samples and len({*samples}) > 9
    for line, other in zip(metrics, expected, strict=True):
        assert {k: v for k, v in line.items() if "time" not in k} == pytest.approx(
            {k: v for k, v in other.items() if "time" not in k}, rel=1e-3, abs=1e-3)  # fmt: skip


def test_where_nothing_may_stay_each_rollout_records_anew(here, recorded, monkeypatch):
    monkeypatch.setattr(plan, "device_memory", lambda device: 0)
    cfg, run = start(here, "--max_steps 2")
    assert run.decoder is None and run.gathered is None and not run.plan.kept
    train.train(cfg, run)
    assert recorded.count("record") == 2  # one a rollout


def test_prompts_and_heads_are_run_differently_but_learn_the_same(here):
    """The shared prefix and the chunked head are ways to compute: the weights after two steps may not tell."""
    weights = []
    for words in ("", "--no-shared_prefix", "--no-chunked_head", "--micro_batch_tokens 30", "--gradient_checkpointing",
                  "--max_batch 3"):  # fmt: skip
        cfg, run = start(here, f"{words} --max_steps 2 --warmup_ratio 0")
        train.train(cfg, run)
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
        fsdp.shutdown()
    for other in weights[1:]:
        assert (other - weights[0]).abs().max() < 1e-4 and (other - weights[0]).abs().mean() < 2e-6


def test_a_reward_of_nan_teaches_nothing_and_harms_nothing(here):
    cfg, run = start(here, "--entropy_coef 0")

    def broken(completions, trainer_state):
        return [math.nan if trainer_state.global_step == 1 else float(i % 3) for i in range(len(completions))]

    run.rewards = [Reward("broken", 1.0, broken)]
    train.train(cfg, run)
    first, second, third = lines(run)
    assert first["grad_norm"] > 0 and second["grad_norm"] == 0 and third["grad_norm"] > 0
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_a_loss_of_nan_is_skipped_and_logged(here, monkeypatch):
    real = train.set_advantages

    def broken(rows, cfg, weights):
        real(rows, cfg, weights)
        if run.step == 1:
            rows[3].advantage = math.nan

    monkeypatch.setattr(train, "set_advantages", broken)
    cfg, run = start(here)
    train.train(cfg, run)
    assert [line["skipped_update"] for line in lines(run)] == [0, 1, 0]
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_a_reward_that_raises_stops_the_run_with_its_name(here, monkeypatch):
    (here / "bad.py").write_text("def shaky(completions, **kwargs):\n    raise KeyError('no such thing')\n")
    monkeypatch.setattr(sys, "argv", ["train.py", *WORDS.split(), "--rewards", "bad.py:shaky"])
    with pytest.raises((SystemExit, RuntimeError)) as caught:
        train.main()
    assert "shaky" in str(caught.value) and "no such thing" in str(caught.value)


def test_a_file_of_few_problems_is_repeated_until_the_last_step(here):
    """3 prompts, 4 a step: neither no step nor a smaller one."""
    with open(here / "mine.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": f"{i} =", "tag": i}) + "\n" for i in range(3))
    cfg, run = start(here, "--data mine.jsonl --prompts_per_step 4 --max_steps 2")
    train.train(cfg, run)
    assert [line["step"] for line in lines(run)] == [1, 2]
    prompts = [entry["prompt"] for entry in lines(run, "samples.jsonl")]
    assert len(prompts) == 2 * 4 * 4 and set(prompts) == {"0 =", "1 =", "2 ="}


def test_longer_lists_get_longer_answers():
    assert config_from([]).max_completion_length == 5 and config_from(["--data", "sort:8"]).max_completion_length == 9
    assert config_from(["--data", "sort:8", "--max_completion_length", "20"]).max_completion_length == 20
    assert config_from(["--data", "countdown"]).max_completion_length == Config().max_completion_length


@pytest.mark.parametrize("base", ["keep", "nf4"])
def test_only_adapters_are_trained_and_without_them_the_model_is_the_reference(here, base):
    cfg, run = start(here, f"--lora_r 4 --beta 0.04 --base {base} --entropy_coef 0")
    frozen = {name: x.clone() for name, x in run.model.state_dict().items() if "lora_" not in name}
    train.train(cfg, run)
    run.finish()
    assert lines(run)[0]["kl"] == 0  # a fresh adapter adds nothing: no second model, and yet a reference
    after = run.model.state_dict()
    assert frozen and all(torch.equal(x, after[name]) for name, x in frozen.items())
    assert {name.rpartition(".")[2] for name, p in run.model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert any(p.abs().max() > 0 for name, p in run.model.named_parameters() if name.endswith("lora_B"))
    assert (run.directory / "adapter" / "adapter_model.safetensors").exists() and not (run.directory / "model").exists()


def test_a_run_that_starts_from_an_adapter_has_that_adapter_as_its_reference_also_after_a_resume(here):
    cfg, run = start(here, "--lora_r 4 --entropy_coef 0 --output_dir first")
    train.train(cfg, run)
    run.finish()
    words = "--adapter first/adapter --beta 0.04 --entropy_coef 0 --save_every 1 --output_dir second"
    cfg, run = start(here, words)
    train.train(cfg, run)
    assert lines(run)[0]["kl"] == 0 and lines(run)[-1]["kl"] > 0
    rows = train.collect(run, cfg)

    def reference_logp(run):
        with run.reference() as frozen:
            train.learner_logprobs(frozen, rows, cfg, "ref_logp")
        return torch.cat([row.ref_logp for row in rows])

    before = reference_logp(run)
    _, resumed = start(here, words + " --resume")
    assert resumed.step == run.step and torch.equal(reference_logp(resumed), before)
