"""A row of metrics: what a run reports of each step, and writes to `metrics.jsonl`."""

from typing import Any

Row = dict[str, Any]
"""step, tokens (of an image task: images), flops, seconds, loss, lr, gradient_norm; val_loss, and
what the task says of it, where validated; `problem` where the step went wrong."""
