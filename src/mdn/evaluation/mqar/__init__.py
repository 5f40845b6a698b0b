"""Multi-query associative recall: the data, the training of one cell, the grid of cells, and its report."""
