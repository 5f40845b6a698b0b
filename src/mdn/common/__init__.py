"""General tools: files, progress, processes, figures, result files, loading, error texts."""
