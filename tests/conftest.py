"""Test helpers import from tests/ by name, and every worker of `pytest -n 2` keeps to one core."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
