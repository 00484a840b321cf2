"""How adapt runs its training: which workers on which nodes, the fit with its retries, the curve."""
