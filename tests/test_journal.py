"""A run's directory: which one it is, and what a kill and a resume leave in it."""

import json

import pytest

from journal import Journal, choose_directory


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_numbered_after_model_and_data(folder):
    """runs/x-10 comes after runs/x-9, and runs/x-more-3 is another name."""
    assert str(choose_directory(None, "tiny", "sort:6", False)) == "runs/tiny-sort-6-1"
    assert str(choose_directory(None, "some/where/Model-1B", "my data.jsonl", False)) == "runs/Model-1B-my-data-1"
    for name in ("tiny-sort-9", "tiny-sort-10", "tiny-sort-more-30", "tiny-sort-old"):
        (folder / "runs" / name).mkdir(parents=True)
    assert str(choose_directory(None, "tiny", "sort", False)) == "runs/tiny-sort-11"
    assert str(choose_directory(None, "tiny", "sort", True)) == "runs/tiny-sort-10"
    assert str(choose_directory(None, "tiny", "countdown", True)) == "runs/tiny-countdown-1"


def test_a_run_is_not_written_over(folder):
    (folder / "old").mkdir()
    assert str(choose_directory("old", "tiny", "sort", False)) == "old"  # nothing logged yet
    (folder / "old" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="old holds a run already"):
        choose_directory("old", "tiny", "sort", False)
    assert str(choose_directory("old", "tiny", "sort", True)) == "old"


def write(folder, name, *steps, half=""):
    (folder / name).write_text("".join(json.dumps({"step": step, "value": "é 0.1"}) + "\n" for step in steps) + half)


def steps(folder, name):
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def test_resuming_cuts_what_was_logged_after_the_checkpoint(folder):
    write(folder, "metrics.jsonl", 0, 1, 2, 3, 4, half='{"step": 5, "va')
    write(folder, "samples.jsonl", 1, 1, 2, 3, 3, 4)
    journal = Journal(folder, {"seed": 1}, True, 3, 10)
    assert steps(folder, "metrics.jsonl") == [0, 1, 2, 3] and steps(folder, "samples.jsonl") == [1, 1, 2, 3, 3]
    journal.metrics(4, {"loss": 0.1})
    assert steps(folder, "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert json.loads((folder / "config.json").read_text()) == {"seed": 1}
    assert not list(folder.glob("*.tmp"))


def test_starting_again_from_nothing_leaves_nothing_of_before(folder):
    """Also where the kill came within the first line: the next one once went on behind the broken half."""
    write(folder, "metrics.jsonl", half='{"step": 0, "ev')
    write(folder, "samples.jsonl", 1, 2)
    journal = Journal(folder, {}, True, 0, 10)
    journal.metrics(0, {"eval/solved": 0.5})
    assert steps(folder, "metrics.jsonl") == [0] and steps(folder, "samples.jsonl") == []


def test_a_kill_while_the_log_is_cut_loses_nothing(folder, monkeypatch):
    write(folder, "metrics.jsonl", 0, 1, 2, 3)

    def killed(self, name, entries):
        (self.directory / name).write_text('{"st')
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            Journal(folder, {}, True, 2, 10)
    Journal(folder, {}, True, 2, 10)
    assert steps(folder, "metrics.jsonl") == [0, 1, 2]


def test_other_processes_write_and_say_nothing(folder, capsys):
    journal = Journal(folder / "run", {}, False, 0, 10)
    journal.metrics(1, {"loss": 0.1, "eval/solved": 1.0})
    journal.samples([{"step": 1}], show=True)
    journal.say("word")
    journal.last_words("sort_exact", None, folder, "python sample.py")
    assert not list(folder.iterdir()) and capsys.readouterr() == ("", "")


def test_the_best_sample_is_shown_and_the_last_words_say_what_came_of_it(folder, capsys):
    journal = Journal(folder, {}, True, 0, 2)
    journal.metrics(0, {"eval/solved": 0.0})
    entries = [{"step": 1, "prompt": [{"role": "user", "content": "2+2="}], "completion": text, "rewards": {"mine": a}, "advantage": a}
               for text, a in [("worse", -1.0), ("better", 1.0)]]  # fmt: skip
    journal.samples(entries, show=True)
    for step in (1, 2):
        journal.metrics(step, {"reward": 0.25 * step, "completions/mean_length": 3.0, "grad_norm": 1.0, "step_time": 0.1})
    journal.metrics(2, {"eval/solved": 0.875})
    journal.last_words("sort_exact", "plot.png", folder / "model", "python sample.py --raw")
    said = capsys.readouterr().out
    assert "2+2=" in said and "better" in said and "worse" not in said
    assert "0.250 in the first step, 0.500 in step 2" in said and "0.0% at step 0, 87.5% at step 2" in said
    assert "--raw" in said and "plot.png" in said


def test_a_run_without_any_reward_ends_with_its_last_words(folder, capsys):
    """Functions that return None for every completion leave no reward to name, and the run must not die of that."""
    journal = Journal(folder, {}, True, 0, 1)
    journal.metrics(1, {"completions/mean_length": 3.0, "grad_norm": 0.0, "step_time": 0.1})
    journal.last_words("mine", "plot.png", folder / "model", "python sample.py")
    assert "plot.png" in capsys.readouterr().out
