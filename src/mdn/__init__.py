"""Momentum DeltaNet: the stepwise momentum delta rule, its layer and its language model.

``import mdn`` is light (torch only). ``mdn.models`` imports transformers.
"""

__version__ = "0.2.0.dev0"
