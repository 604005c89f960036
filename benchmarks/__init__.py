"""The benchmarks behind `python bench.py NAME`, one file each, and what they all measure with (measure.py).

A benchmark is a file here with a docstring ("name: what it is"), add_arguments(parser) and run(args), and a name below.
What run returns goes to --json; a benchmark that returns nothing writes its own.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler prints two lines a run

NAMES = ("head", "sample", "step", "adapters", "device", "scale")
