"""Attribution of a behavior to tokens: which ones it depends on.

    estimates = attribute(model, behavior)         # how much the loss rises without each token
    exact = ablate_each(model, behavior, strongest(estimates, 20))

With weight w, value v and the gradient g of the loss with respect to the layer's output, switching
a token off changes the loss by about -w (v . g), summed over all positions: gradient x weight. One
backward pass gives all tokens; ablation gives the exact change of one token per forward pass.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.token_usage import eval_mode, row_chunks
from tokenformer.interpret.behavior import Behavior
from tokenformer.interpret.intervention import intervene
from tokenformer.interpret.token_name import AnyToken, Token, check_tokens, named_layers
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.router import Router, routers


def attribute(
    model: PreTrainedModel, behavior: Behavior, layers: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Return by layer the estimated rise of the mean loss if each token is switched off, [n]."""
    wanted = named_layers(model, layers)
    sums = {
        name: torch.zeros(each.num_tokens, dtype=torch.float64) for name, each in wanted.items()
    }
    with eval_mode(model), active_share(model, None), torch.enable_grad():
        for part in behavior.batches():
            for name, (x, gradient) in output_gradients(model, wanted, part).items():
                sums[name] -= weighted(wanted[name], x, gradient)
    return {name: each / len(behavior) for name, each in sums.items()}


def output_gradients(
    model: PreTrainedModel, layers: dict[str, Pattention], behavior: Behavior
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the input of every layer and the gradient of the total loss by its output."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not output.requires_grad:  # all weights before it are frozen
            output.requires_grad_()
        seen[name] = inputs[0].detach(), output
        return output

    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_hook(lambda *args, name=name: record(name, *args))
            stack.callback(hook.remove)
        for router in routers(model):
            stack.callback(router.register_forward_hook(without_estimate).remove)
        loss = behavior.total_loss(model)
    gradients = torch.autograd.grad(loss, [output for _, output in seen.values()])
    return {
        name: (x, gradient)
        for (name, (x, _)), gradient in zip(seen.items(), gradients, strict=True)
    }


def without_estimate(
    router: Router, inputs: Any, found: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Drop the gates that are always 1: what passes through them is an estimate for training, not
    the gradient of the loss."""
    groups, gates = found
    return groups, gates if router.is_gated else None


@torch.no_grad()
def weighted(layer: Pattention, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the sum over all rows of weight * (value . gradient), [n]."""
    total = torch.zeros(layer.num_tokens, dtype=torch.float64)
    rows, slopes = row_chunks(layer, x), gradient.reshape(-1, layer.out_features)
    for part, slope in zip(rows, slopes.split([len(part) for part in rows]), strict=True):
        weights = layer.token_weights(part).weights
        effects = slope.to(weights.dtype) @ layer.value_tokens.to(weights.dtype).T  # [R, n]
        total += (weights * effects).sum(0).cpu().double()
    return total


def strongest(estimates: dict[str, Tensor], count: int) -> list[Token]:
    """Return the tokens with the largest estimates, over all layers."""
    flat = torch.cat(list(estimates.values()))
    tokens = [(name, n) for name, each in estimates.items() for n in range(len(each))]
    best = flat.argsort(descending=True, stable=True)[:count]
    return [Token(*tokens[row]) for row in best.tolist()]


def ablate_each(
    model: PreTrainedModel, behavior: Behavior, tokens: Iterable[AnyToken]
) -> dict[Token, float]:
    """Return the exact rise of the behavior's loss if each token alone is switched off, largest
    first."""
    with eval_mode(model):
        before = behavior.loss(model)
        rises = {}
        for token in check_tokens(named_layers(model), tokens):
            with intervene(model, off=[token]):
                rises[token] = behavior.loss(model) - before
    return dict(sorted(rises.items(), key=lambda each: -each[1]))
