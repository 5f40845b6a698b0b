def why_unavailable(device=None):
    return "it is not built yet"
