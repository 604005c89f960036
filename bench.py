"""
Measure it: what the parts cost, beside what others take for the same, as ratios from one interleaved run.

    python bench.py head                  # log-probs, loss and gradients of N tokens: plain, chunked, TRL's, Liger's
    python bench.py head --quick          # the same at toy size, in seconds: that it runs, not how fast
    python bench.py head --help           # each has its own flags

Each benchmark is a file of benchmarks/. Measure on an idle machine; OMP_NUM_THREADS sets the cores. Not here: how it is
measured (benchmarks/measure.py), curves of training runs (plot.py).
"""

import argparse
import importlib
import json
from pathlib import Path

import benchmarks  # before torch, whose profiler reads what it sets
import torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name in benchmarks.NAMES:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        about = benchmark.__doc__.splitlines()[0].partition(": ")[2]
        command = commands.add_parser(name, help=about, description=benchmark.__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        command.set_defaults(run=benchmark.run)
        command.add_argument("--quick", action="store_true", help="toy size")
        command.add_argument("--repeats", type=int, default=5, help="rounds after the first, which is dropped")
        command.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        command.add_argument("--device", choices=["cpu", "cuda"], default=device)
        command.add_argument("--json", help="write the numbers here")
        benchmark.add_arguments(command)
    args = parser.parse_args()
    args.torch_dtype = getattr(torch, args.dtype)
    report = args.run(args)
    if args.json and report is not None:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
