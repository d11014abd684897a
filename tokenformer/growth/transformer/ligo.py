"""LiGO (arXiv 2303.00980): learn a linear map from the small weights to the large ones.

Every matrix of the larger model is B W A^T with the small model's W and learned B and A, and every
layer is a learned mixture of the widened layers. B, A and the mixture are trained for a few hundred
steps; then the resulting weights are kept. Not exact.

    layer l' of the larger model:  W'[l'] = sum over l of depth[l', l] * B[l] W[l] A[l]^T

The whole model shares one B that writes to the residual stream and one A that reads from it; those
of heads and hidden units are per layer. The mixing starts as HyperCloning's tiles and stacked
layers, plus noise that breaks the symmetry of the tiles. The paper ties A to B. Here they are
separate, because tiles are copied on one side and divided on the other, so that training starts
close to the old function.

The optimizer state is reset.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from tokenformer.growth.parameter_mapping import ParameterMapping
from tokenformer.growth.transformer.expansion import Expansion, GrownWeights, full_name, split_name
from tokenformer.growth.transformer.stacking import stacked_layers
from tokenformer.growth.transformer.widening import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    READERS,
    WRITERS,
    Replicas,
    cyclic,
    layer_replicas,
    replica_shares,
)

INITIAL_NOISE = 0.1
"""Noise added to the initial tiles, relative to a unit."""

Mixing = dict[str, Tensor]


def ligo(
    expansion: Expansion,
    *,
    batches: Iterable[Tensor] | None = None,
    steps: int = 100,
    learning_rate: float = 1e-3,
) -> GrownWeights:
    """Grow by LiGO, trained for `steps` on `batches` of token ids [B, T], one per step."""
    if batches is None:
        raise ValueError("ligo is trained on data: give batches, an iterable of token ids [B, T]")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    mixing = initial_mixing(expansion)
    optimizer = torch.optim.AdamW(mixing.values(), lr=learning_rate, weight_decay=0.0)
    for tokens in take(steps, batches):
        weights = mix(expansion, mixing)
        output = functional_call(
            expansion.meta_model, weights, kwargs={"input_ids": tokens, "labels": tokens}
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    with torch.no_grad():
        made = mix(expansion, mixing)
    parameters = {name: tensor.to(expansion.dtype) for name, tensor in made.items()}
    mappings = {name: ParameterMapping(None) for name in parameters}
    return GrownWeights(expansion.after, parameters, mappings, exact=False)


def take(steps: int, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    iterator = iter(batches)
    for step in range(steps):
        try:
            yield next(iterator)
        except StopIteration:
            raise ValueError(f"batches ended after {step} of {steps} steps") from None


def initial_mixing(expansion: Expansion) -> Mixing:
    """Return the initial mixing by name: `written`, `read` and `final` for the residual stream,
    `3.attention.q` for layer 3, and `depth.attention.q.weight` for the mixture of layers."""
    before, after = expansion.before, expansion.after
    generator = expansion.generator("mixing")
    index = cyclic(before.hidden_size, after.hidden_size, generator)
    stream = Replicas(index, replica_shares(index, before.hidden_size, 0.0, generator))
    tied = before.tie_word_embeddings
    mixing = {
        "written": tiles(stream, before.hidden_size, generator),
        "read": tiles(stream, before.hidden_size, generator, shared=True),
        "final": tiles(stream, before.hidden_size, generator, shared=tied),
    }
    for name, weight in expansion.old.items():
        layer, suffix = split_name(name)
        if layer is None:
            continue
        module = suffix.rpartition(".")[0]
        last = module.rpartition(".")[2]
        if axis := READERS.get(last) or WRITERS.get(last):
            replicas: Replicas = getattr(layer_replicas(expansion, layer, cyclic), axis)
            size = weight.shape[0 if last in READERS else 1]
            mixing[f"{layer}.{module}"] = tiles(replicas, size, generator, shared=last in WRITERS)
        depth = torch.zeros(after.num_hidden_layers, before.num_hidden_layers)
        sources = stacked_layers(before.num_hidden_layers, after.num_hidden_layers)
        depth[range(len(sources)), sources] = 1.0
        mixing[f"depth.{suffix}"] = depth
    dtype = torch.promote_types(expansion.dtype, torch.float32)
    return {
        name: tensor.to(expansion.device, dtype).requires_grad_() for name, tensor in mixing.items()
    }


def tiles(
    replicas: Replicas, before: int, generator: torch.Generator, *, shared: bool = False
) -> Tensor:
    """Return a row per new unit: its share of the old unit it copies, plus noise."""
    after = len(replicas.index)
    sizes = replicas.shares.float() if shared else torch.ones(after)
    noise = torch.randn(after, before, generator=generator) * (INITIAL_NOISE * before**-0.5)
    chosen = torch.nn.functional.one_hot(replicas.index, before)
    return (chosen + noise) * sizes[:, None]


def mix(expansion: Expansion, mixing: Mixing) -> dict[str, Tensor]:
    """Return the weights of the larger model."""
    wide = {name: widen_parameter(name, weight, mixing) for name, weight in expansion.old.items()}
    weights = {}
    for name in expansion.names:
        layer, suffix = split_name(name)
        if layer is None:
            weights[name] = wide[name]
        else:
            layers = [wide[full_name(n, suffix)] for n in range(expansion.before.num_hidden_layers)]
            shares = mixing[f"depth.{suffix}"][layer]
            weights[name] = torch.tensordot(shares, torch.stack(layers), 1)
    return weights


def widen_parameter(name: str, weight: Tensor, mixing: Mixing) -> Tensor:
    layer, suffix = split_name(name)
    module = suffix.rpartition(".")[0]
    last = module.rpartition(".")[2]
    written, read = mixing["written"], mixing["read"]
    weight = weight.to(written)
    if module in EMBEDDINGS:
        return weight @ written.T
    if module == HEAD:
        return weight @ read.T
    if last in READERS:
        return mixing[f"{layer}.{module}"] @ weight @ read.T
    if last in WRITERS:
        return written @ weight @ mixing[f"{layer}.{module}"].T
    return (mixing["final"] if module == FINAL_NORM else written) @ weight
