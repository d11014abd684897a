"""The report of `sparsify`: tokens and errors by layer, the loss before and after.

It prints as a table and saves as JSON.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenformer.files import write_atomic


@dataclass(frozen=True)
class SparseLayer:
    """One sparsified layer. Errors are on rows that the router was not fitted to."""

    name: str
    tokens: int
    groups: int
    active_groups: int
    """Of the groups, those that a row visits; with thresholds the mean number of tokens."""
    error: float
    """Root mean square of the change of the output, relative to that of the output."""
    oracle_error: float
    """The same with the best groups for every row, which no router knows in advance."""


@dataclass
class SparsityReport:
    method: str
    layers: list[SparseLayer]
    group_size: int
    parameters: int
    active_parameters: int
    loss_before: float | None
    """Mean next-token loss in nats; None for images, which come without labels."""
    loss_after: float | None
    divergence: float
    """Mean KL divergence of the sparse model's predictions from those of the dense one, in nats."""
    distill_steps: int = 0

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: Path | str) -> None:
        write_atomic(Path(path), json.dumps(self.asdict(), indent=2) + "\n")

    def __str__(self) -> str:
        lines = [
            f"{self.parameters:,} parameters, {self.active_parameters:,} active per token",
            f"{'':<28}{'tokens':>8}{'groups':>8}{'active':>8}{'error':>8}{'oracle':>8}",
        ]
        for layer in self.layers:
            counts = f"{layer.tokens:>8,}{layer.groups:>8,}{layer.active_groups:>8,}"
            lines.append(f"{layer.name:<28}{counts}{layer.error:>8.3f}{layer.oracle_error:>8.3f}")
        if self.loss_before is not None:
            lines.append(f"loss {self.loss_before:.4f} -> {self.loss_after:.4f}")
        lines.append(f"divergence from the dense model {self.divergence:.4f}")
        return "\n".join(lines)
