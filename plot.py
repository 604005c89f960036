"""Look at runs: RUN/metrics.jsonl (one JSON object a step, TRL's metric names) -> a page of small panels.

Lives here: reading that file and drawing it. Metrics are made in train.py and loss.py. Thin lines are the raw values,
thick ones smoothed. Several runs lie over one another, one colour a run. What no run logged has no panel.

    python plot.py runs/sort                       # writes runs/sort/plot.png
    python plot.py runs/a runs/b --out compare.png
"""
import argparse
import json
import math
import sys
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path

# title, the metrics in it (patterns), scale of the y axis
PANELS = [
    ("reward", ["reward"], "linear"),
    ("reward functions (unweighted means)", ["rewards/*/mean"], "linear"),
    ("held-out problems, share solved", ["eval/solved", "eval/pass@*"], "linear"),
    ("completion length (tokens)", ["completions/mean_length"], "linear"),
    ("shares: cut off, groups all alike", ["completions/clipped_ratio", "frac_reward_zero_std"], "linear"),
    ("entropy (nats a token)", ["entropy"], "linear"),
    ("KL to the reference (nats a token)", ["kl"], "linear"),
    ("gradient norm before clipping", ["grad_norm"], "log"),
    ("share of ratios clipped", ["clip_ratio/region_mean"], "linear"),
    ("|sampler - learner log-prob|, mean", ["sampling/sampling_logp_difference/mean"], "log"),
    ("learning rate", ["learning_rate"], "linear"),
    ("seconds a step", ["step_time"], "linear"),
]


def read_metrics(directory):
    """The steps of a run, a dict each. A last line still being written is passed over; another bad line is an error."""
    path = Path(directory) / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no metrics.jsonl in {directory}; give the directory of a run (--output_dir)")
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                steps.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: {error}") from None
    return steps


def smooth(values, reach):
    """Each value's mean with up to `reach` neighbours on either side: centred, so the curve does not lag."""
    sums = [0.0, *accumulate(values)]
    spans = [(max(i - reach, 0), min(i + reach + 1, len(values))) for i in range(len(values))]
    return [(sums[b] - sums[a]) / (b - a) for a, b in spans]


def draw(directories, out):
    """Draw the runs into the image file `out` -> its path."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state, the Agg canvas for PNG

    directories = [Path(directory) for directory in directories]
    runs = [read_metrics(directory) for directory in directories]
    panels = [(title, names, scale) for title, patterns, scale in PANELS if (names := _matching(runs, patterns))]
    if not panels:
        raise ValueError(f"no metrics yet in {', '.join(map(str, directories))}")

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 0.5 + 2.7 * rows), dpi=110, layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (title, names, scale) in zip(grid, panels):
        _panel(axes, runs, names, scale)
        axes.set_title(title, loc="left", fontsize=10)
    for axes in grid[len(panels):]:
        axes.remove()
    figure.suptitle(directories[0].resolve().name if len(runs) == 1 else "", fontsize=11)
    if len(runs) > 1:
        handles = [figure.axes[0].plot([], [], color=f"C{i}", linewidth=2)[0] for i in range(len(runs))]
        figure.legend(handles, map(str, directories), loc="outside upper left", ncols=min(4, len(runs)), frameon=False)
    figure.savefig(out)
    return Path(out)


def _matching(runs, patterns):
    """The names, in the order they were logged, that match a pattern and have at least one value."""
    names = dict.fromkeys(name for run in runs for step in run for name in step)
    names = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    return [name for name in names if any(_series(run, name)[0] for run in runs)]


def _series(run, name):
    """Steps and values of one metric, without the steps where it was not logged or is NaN."""
    points = [(step.get("step", i), step[name]) for i, step in enumerate(run, 1) if name in step]
    points = [(x, y) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y)]
    return [x for x, _ in points], [y for _, y in points]


def _panel(axes, runs, names, scale):
    """One metric a colour for a single run; one run a colour and one metric a line style for several."""
    low, high = math.inf, -math.inf
    for i, run in enumerate(runs):
        for j, name in enumerate(names):
            x, y = _series(run, name)
            color, style = (f"C{j}", "-") if len(runs) == 1 else (f"C{i}", ["-", "--", ":", "-."][j % 4])
            label = name.removeprefix("rewards/").removesuffix("/mean").removeprefix("eval/")
            label = label if len(names) > 1 and i == 0 else None
            low, high = min([low, *y]), max([high, *y])
            if name.startswith("eval/"):                     # few points, over the same problems: nothing to smooth
                axes.plot(x, y, color=color, linestyle=style, marker="o", markersize=3, linewidth=1.5, label=label)
            else:
                axes.plot(x, y, color=color, linewidth=0.7, alpha=0.25)
                axes.plot(x, smooth(y, len(y) // 40), color=color, linestyle=style, linewidth=1.6, label=label)
    if high - low <= 1e-6 * abs(high):                       # a constant: matplotlib would zoom in on its rounding
        axes.set_ylim(min(2 * low, 0), max(2 * high, 0) or 1)
    elif scale == "log" and high > 0:
        axes.set_yscale("log", nonpositive="mask")           # a step without a gradient has norm 0
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("step", fontsize=8)
    if len(names) > 1:
        axes.legend(fontsize=7, frameon=False)


def plot_run(directory):
    """Draw one run into its own plot.png -> the path."""
    return draw([directory], Path(directory) / "plot.png")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draw the metrics of one run, or of several over one another.")
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run's directory (with metrics.jsonl)")
    parser.add_argument("--out", help="image to write; its ending says the kind (default: RUN_DIR/plot.png, "
                                      "for several runs ./plot.png)")
    args = parser.parse_args(argv)
    default = Path(args.runs[0]) / "plot.png" if len(args.runs) == 1 else "plot.png"
    try:
        print(draw(args.runs, args.out or default))
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: {error}")


if __name__ == "__main__":
    main()
