"""Every worker of `pytest -n 2` keeps to one core; child processes import the same package and helpers as the tests."""

import os
from pathlib import Path

import torch

import mdn

torch.set_num_threads(1)
_IMPORTED_FROM = [Path(__file__).parent, *(Path(folder).parent for folder in mdn.__path__)]
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _IMPORTED_FROM), os.environ.get("PYTHONPATH", "")]).rstrip(":")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
