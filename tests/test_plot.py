"""plot.py: what is read, what is drawn, what is said when there is nothing."""
import json

import pytest

import plot


def write_run(directory, steps=12, tail="", **extra):
    directory.mkdir()
    lines = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": step / 10, "reward_std": 0.1, "rewards/correctness/mean": step / 12,
               "rewards/int/mean": 0.5, "completions/mean_length": 40.0, "completions/clipped_ratio": 0.0,
               "grad_norm": float(step % 3), "entropy": 1.0, "loss": 0.0, "step_time": 2.0, "kl": None,
               "clip_ratio/region_mean": float("nan"), "num_tokens": 100 * step, "note": "line\u2028separator", **extra}
        if step % 4 == 0:
            row |= {"eval/reward": 0.5, "eval/solved": 0.25, "eval/pass@4": 0.75, "eval/step_time": 9.0}
        lines.append(json.dumps(row, ensure_ascii=False))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail, encoding="utf-8")
    return directory


@pytest.fixture
def figure(monkeypatch):
    """The figure that draw made, to look at what is in it."""
    import matplotlib.figure
    made, savefig = [], matplotlib.figure.Figure.savefig

    def keep_and_save(self, *args, **kwargs):
        made.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep_and_save)
    return made


@pytest.mark.filterwarnings("error")
def test_plot_run_draws_what_was_logged(tmp_path, figure):
    run = write_run(tmp_path / "run")
    path = plot.plot_run(run)
    assert path == run / "plot.png" and path.read_bytes().startswith(b"\x89PNG")
    titles = [axes.get_title(loc="left") for axes in figure[0].axes]
    assert titles == [
        "reward", "reward functions (unweighted means)", "held-out problems, share solved", "completion length (tokens)",
        "shares: cut off, groups all alike", "entropy (nats a token)", "gradient norm before clipping",
        "seconds a step"]                               # kl was null, the clipped share NaN, in every step
    by_title = dict(zip(titles, figure[0].axes))
    legends = [[t.get_text() for t in axes.get_legend().get_texts()] for axes in figure[0].axes[1:3]]
    assert legends == [["correctness", "int"], ["solved", "pass@4"]]
    assert [list(line.get_xdata()) for line in by_title[titles[2]].lines] == [[4, 8, 12]] * 2
    raw = by_title["reward"].lines[0]
    assert list(raw.get_xdata()) == list(range(1, 13)) and list(raw.get_ydata()) == [s / 10 for s in range(1, 13)]
    low, high = by_title["entropy (nats a token)"].get_ylim()
    assert low <= 0 and high >= 1.5                                   # a constant is not magnified to its rounding


@pytest.mark.filterwarnings("error")
def test_several_runs_lie_over_one_another(tmp_path, figure, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=20, kl=0.1)
    plot.main([str(a), str(b), "--out", str(tmp_path / "both.png")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "both.png") and (tmp_path / "both.png").is_file()
    assert [t.get_text() for t in figure[0].legends[0].get_texts()] == [str(a), str(b)]
    assert {len(line.get_xdata()) for line in figure[0].axes[0].lines} >= {12, 20}
    assert "KL to the reference (nats a token)" in [axes.get_title(loc="left") for axes in figure[0].axes]


@pytest.mark.parametrize("tail", ["", "\n", '{"step": 13, "rew', "\n\n   \n"])
def test_a_last_line_still_being_written_is_passed_over(tmp_path, tail):
    steps = plot.read_metrics(write_run(tmp_path / "run", tail=tail))
    assert [step["step"] for step in steps] == list(range(1, 13))


def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    run = write_run(tmp_path / "run", tail='{"step": 13, "rew\n{"step": 14}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 13: "):
        plot.read_metrics(run)


def test_nothing_to_draw_is_one_line_and_exit_1(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    for directory, message in [("absent", "no metrics.jsonl in "), ("empty", "no metrics yet in ")]:
        with pytest.raises(SystemExit) as caught:
            plot.main([str(tmp_path / directory)])
        assert message in str(caught.value.code) and "\n" not in caught.value.code      # a text: printed, exit status 1


def test_smoothing_is_a_centred_mean_without_lag():
    assert plot.smooth([1.0, 2.0, 3.0, 4.0], 1) == [1.5, 2.0, 3.0, 3.5]
    assert plot.smooth([1.0, 5.0], 0) == [1.0, 5.0]
    assert plot.smooth([], 3) == []
