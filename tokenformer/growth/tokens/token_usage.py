"""What each token of a model does on data: how much it adds, and how much of the norm it holds.

Both are means over the rows that reach a layer, with w_i the weight theta gives token i:

    contribution   E[ w_i^2 ] ||v_i||^2         the squared length of what the token adds
    share          E[ m_i / sum_j m_j ]         its part of what theta divides by

with the mass m_i = A_i^2 for l2_gelu, gelu(A_i)^2 for gelu_l2, |A_i| for l1_gelu and exp(A_i) for
softmax. Every theta divides by a power of the sum of masses and multiplies by the same power of the
scale s, so tokens that hold the share r on their own keep their weights at the scale r s. A mean
share of a set of tokens is the sum of theirs: one pass over the data serves every choice of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenformer.growth.probe_inputs import KINDS, check_batch, run
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.layers.pattention import Pattention
from tokenformer.ops.theta import THETAS, accumulation_dtype

ELEMENTS_AT_ONCE = 1 << 22
"""Scores held at once, rows times tokens."""


class Mass(NamedTuple):
    """What a token adds to the norm of one theta; the eps that theta may add is ignored."""

    of_scores: Callable[[Tensor, Tensor], Tensor]
    """From scores and weights [R, n]."""
    of_keys: Callable[[Tensor], Tensor]
    """From keys [n, d] alone: the mean over inputs of all directions, up to a factor. With softmax
    it does not vanish with the key; there all tokens count the same."""


def squared_length(keys: Tensor) -> Tensor:
    return keys.square().sum(1)


MASSES = {
    "l2_gelu": Mass(lambda scores, weights: scores.square(), squared_length),
    "gelu_l2": Mass(lambda scores, weights: weights.square(), squared_length),
    "l1_gelu": Mass(lambda scores, weights: scores.abs(), lambda k: squared_length(k).sqrt()),
    "softmax": Mass(lambda scores, weights: weights, lambda k: k.new_ones(len(k))),
}


@dataclass(frozen=True)
class TokenStatistics:
    """Of one layer."""

    contribution: Tensor  # [n], float64
    share: Tensor  # [n], float64, of sum 1


class Tally:
    """Sums over the rows that one layer has seen."""

    def __init__(self, module: Pattention) -> None:
        self.module = module
        self.squares = torch.zeros(module.num_tokens, dtype=torch.float64)
        self.shares = torch.zeros(module.num_tokens, dtype=torch.float64)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        layer = self.module
        for rows in in_parts(layer, x):
            scores, weights = attended(layer, rows, layer.key_tokens, layer.scale_tokens)
            mass = MASSES[layer.theta].of_scores(scores, weights)  # [R, n]
            total = mass.sum(-1, keepdim=True)  # [R, 1]
            # A row without scores divides nothing among the tokens.
            share = torch.where(total > 0, mass / total, 0.0)
            self.squares += weights.square().sum(0).cpu().double()
            self.shares += share.sum(0).cpu().double()
            self.rows += len(rows)

    def result(self) -> TokenStatistics:
        lengths = self.module.value_tokens.detach().cpu().double().square().sum(1)  # [n]
        total = self.shares.sum()
        return TokenStatistics(
            self.squares / max(1, self.rows) * lengths,
            self.shares / total if total > 0 else torch.full_like(self.shares, 1 / len(lengths)),
        )


def in_parts(layer: Pattention, x: Tensor) -> tuple[Tensor, ...]:
    """The rows of x, so many at a time that their scores can be held."""
    rows = x.reshape(-1, layer.in_features)
    return rows.split(max(1, ELEMENTS_AT_ONCE // layer.num_tokens))


def attended(
    layer: Pattention, rows: Tensor, keys: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Scores and weights [R, n] of some keys, as the layer would have them, in fp32 or wider."""
    wide = accumulation_dtype(keys.dtype)
    scores = rows.to(wide) @ keys.to(wide).T
    return scores, THETAS[layer.theta](scores, scale, layer.approximate, layer.eps)


def token_statistics(model: Any, batches: Iterable[Tensor]) -> dict[str, TokenStatistics]:
    """Statistics of every Pattention layer, by name, over batches of what it takes."""
    tallies = {name: Tally(module) for name, (_, module) in token_layers(model).items()}
    observe(model, batches, {name: tally.add for name, tally in tallies.items()})
    return {name: tally.result() for name, tally in tallies.items()}


@torch.no_grad()
def observe(
    model: Any, batches: Iterable[Tensor], observers: Mapping[str, Callable[[Tensor], None]]
) -> None:
    """Run the model over `batches` and show each observer the inputs of the layer it names."""
    count = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(active_share(model, None))
        for name, observer in observers.items():
            hook = model.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, observer=observer: observer(inputs[0])
            )
            stack.callback(hook.remove)
        for batch in batches:
            check_batch(model, batch)
            run(model.base_model, batch.to(model.device))
            count += 1
    if not count:
        kind = KINDS[model.main_input_name]
        raise ValueError(f"batches is empty; give at least one tensor of {kind}")


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
