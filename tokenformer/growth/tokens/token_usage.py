"""Statistics of each token on data: its contribution to the output and its share of the norm.

Both are means over the input rows of a layer, with w_i the weight that theta gives token i:

    contribution   E[ w_i^2 ] ||v_i||^2         mean square of what the token adds to the output
    share          E[ m_i / sum_j m_j ]         its share of the norm that divides the scores

The mass m_i is A_i^2 for l2_gelu, gelu(A_i)^2 for gelu_l2, |A_i| for l1_gelu and exp(A_i) for
softmax. Every theta divides by a power of the total mass and multiplies by the same power of the
scale s. So a subset of the tokens with the share r keeps its weights at the scale r s. Shares add
up, so one pass over the data is enough for any subset.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.model_inputs import INPUT_KINDS, check_batch, run_model, to_device
from tokenformer.growth.tokens.prefix import active_share
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.layers.pattention import Pattention
from tokenformer.ops.theta import THETAS, accumulation_dtype

MAX_SCORES = 1 << 22
"""Scores in memory at once, rows times tokens."""


class Mass(NamedTuple):
    """A token's term in the norm of one theta, without theta's eps."""

    of_scores: Callable[[Tensor, Tensor], Tensor]
    """From scores [R, n] and weights [R, n]."""
    of_keys: Callable[[Tensor], Tensor]
    """From keys [n, d]: the mean over isotropic inputs, up to a factor. With softmax a zero key has
    mass too, and all tokens count the same."""


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
    """Statistics of the tokens of one layer."""

    contribution: Tensor  # [n], float64
    share: Tensor  # [n], float64, sums to 1


class UsageSums:
    """Running sums over the input rows of one layer."""

    def __init__(self, module: Pattention) -> None:
        self.module = module
        self.squares = torch.zeros(module.num_tokens, dtype=torch.float64)
        self.shares = torch.zeros(module.num_tokens, dtype=torch.float64)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        layer = self.module
        for rows in row_chunks(layer, x):
            scores, weights = scores_and_weights(layer, rows, layer.key_tokens, layer.scale_tokens)
            mass = MASSES[layer.theta].of_scores(scores, weights)  # [R, n]
            total = mass.sum(-1, keepdim=True)  # [R, 1]
            # A row whose scores are all zero has no shares.
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


def row_chunks(layer: Pattention, x: Tensor) -> tuple[Tensor, ...]:
    """Split x into rows [R, d] whose scores fit in `MAX_SCORES`."""
    rows = x.reshape(-1, layer.in_features)
    return rows.split(max(1, MAX_SCORES // layer.num_tokens))


def scores_and_weights(
    layer: Pattention, rows: Tensor, keys: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scores and weights [R, n] of `keys` in this layer, in fp32 or wider."""
    wide = accumulation_dtype(keys.dtype)
    scores = rows.to(wide) @ keys.to(wide).T
    return scores, THETAS[layer.theta](scores, scale, layer.approximate, layer.eps)


def token_statistics(
    model: PreTrainedModel, batches: Iterable[Tensor]
) -> dict[str, TokenStatistics]:
    """Return the statistics of every Pattention layer by name, over batches of model inputs."""
    sums = {name: UsageSums(module) for name, (_, module) in token_layers(model).items()}
    observe_inputs(model, batches, {name: layer.add for name, layer in sums.items()})
    return {name: layer.result() for name, layer in sums.items()}


def kept_share(share: Tensor, rows: Tensor) -> float:
    """Return the share of the norm of these rows; exactly 1 if the others have none."""
    dropped = torch.ones(len(share), dtype=torch.bool)
    dropped[rows] = False
    held, lost = share[rows].sum().item(), share[dropped].sum().item()
    return held / (held + lost) if held > 0 else 1.0  # a scale is positive


def rows_to_keep(count: int, idle: Tensor, contribution: Tensor | None = None) -> Tensor:
    """Return the `count` rows with the largest contribution, idle ones last, in their old order.
    Ties keep the first rows."""
    rank = torch.zeros(len(idle), dtype=torch.float64)
    if contribution is not None:
        rank = contribution.clone()
    rank[idle] = -1.0
    return rank.argsort(descending=True, stable=True)[:count].sort().values


def idle_tokens(module: Pattention) -> Tensor:
    """Return a mask [n] of the tokens that can be dropped without changing the output."""
    if module.theta == "softmax":  # a zero key still has the weight exp(0)
        return torch.zeros(module.num_tokens, dtype=torch.bool)
    return (module.key_tokens == 0).all(1).cpu()


@torch.no_grad()
def observe_inputs(
    model: PreTrainedModel,
    batches: Iterable[Any],
    observers: Mapping[str, Callable[..., None]],
) -> None:
    """Run the model on `batches` and call each observer with the inputs of the named layer: the
    rows and, in a joint model, their modalities."""
    count = 0
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(active_share(model, None))
        for name, observer in observers.items():
            hook = model.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, observer=observer: observer(*inputs)
            )
            stack.callback(hook.remove)
        for batch in batches:
            check_batch(model, batch)
            run_model(model.base_model, to_device(batch, model.device))
            count += 1
    if not count:
        kind = INPUT_KINDS[model.main_input_name]
        raise ValueError(f"batches is empty; give at least one tensor of {kind}")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within a `with` block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
