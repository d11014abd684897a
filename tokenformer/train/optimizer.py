"""AdamW with parameter groups: weight decay on matrices only, learning rates by name and tokens."""

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokenformer.layers.pattention import Pattention
from tokenformer.layers.router import LearnedRouter
from tokenformer.train.options import OptimizerOptions
from tokenformer.train.parallel.mesh import group_by_mesh, mesh_of

ROUTER_RATE = 0.25
"""Factor on the learning rate of routers under the rate law. Of 1, 0.25 and 0.1 it ends lowest
(byte models, width 128, 4 of 16 groups active)."""


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Return the optimizer of `model`. `set_rate` multiplies the learning rate by each group's
    `rate_factor`.

    Frozen parameters get no gradient and no weight decay.
    """
    groups: dict[tuple[float, bool, Any], list[nn.Parameter]] = {}
    freeze(model, options)
    factors = first_scales(model) | token_factors(model, options)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = rate_of(name, options) * factors.get(name, 1.0)
            kind = (rate, parameter.ndim >= 2, mesh_of(parameter))
            groups.setdefault(kind, []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": options.weight_decay if is_matrix else 0.0,
                "rate_factor": rate,
            }
            for (rate, is_matrix, _), parameters in groups.items()
        ],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )


def freeze(model: nn.Module, options: OptimizerOptions) -> None:
    """Freeze the parameters of rate 0. DDP waits for the gradients of all others, so they must be
    frozen before it wraps the model."""
    check_rates(model, options)
    for name, parameter in model.named_parameters():
        if rate_of(name, options) == 0:
            parameter.requires_grad_(False)


def check_rates(model: nn.Module, options: OptimizerOptions) -> None:
    """Raise if a pattern matches no parameter, or if no parameter would be trained."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in options.rates:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"rates: no parameter matches {pattern!r}; one is called {names[-1]}")
    if not any(rate_of(name, options) > 0 for name in names):
        raise ValueError(f"rates={options.rates} freeze every parameter; leave one to train")


def first_scales(model: nn.Module) -> dict[str, float]:
    """Return the initial values of learned scales, as factors on their learning rate: AdamW moves
    every number by about the rate, but a scale is in the hundreds or thousands."""
    return {
        f"{prefix}scale_tokens": layer.initial_scale
        for prefix, layer in pattention_layers(model)
        if isinstance(layer.scale_tokens, nn.Parameter)
    }


def token_factors(model: nn.Module, options: OptimizerOptions) -> dict[str, float]:
    """Return the factors of the rate law by parameter name.

    AdamW moves every number by about the rate. All values of a layer with n tokens move its output
    together, by n times the rate; its keys move it in random directions, by sqrt(n) times the rate.
    Of a routed layer, n is the number of tokens that a row attends to; its router, whose steps send
    rows to other groups, has a factor of its own.
    """
    if options.rate_law == "none":
        return {}
    factors: dict[str, float] = {}
    for prefix, layer in pattention_layers(model):
        ratio = options.reference_tokens / layer.tokens_per_row
        factors |= {f"{prefix}value_tokens": ratio, f"{prefix}key_tokens": math.sqrt(ratio)}
    for name, module in model.named_modules():
        if isinstance(module, LearnedRouter):
            factors[f"{name}.weight"] = ROUTER_RATE
    return factors


def pattention_layers(model: nn.Module) -> Iterator[tuple[str, Pattention]]:
    """Yield every Pattention layer with the prefix of its parameters' names."""
    for name, module in model.named_modules():
        if isinstance(module, Pattention):
            yield f"{name}." if name else "", module


def rate_of(name: str, options: OptimizerOptions) -> float:
    factor = 1.0
    for pattern, rate in options.rates.items():
        if fnmatchcase(name, pattern):
            factor = rate
    return factor


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_factor"]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Clip the global gradient norm to `limit`; return the norm before."""
    groups = group_by_mesh(p for p in parameters if p.grad is not None)
    norms = []
    for group in groups:
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    whole: Tensor = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, whole)
    return whole.item()
