"""LiGO (arXiv 2303.00980): learn how the large weights are made of the small.

Every matrix of the larger model is B W A^T of the small one's W, with B and A learned, and every
layer a learned mixture of the layers so widened. A few hundred steps on data learn the mixing; then
the weights it gives are written down and the mixing is forgotten. Not preserving.

    layer l' of the larger model:  W'[l'] = sum over l of depth[l', l] * B[l] W[l] A[l]^T

One B writes to the residual stream and one A reads from it, for the whole model; those of heads and
hidden units belong to a layer. The mixing begins as HyperCloning's tiles and as stacked layers,
with noise that tells the tiles apart. The published rule ties A to B; here they are two, since
tiles are copied on one side and divided on the other to begin near the function that is there.

Nothing of an optimizer's state outlives a mixture: it begins anew.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from tokenformer.growth.origin import Origin
from tokenformer.growth.transformer.expansion import Expansion, Grown, in_layer, place_of
from tokenformer.growth.transformer.stacking import stacked
from tokenformer.growth.transformer.widening import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    READERS,
    WRITERS,
    Replicas,
    circular,
    map_layer,
    share,
)

NOISE = 0.1
"""How far the first mixing is from plain tiles: what it adds to a unit, as a share of the unit."""

Mixing = dict[str, Tensor]


def ligo(
    expansion: Expansion,
    *,
    batches: Iterable[Tensor] | None = None,
    steps: int = 100,
    learning_rate: float = 1e-3,
) -> Grown:
    """`batches` are token ids [B, T], one for each of the `steps`."""
    if batches is None:
        raise ValueError("ligo learns from data: give batches, an iterable of token ids [B, T]")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    mixing = first_mixing(expansion)
    optimizer = torch.optim.AdamW(mixing.values(), lr=learning_rate, weight_decay=0.0)
    for tokens in first(steps, batches):
        weights = mixed(expansion, mixing)
        output = functional_call(
            expansion.blank, weights, kwargs={"input_ids": tokens, "labels": tokens}
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    with torch.no_grad():
        made = mixed(expansion, mixing)
    parameters = {name: tensor.to(expansion.dtype) for name, tensor in made.items()}
    origins = {name: Origin(None) for name in parameters}
    return Grown(expansion.after, parameters, origins, exact=False)


def first(steps: int, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    waiting = iter(batches)
    for step in range(steps):
        try:
            yield next(waiting)
        except StopIteration:
            raise ValueError(f"batches ended after {step} of {steps} steps") from None


def first_mixing(expansion: Expansion) -> Mixing:
    """By name: written, read and final, of the stream; `3.attention.q`, of layer 3; and
    `depth.attention.q.weight`, of all layers."""
    before, after = expansion.before, expansion.after
    generator = expansion.generator("mixing")
    index = circular(before.hidden_size, after.hidden_size, generator)
    stream = Replicas(index, share(index, before.hidden_size, 0.0, generator))
    tied = before.tie_word_embeddings
    mixing = {
        "written": tiles(stream, before.hidden_size, generator),
        "read": tiles(stream, before.hidden_size, generator, shared=True),
        "final": tiles(stream, before.hidden_size, generator, shared=tied),
    }
    for name, weight in expansion.old.items():
        layer, place = place_of(name)
        if layer is None:
            continue
        module = place.rpartition(".")[0]
        last = module.rpartition(".")[2]
        if axis := READERS.get(last) or WRITERS.get(last):
            replicas: Replicas = getattr(map_layer(expansion, layer, circular), axis)
            size = weight.shape[0 if last in READERS else 1]
            mixing[f"{layer}.{module}"] = tiles(replicas, size, generator, shared=last in WRITERS)
        depth = torch.zeros(after.num_hidden_layers, before.num_hidden_layers)
        sources = stacked(before.num_hidden_layers, after.num_hidden_layers)
        depth[range(len(sources)), sources] = 1.0
        mixing[f"depth.{place}"] = depth
    dtype = torch.promote_types(expansion.dtype, torch.float32)
    return {
        name: tensor.to(expansion.device, dtype).requires_grad_() for name, tensor in mixing.items()
    }


def tiles(
    replicas: Replicas, before: int, generator: torch.Generator, *, shared: bool = False
) -> Tensor:
    """A row for every new unit: its share of the old one it copies, and a little of all."""
    after = len(replicas.index)
    sizes = replicas.shares.float() if shared else torch.ones(after)
    noise = torch.randn(after, before, generator=generator) * (NOISE * before**-0.5)
    chosen = torch.nn.functional.one_hot(replicas.index, before)
    return (chosen + noise) * sizes[:, None]


def mixed(expansion: Expansion, mixing: Mixing) -> dict[str, Tensor]:
    """The weights of the larger model."""
    wide = {name: widened(name, weight, mixing) for name, weight in expansion.old.items()}
    weights = {}
    for name in expansion.names:
        layer, place = place_of(name)
        if layer is None:
            weights[name] = wide[name]
        else:
            layers = [wide[in_layer(n, place)] for n in range(expansion.before.num_hidden_layers)]
            shares = mixing[f"depth.{place}"][layer]
            weights[name] = torch.tensordot(shares, torch.stack(layers), 1)
    return weights


def widened(name: str, weight: Tensor, mixing: Mixing) -> Tensor:
    layer, place = place_of(name)
    module = place.rpartition(".")[0]
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
