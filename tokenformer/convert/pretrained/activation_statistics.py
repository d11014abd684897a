"""Activation statistics of a source model on calibration data, in one pass.

For the input of every projection: mean and covariance of all rows, and a sample of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.convert.pretrained.architectures import Architecture
from tokenformer.growth.tokens.token_usage import observe_inputs

MAX_SAMPLE_ROWS = 8192
MAX_SAMPLE_BYTES = 1 << 31
"""Limit on all samples together."""


@dataclass(frozen=True)
class PlainNorm:
    """The norm of the source without weight and bias."""

    kind: str
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], eps=self.eps)
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)


@dataclass
class Moments:
    """Running mean and covariance of rows."""

    rows: int = 0
    total: Tensor | float = 0.0
    products: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        self.rows += len(rows)
        self.total = self.total + rows.sum(0)
        self.products = self.products + rows.T @ rows

    @property
    def mean(self) -> Tensor:
        return torch.as_tensor(self.total) / self.rows  # [d]

    @property
    def covariance(self) -> Tensor:
        """[d, d], shrunk towards its diagonal if there are few rows per channel."""
        sample = torch.as_tensor(self.products) / self.rows - torch.outer(self.mean, self.mean)
        share = self.rows / (self.rows + len(sample))
        return share * sample + (1 - share) * sample.diagonal().diag()


@dataclass
class InputStatistics:
    """Statistics of the input of one projection: moments of all rows, and a sample of rows."""

    rows_per_batch: int
    """Rows sampled from each batch."""
    moments: Moments = field(default_factory=Moments)
    kept: list[Tensor] = field(default_factory=list)

    @property
    def sample(self) -> Tensor:
        return torch.cat(self.kept)  # [R, d]

    def observer(self, prepare: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], None]:
        """Return a function that samples rows, and adds `prepare(rows)` to the moments if given."""

        def add(x: Tensor) -> None:
            rows = x.flatten(0, -2).cpu()
            places = torch.linspace(0, len(rows) - 1, min(self.rows_per_batch, len(rows))).long()
            self.kept.append(rows[places])
            if prepare is not None:
                self.moments.add(prepare(rows.double()))

        return add


@dataclass(frozen=True)
class LayerStatistics:
    """Inputs of the attention norm, the feed-forward norm and the output projection."""

    attention: InputStatistics
    ffn: InputStatistics
    output: InputStatistics


def collect_statistics(
    source: PreTrainedModel, architecture: Architecture, norm: PlainNorm, batches: Sequence[Tensor]
) -> list[LayerStatistics]:
    """Return the statistics of every layer, from one pass over token ids [B, T]."""
    layers, size = source.config.num_hidden_layers, source.config.hidden_size
    rows = max(1, min(MAX_SAMPLE_ROWS, MAX_SAMPLE_BYTES // (12 * layers * size)))
    per_batch = max(1, rows // max(1, len(batches)))
    statistics = [
        LayerStatistics(*(InputStatistics(per_batch) for _ in range(3))) for _ in range(layers)
    ]
    normed = norm if norm.kind == "rms_norm" else None  # moments are only needed after RMS norms
    observers = {}
    for index, layer in enumerate(statistics):
        observers[architecture.name(index, architecture.attention_norm)] = layer.attention.observer(
            normed
        )
        observers[architecture.name(index, architecture.ffn_norm)] = layer.ffn.observer(normed)
        observers[architecture.name(index, architecture.output)] = layer.output.observer(
            lambda rows: rows
        )
    observe_inputs(source, batches, observers)
    return statistics
