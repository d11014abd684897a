"""What the maps of a source model see on data: moments and a sample of rows, in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.convert.pretrained.architectures import Frame
from tokenformer.growth.tokens.token_usage import observe_inputs

MOST_ROWS = 8192
HELD_BYTES = 1 << 31
"""How many rows a sample has, and how much all samples together."""


@dataclass(frozen=True)
class PlainNorm:
    """The source's norm without weight and bias."""

    kind: str
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], eps=self.eps)
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)


@dataclass
class Moments:
    """Mean and covariance of the rows seen so far."""

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
        """[d, d], shrunk towards its diagonal where there are few rows for so many channels."""
        found = torch.as_tensor(self.products) / self.rows - torch.outer(self.mean, self.mean)
        share = self.rows / (self.rows + len(found))
        return share * found + (1 - share) * found.diagonal().diag()


@dataclass
class Inputs:
    """Of one map: what is known of all rows, and some of the rows themselves."""

    share: int
    """Rows kept of each batch."""
    moments: Moments = field(default_factory=Moments)
    kept: list[Tensor] = field(default_factory=list)

    @property
    def sample(self) -> Tensor:
        return torch.cat(self.kept)  # [R, d]

    def observer(self, prepare: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], None]:
        """The sample is of the rows, moments of what `prepare` makes of them, if anything."""

        def add(x: Tensor) -> None:
            rows = x.flatten(0, -2).cpu()
            places = torch.linspace(0, len(rows) - 1, min(self.share, len(rows))).long()
            self.kept.append(rows[places])
            if prepare is not None:
                self.moments.add(prepare(rows.double()))

        return add


@dataclass(frozen=True)
class LayerInputs:
    """Of the maps after the attention's norm, after the other, and of the output projection."""

    attention: Inputs
    ffn: Inputs
    output: Inputs


def layer_inputs(
    source: Any, frame: Frame, norm: PlainNorm, batches: Sequence[Tensor]
) -> list[LayerInputs]:
    """One pass over batches of token ids [B, T]."""
    layers, size = source.config.num_hidden_layers, source.config.hidden_size
    rows = max(1, min(MOST_ROWS, HELD_BYTES // (12 * layers * size)))
    share = max(1, rows // max(1, len(batches)))
    found = [LayerInputs(*(Inputs(share) for _ in range(3))) for _ in range(layers)]
    normed = norm if norm.kind == "rms_norm" else None  # a layer norm's site is known without data
    observers = {}
    for index, layer in enumerate(found):
        observers[frame.name(index, frame.attention_norm)] = layer.attention.observer(normed)
        observers[frame.name(index, frame.ffn_norm)] = layer.ffn.observer(normed)
        observers[frame.name(index, frame.output)] = layer.output.observer(lambda rows: rows)
    observe_inputs(source, batches, observers)
    return found
