"""Small trained models for growth tests, and measures of what growth changes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import tokenformer
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.parameter_mapping import match_dtype
from tokenformer.layers import Pattention
from tokenformer.layers.router import balance_routers

TEXT_LENGTH = 64
"""Tokens of a sequence of text."""


def trained_tokenformer(
    make_config: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Optimizer]:
    """Return a TokenFormer after some training steps, so that all weights differ from their
    initialization, and its optimizer. The reference backend trains it, so that the weights do not
    depend on the other backends."""
    torch.manual_seed(0)
    config = make_config("tokenformer", qkv_tokens=24, output_tokens=24, ffn_tokens=96, **options)
    model = tokenformer.TokenformerForCausalLM(config).to(dtype)
    layers = [module for module in model.modules() if isinstance(module, Pattention)]
    for layer in layers:
        layer.backend = "reference"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for _ in range(12):
        train_once(model, optimizer)
    for layer in layers:
        layer.backend = "auto"
    return model.eval(), optimizer


def trained_routed(
    make_config: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Optimizer]:
    """Return a routed TokenFormer after some steps, and its optimizer."""
    torch.manual_seed(0)
    sizes = {"qkv_tokens": 24, "output_tokens": 24, "ffn_tokens": 64}
    routing = {"group_size": 8, "active_groups": {"ffn": 3}, "routed_bias": True}
    config = make_config("tokenformer", **{**sizes, **routing, **options})
    model = tokenformer.TokenformerForCausalLM(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(12):
        train_once(model, optimizer)
        balance_routers(model)
    return model, optimizer


def trained_transformer(
    make_config: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Optimizer]:
    """Return a Transformer after some training steps, with weights that are large enough for every
    layer to matter, and its optimizer."""
    torch.manual_seed(0)
    config = make_config("transformer", **{"initializer_range": 0.2, **options})
    model = tokenformer.TransformerForCausalLM(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(12):
        train_once(model, optimizer)
    return model.eval(), optimizer


def train_once(model: Any, optimizer: Optimizer) -> None:
    tokens = torch.randint(20, (4, 24))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def logits(model: Any, tokens: Tensor | None = None) -> Tensor:
    tokens = torch.arange(40).view(2, 20) if tokens is None else tokens
    with torch.no_grad():
        result: Tensor = model(input_ids=tokens).logits
    return result


def relative_change(before: Tensor, after: Tensor) -> float:
    """Return the largest change relative to the largest entry."""
    return ((after - before).abs().max() / before.abs().max()).item()


def compute_gradients(model: Any) -> None:
    """Leave the gradients of one fixed batch in the parameters."""
    torch.manual_seed(1)
    ids = torch.randint(61, (4, 24))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()


def expected_gradient(model: Any, report: GrowthReport, name: str) -> Tensor | None:
    """Return the gradient of a grown parameter by its mapping; None for a new parameter."""
    mapping = report.mappings[name]
    if mapping.source is None:
        return None
    gradient = model.get_parameter(mapping.source).grad
    return mapping.gather(gradient) * match_dtype(mapping.gradient_scale, gradient)


def train_on_text(
    model: Any,
    tokens: Tensor,
    steps: int,
    rate: float = 3e-3,
    before_step: Callable[[int], None] | None = None,
) -> None:
    """Train on random sequences of `tokens`; `before_step` is called with each step number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for step in range(steps):
        if before_step:
            before_step(step)
        starts = torch.randint(len(tokens) - TEXT_LENGTH, (8,))
        batch = torch.stack([tokens[start : start + TEXT_LENGTH] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def evenly_spaced(tokens: Tensor, count: int) -> Tensor:
    """Return `count` sequences spread over `tokens`, [count, TEXT_LENGTH]."""
    starts = torch.linspace(0, len(tokens) - TEXT_LENGTH, count).long()
    return torch.stack([tokens[start : start + TEXT_LENGTH] for start in starts])
