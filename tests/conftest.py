"""What every test may rely on: the repository's files import by name, and torch keeps to one thread, because tiny
matrices on several threads of a shared machine mostly wait for one another."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
