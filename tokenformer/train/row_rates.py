"""Tokens that learn at a rate of their own, though they share a tensor with others.

Growth can leave old tokens frozen, or slow, beside new ones (`config.token_rates`). A row of rate 0
is the same to the last bit after a step, weight decay included; its gradient counts for nothing.
A row of rate r goes r of the way that the optimizer would have taken it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.train.parallel.meta_init import part_of


class RowRates:
    def __init__(self, model: Any) -> None:
        self.rates: list[tuple[nn.Parameter, Tensor]] = []
        """Parameters with rows of their own rates, [n, 1], spread as the parameter is."""
        rate_of = getattr(model.config, "row_rates", None)
        if rate_of is None:
            return
        for place, layer in token_layers(model).values():
            rates = rate_of(*place)
            if rates is not None:
                for parameter in (layer.key_tokens, layer.value_tokens):
                    self.rates.append((parameter, spread(rates, parameter)))

    def mask_gradients(self) -> None:
        for parameter, rates in self.rates:
            if parameter.grad is not None:
                parameter.grad.mul_(rates != 0)

    @contextmanager
    def at_their_rates(self) -> Iterator[None]:
        """Around the optimizer's step."""
        before = [parameter.detach().clone() for parameter, _ in self.rates]
        yield
        with torch.no_grad():
            for (parameter, rates), old in zip(self.rates, before, strict=True):
                # Exact at both ends: lerp gives `old` at 0 and the new value at 1.
                parameter.copy_(torch.lerp(old, parameter.detach(), rates))


def spread(rates: list[float], parameter: nn.Parameter) -> Tensor:
    column = torch.tensor(rates, dtype=parameter.dtype, device=parameter.device)[:, None]
    return part_of(column, parameter) if isinstance(parameter, DTensor) else column
