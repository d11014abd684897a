"""Learning rates of single tokens, which share a parameter tensor with others.

After growth the old tokens can be frozen, or learn more slowly than the new ones
(`config.token_rates`), and so can the parts of a vision-language model (`optimizer.part_rates`). A
row of rate r moves by r times the optimizer's update, weight decay included. A row of rate 0 does
not change by a bit, and its gradient does not count in the norm.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokenformer.growth.tokens.token_counts import LayerProjection
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.train.optimizer import rate_of
from tokenformer.train.options import PARTS, OptimizerOptions
from tokenformer.train.parallel.meta_init import shard_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RowRates:
    def __init__(
        self, model: "PreTrainedModel", part_rates: Mapping[str, float] | None = None
    ) -> None:
        self.rates: list[tuple[nn.Parameter, Tensor]] = []
        """Parameters with the rates of their rows, [n, 1], sharded like the parameter."""
        if not hasattr(model.config, "row_rates"):
            return
        for place, layer in token_layers(model).values():
            rates = row_rates(model.config, place, part_rates)
            if rates is not None:
                for parameter in (layer.key_tokens, layer.value_tokens):
                    self.rates.append((parameter, rate_column(rates, parameter)))

    def mask_gradients(self) -> None:
        for parameter, rates in self.rates:
            if parameter.grad is not None:
                parameter.grad.mul_(rates != 0)

    @contextmanager
    def scale_update(self) -> Iterator[None]:
        """Scale the update that the optimizer makes within the block."""
        before = [parameter.detach().clone() for parameter, _ in self.rates]
        yield
        with torch.no_grad():
            for (parameter, rates), old in zip(self.rates, before, strict=True):
                # Exact at both ends: lerp gives `old` at 0 and the new value at 1.
                parameter.copy_(torch.lerp(old, parameter.detach(), rates))


def row_rates(
    config: Any, place: LayerProjection, part_rates: Mapping[str, float] | None
) -> list[float] | None:
    """Return the factors of a layer's rows: those of the model, times those of their part."""
    own: list[float] | None = config.row_rates(*place)
    if not part_rates:
        return own
    counts = config.parts(*place)
    parts = [
        part_rates.get(part, 1.0)
        for part, count in zip(PARTS, counts, strict=True)
        for _ in range(count)
    ]
    return parts if own is None else [a * b for a, b in zip(own, parts, strict=True)]


def trains_new_tokens_only(model: "PreTrainedModel", options: OptimizerOptions) -> bool:
    """Whether a run leaves everything that a vision-language model was joined of as it is, as an
    alignment does."""
    config = model.config
    if not hasattr(config, "parts"):
        return False
    layers, kept = token_layers(model), ("key_tokens", "value_tokens")
    for name, _ in model.named_parameters():
        if rate_of(name, options) == 0:
            continue
        layer, _, kind = name.rpartition(".")
        if not config.is_joined or layer not in layers or kind not in kept:
            return False
        place = layers[layer][0]
        vision, new, _ = config.parts(*place)
        rates = row_rates(config, place, options.part_rates) or [1.0]
        if any(rates[:vision]) or any(rates[vision + new :]):
            return False
    return True


def rate_column(rates: list[float], parameter: nn.Parameter) -> Tensor:
    column = torch.tensor(rates, dtype=parameter.dtype, device=parameter.device)[:, None]
    return shard_like(column, parameter) if isinstance(parameter, DTensor) else column
