"""Interventions: switch parameter tokens off, scale them, or pin their weight.

    with intervene(model, off=["3.ffn.17"], scale={"0.q.2": 0.5}, pin={"1.o.4": 2.0}):
        model.generate(...)

    edited = edit(model, off=["3.ffn.17"])              # a copy, to save, evaluate or serve
    effect(model, lambda m: behavior.loss(m), off=["3.ffn.17"])

A token's weight becomes zero, a multiple of what it would be, or a constant at every position. Its
key stays in the norm, so the weights of all other tokens of the layer stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.model_from_tensors import ModelT
from tokenformer.interpret.token_name import AnyToken, check_tokens, named_layers
from tokenformer.layers.pattention import Pattention

T = TypeVar("T")


@dataclass(frozen=True)
class Effect(Generic[T]):
    """A measurement without and with an intervention."""

    before: T
    after: T

    @property
    def change(self) -> Any:
        """after - before; only of numbers."""
        return self.after - self.before  # type: ignore[operator]


@contextmanager
def intervene(
    model: PreTrainedModel,
    *,
    off: Iterable[AnyToken] = (),
    scale: Mapping[AnyToken, float] | None = None,
    pin: Mapping[AnyToken, float] | None = None,
) -> Iterator[None]:
    """Change the weights of tokens within a `with` block. The model is restored bit for bit.

    Values are scaled in place, so every backend and `generate` at full speed see the change; do not
    train or save the model within the block. Blocks may be nested.

    Args:
        model: a TokenFormer.
        off: tokens whose weight becomes zero.
        scale: factors on the weights of tokens.
        pin: constant weights of tokens, at every position of every input.
    """
    layers = named_layers(model)
    factors, pinned = plan(layers, off, scale or {}, pin or {})
    with ExitStack() as stack:
        for name, of_layer in pinned.items():
            stack.enter_context(added_constant(layers[name], of_layer))
        for name, of_layer in factors.items():
            stack.enter_context(scaled_values(layers[name], of_layer))
        yield


def plan(
    layers: dict[str, Pattention],
    off: Iterable[AnyToken],
    scale: Mapping[AnyToken, float],
    pin: Mapping[AnyToken, float],
) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """Return the factors on values and the pinned weights, by layer and token."""
    wanted: list[tuple[AnyToken, float, float | None]] = [
        *((token, 0.0, None) for token in off),
        *((token, float(factor), None) for token, factor in scale.items()),
        *((token, 0.0, float(weight)) for token, weight in pin.items()),
    ]
    factors: dict[str, dict[int, float]] = {}
    pinned: dict[str, dict[int, float]] = {}
    for name, factor, weight in wanted:
        (token,) = check_tokens(layers, [name])
        if token.number in factors.setdefault(token.layer, {}):
            raise ValueError(f"token {token} is given twice; use one of off, scale and pin")
        factors[token.layer][token.number] = factor
        if weight is not None:
            pinned.setdefault(token.layer, {})[token.number] = weight
    return factors, pinned


@contextmanager
def scaled_values(layer: Pattention, factors: dict[int, float]) -> Iterator[None]:
    rows, values = torch.tensor(list(factors)), layer.value_tokens
    with torch.no_grad():
        before = values[rows].clone()
        values[rows] = before * before.new_tensor(list(factors.values()))[:, None]
    try:
        yield
    finally:
        with torch.no_grad():
            values[rows] = before


class Pins(NamedTuple):
    """Tokens of a layer whose weight is a constant."""

    tokens: list[int]
    weights: Tensor  # [k]
    values: Tensor  # [k, d_out], of which the layer has zeros meanwhile


PINS = WeakKeyDictionary[Pattention, list[Pins]]()
"""By layer, the outermost block first."""


@contextmanager
def added_constant(layer: Pattention, weights: dict[int, float]) -> Iterator[None]:
    """Add weight * value of some tokens to every output of a layer."""
    values = layer.value_tokens.detach()[list(weights)]
    pins = Pins(list(weights), values.new_tensor(list(weights.values())), values)
    constant = pins.weights @ values  # [d_out]

    def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + constant

    handle = layer.register_forward_hook(add)
    PINS.setdefault(layer, []).append(pins)
    try:
        yield
    finally:
        PINS[layer].pop()
        handle.remove()


def with_pins(layer: Pattention, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights [..., n] and values [n, d_out] of a layer with those of pinned tokens."""
    for pins in reversed(PINS.get(layer, [])):  # within another pin, the value is zero
        at = torch.tensor(pins.tokens, device=weights.device)
        pinned = pins.weights.to(weights.dtype).expand(*weights.shape[:-1], -1)
        weights = weights.index_copy(-1, at, pinned)
        values = values.index_copy(0, at, pins.values.to(values.dtype))
    return weights, values


@torch.no_grad()
def edit(
    model: ModelT,
    *,
    off: Iterable[AnyToken] = (),
    scale: Mapping[AnyToken, float] | None = None,
    pin: Mapping[AnyToken, float] | None = None,
) -> ModelT:
    """Return a copy of the model with the weights of tokens changed for good.

    It is an ordinary model of the same shape, which can be saved, evaluated, served and trained on.
    A layer has no bias, so a pinned weight cannot be written into its tokens: `pin` is refused.
    """
    if pin:
        raise ValueError(
            "pin cannot be made permanent: a layer without a bias has no place for a constant; "
            "use off or scale, or `intervene`"
        )
    layers = named_layers(model)
    factors, _ = plan(layers, off, scale or {}, {})
    edited = deepcopy(model)
    for name, layer in named_layers(edited).items():
        for row, factor in factors.get(name, {}).items():
            layer.value_tokens[row] *= factor
    return edited


def effect(
    model: PreTrainedModel, measure: Callable[[PreTrainedModel], T], **intervention: Any
) -> Effect[T]:
    """Return what `measure(model)` gives without and with an intervention: a loss, an accuracy, a
    continuation. The other arguments are those of `intervene`."""
    before = measure(model)
    with intervene(model, **intervention):
        return Effect(before, measure(model))


def continue_text(model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int = 40) -> str:
    """Return the greedy continuation of a prompt: a measure for `effect`."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
