"""A row of metrics: what a run reports of each step, and writes to `metrics.jsonl`."""

Row = dict[str, float]
"""step, tokens, flops, seconds, loss, lr; val_loss and val_bpb where validated."""
