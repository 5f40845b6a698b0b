"""Tools without a subject of their own: files, progress, processes, figures, result files, loading, error texts."""
