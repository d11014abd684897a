"""Which existing tokens to train: those that new data uses and kept data does not.

Sparse memory finetuning (https://arxiv.org/abs/2510.15103) updates only the slots of a memory layer
that a new document uses much more than other text does, by their TF-IDF. In Pattention every token
has a weight on every input, so both counts are soft. With the use of token i by a batch,

    u_i = sum over the rows of |w_i| ||v_i||,      p_i = u_i / sum_j u_j

the term frequency is p_i over all new data, and a kept batch counts as a document with token i by
min(1, n p_i), which is 1 from the mean use of the n tokens on:

    score_i = p_i(new) log( (B + 1) / (1 + sum over the B kept batches of min(1, n p_i)) )
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.growth.tokens.token_usage import observe_inputs, row_chunks
from tokenformer.layers.pattention import Pattention

Place = tuple[str, int]
"""Projection and block of a layer."""
TokenRates = dict[str, list[list[list[float]] | None]]
"""As `TokenConfig.token_rates`."""


def usage(model: PreTrainedModel, batch: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the use [n] of every token of the named layers by a batch of model inputs."""
    layers = {name: layer for name, (_, layer) in token_layers(model).items() if name in {*names}}
    found = {name: torch.zeros(layer.num_tokens).double() for name, layer in layers.items()}

    def add(name: str, layer: Pattention, x: Tensor) -> None:
        for rows in row_chunks(layer, x):
            found[name] += layer.token_weights(rows).weights.abs().sum(0).cpu().double()

    observe_inputs(model, [batch], {n: partial(add, n, layer) for n, layer in layers.items()})
    for name, layer in layers.items():
        found[name] *= layer.value_tokens.detach().cpu().double().norm(dim=1)
    return found


def token_scores(
    model: PreTrainedModel,
    new: Iterable[Tensor],
    kept: Iterable[Tensor],
    names: Iterable[str],
) -> dict[str, Tensor]:
    """Return the TF-IDF of every token [n] of the named layers."""
    names = list(names)
    new_use = [usage(model, batch, names) for batch in new]
    kept_use = [usage(model, batch, names) for batch in kept]
    scores = {}
    for name in names:
        frequency = shares(sum_tensors([use[name] for use in new_use]))
        documents = [(len(frequency) * shares(use[name])).clamp(max=1) for use in kept_use]
        rarity = torch.log((len(documents) + 1) / (1 + sum_tensors(documents)))
        scores[name] = frequency * rarity
    return scores


def sum_tensors(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def shares(use: Tensor) -> Tensor:
    """Divide by the sum; a layer without any use counts all tokens the same."""
    total = use.sum()
    return use / total if total > 0 else torch.full_like(use, 1 / len(use))


def rates_of_best(
    scores: dict[str, Tensor], places: dict[str, Place], blocks: int, rows: Callable[[int], int]
) -> TokenRates:
    """Return rates of 1 for the tokens with the highest scores in each layer and 0 for the others.
    `rows` gives the number of tokens to train from the number that a layer has."""
    rates: TokenRates = {projection: [None] * blocks for projection, _ in places.values()}
    for name, (projection, block) in places.items():
        order = scores[name].argsort(descending=True, stable=True)
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order[: rows(len(order))]] = True
        rates[projection][block] = run_lengths(chosen)
    return rates


def run_lengths(chosen: Tensor) -> list[list[float]]:
    values, counts = chosen.unique_consecutive(return_counts=True)
    return [[int(n), float(v)] for v, n in zip(values.tolist(), counts.tolist(), strict=True)]
