"""The benchmarks behind `python bench.py NAME`, one file each, and what they all measure with (measure.py).

A benchmark is a file here with a docstring ("name: what it is"), add_arguments(parser) and run(args), and a name below.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler prints two lines a run

NAMES = ("head", "sample", "step", "adapters", "device", "scale")
