"""Growing the plain Transformer: the baselines of token growth."""
