"""Training experiments on small models: associative recall, needles, ablations and blockwise causality.

``tiny_training`` is the one training loop, ``grid`` runs the cells of an experiment over processes and keeps their
results; every other module is an experiment or what it found.
"""
