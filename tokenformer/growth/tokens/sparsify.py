"""Sparsifying: a trained dense TokenFormer whose rows then visit a share of their tokens.

    sparse, report = tokenformer.sparsify(model, batches, active=0.25, group_size=32)

No token is dropped. In every chosen layer the tokens that fire together form groups
(`token_clusters`). A linear router is fitted by ridge regression to the logarithm of what each
group adds to the output of a row, sum_i (w_i |v_i|)^2. With theta l2_gelu the norm over all tokens
stays exact; for the other thetas the scale makes up for the share of the norm that the chosen
groups have on average. The mean of what is skipped becomes a bias of the layer.

`distill_steps` then train the sparse model to match the logits of the dense one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenformer.growth.model_from_tensors import ModelT, build_model
from tokenformer.growth.sparsity_report import SparseLayer, SparsityReport
from tokenformer.growth.tokens.sparse_distillation import divergence, mean_losses, train_to_match
from tokenformer.growth.tokens.thresholds import build_with_thresholds, layer_threshold
from tokenformer.growth.tokens.token_clusters import balanced_clusters
from tokenformer.growth.tokens.token_counts import (
    LayerProjection,
    check_projections,
    check_share,
    rows_by_layer,
    token_counts,
)
from tokenformer.growth.tokens.token_set import check_tokenformer, check_whole, token_layers
from tokenformer.growth.tokens.token_usage import (
    MASSES,
    observe_inputs,
    row_chunks,
    scores_and_weights,
)
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.router import Router
from tokenformer.models.accounting import active_parameters, count_parameters
from tokenformer.models.configuration import PROJECTIONS, TokenConfig
from tokenformer.models.seeds import named_seed
from tokenformer.ops.routed_pattention import group_mask

PROFILE_ROWS = 512
"""Rows that describe a token for clustering."""
MAX_ROWS = 8192
"""Rows per layer, of which three quarters fit the router and the rest measure the error."""
FIT_SHARE = 0.75
METHODS = ("routing", "threshold")
RIDGE = 1e-3
"""Penalty, relative to the mean of the diagonal."""


@dataclass(frozen=True)
class RoutedLayer:
    """The parts of a sparsified layer."""

    order: Tensor  # [n], of the tokens
    weight: Tensor  # [groups, d_in] of the router
    intercept: Tensor  # [groups]
    bias: Tensor  # [d_out]
    scale: float
    active_groups: int
    report: SparseLayer


def sparsify(
    model: ModelT,
    batches: Iterable[Tensor],
    active: float = 0.25,
    group_size: int = 32,
    *,
    method: str = "routing",
    projections: Sequence[str] = ("ffn",),
    held_out: Iterable[Tensor] | None = None,
    distill_steps: int = 0,
    learning_rate: float = 1e-4,
    seed: int = 0,
    on_progress: Callable[[str, int, int], None] = lambda description, done, total: None,
) -> tuple[ModelT, SparsityReport]:
    """Return a routed copy of a dense `model`, and a report.

    Args:
        model: a TokenFormer without routing; it is not changed.
        batches: token ids [B, T] or images [B, C, H, W] like those the model is used on.
        active: the share of the groups of every layer that a row visits, rounded up.
        group_size: tokens per group.
        method: `routing`, or `threshold`: every token that adds little to a row's output is skipped
            in this row (`thresholds`). This keeps the closest tokens and needs no router, but saves
            only the reading of values.
        projections: the projections to sparsify: any of q, k, v, o, ffn.
        held_out: batches to measure the loss on; by default `batches`.
        distill_steps: optimizer steps on `batches`, one batch each, after the conversion.
        learning_rate: of these steps, at its peak.
        seed: of the clusters.
        on_progress: called with a description, how much is done, and the total.

    The routers of the result are not balanced in later training (`balance_rate` is 0): tokens of a
    dense model are not equally useful.
    """
    check_tokenformer(model, "can be made sparse")
    check_whole(model)
    check_options(model.config, active, group_size, method, projections, distill_steps)
    batches = list(batches)
    measured = batches if held_out is None else list(held_out)
    layers = {
        name: (place, layer)
        for name, (place, layer) in token_layers(model).items()
        if place[0] in projections
    }
    inputs = collect_inputs(model, batches, list(layers))
    routed: dict[str, RoutedLayer] = {}
    thresholds: dict[str, float] = {}
    reports = []
    for done, (name, (_, layer)) in enumerate(layers.items()):
        on_progress("measuring layers", done, len(layers))
        fit, test = fit_and_test(name, inputs.pop(name))
        if method == "routing":
            routed[name] = route_layer(name, layer, fit, test, active, group_size, seed)
            reports.append(routed[name].report)
        else:
            thresholds[name], report = layer_threshold(name, layer, fit, test, active)
            reports.append(report)
    places = {name: place for name, (place, _) in layers.items()}
    if method == "routing":
        sparse = build_sparse(model, places, routed, group_size)
    else:
        sparse = build_with_thresholds(model, places, thresholds)
    if distill_steps:
        for step in train_to_match(sparse, model, batches, distill_steps, learning_rate):
            on_progress("distilling", step, distill_steps)
    before, after = (mean_losses(one, measured) for one in (model, sparse))
    config = sparse.config
    return sparse, SparsityReport(
        method,
        reports,
        group_size if method == "routing" else 1,
        sum(count_parameters(config).values()),
        sum(active_parameters(config).values()),
        before,
        after,
        divergence(sparse, model, measured),
        distill_steps,
    )


def check_options(
    config: TokenConfig,
    active: float,
    group_size: int,
    method: str,
    projections: Sequence[str],
    distill_steps: int,
) -> None:
    check_share("active", active)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    check_projections(projections)
    if distill_steps < 0:
        raise ValueError(f"distill_steps={distill_steps} must be at least 0")
    if config.token_rates is not None:
        raise ValueError(
            "token_rates is set: tokens that are frozen or learn more slowly would change places; "
            "set config.token_rates to None first"
        )
    fewest = min(
        config.tokens(name, layer)
        for name in projections
        for layer in range(config.num_hidden_layers)
    )
    if not 1 <= group_size <= fewest:
        raise ValueError(
            f"group_size={group_size} must be from 1 to {fewest}, the fewest tokens of a layer"
        )


def collect_inputs(
    model: Any, batches: Sequence[Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return evenly spaced input rows [R, d_in] of the layers, R at most `MAX_ROWS`."""
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    per_batch = -(-MAX_ROWS // max(1, len(batches)))

    def observer(name: str) -> Callable[[Tensor], None]:
        def observe(x: Tensor) -> None:
            flat = x.detach().reshape(-1, x.shape[-1])
            rows[name].append(flat[:: max(1, len(flat) // per_batch)])

        return observe

    observe_inputs(model, batches, {name: observer(name) for name in names})
    return {name: torch.cat(parts)[:MAX_ROWS] for name, parts in rows.items()}


def fit_and_test(name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split the rows of a layer into those to fit to and those to measure on."""
    fitted = round(FIT_SHARE * len(rows))
    if not 0 < fitted < len(rows):
        raise ValueError(f"batches give {len(rows)} rows for {name}; give more data")
    return rows[:fitted], rows[fitted:]


@torch.no_grad()
def route_layer(
    name: str,
    layer: Pattention,
    fit: Tensor,
    test: Tensor,
    active: float,
    group_size: int,
    seed: int,
) -> RoutedLayer:
    """Group the tokens of a layer and fit its router, bias and scale to rows `fit` [R, d_in];
    measure on rows `test`."""
    profiles = additions(layer, fit[:: max(1, len(fit) // PROFILE_ROWS)][:PROFILE_ROWS])
    order = balanced_clusters(
        (profiles - profiles.mean(0)).T, group_size, seed=named_seed(seed, name)
    )
    groups = -(-layer.num_tokens // group_size)
    count = max(1, math.ceil(round(active * groups, 9)))  # 0.07 x 100 is 7.000000000000001
    strengths = group_strengths(layer, fit, order, group_size)
    weight, intercept = fit_router(fit, strengths)
    keys, values = layer.key_tokens[order], layer.value_tokens[order]

    def chosen(x: Tensor) -> Tensor:
        scores = Router.normalized(x) @ weight.T + intercept
        return group_mask(scores.topk(count).indices, layer.num_tokens, group_size)

    def oracle(x: Tensor) -> Tensor:
        best = group_strengths(layer, x, order, group_size).topk(count).indices
        return group_mask(best, layer.num_tokens, group_size)

    def skipped(x: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What the chosen groups miss [R, d_out], and the whole output."""
        parts = []
        for some in row_chunks(layer, x):
            _, weights = scores_and_weights(layer, some, keys, layer.scale_tokens)
            whole = weights @ values.to(weights)
            parts.append((whole - (weights * choose(some)) @ values.to(weights), whole))
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    bias = skipped(fit, chosen)[0].mean(0)
    missing, whole = skipped(test, chosen)
    best = skipped(test, oracle)[0]
    best = best - best.mean(0)
    length = whole.norm().clamp_min(torch.finfo(whole.dtype).tiny)
    report = SparseLayer(
        name,
        layer.num_tokens,
        groups,
        count,
        ((missing - bias).norm() / length).item(),
        (best.norm() / length).item(),
    )
    scale = float(layer.scale_tokens)
    if layer.theta != "l2_gelu":
        scale *= chosen_share(layer, fit, keys, chosen) * layer.num_tokens
        scale /= min(layer.num_tokens, count * group_size)
    return RoutedLayer(order, weight, intercept, bias, scale, count, report)


def additions(layer: Pattention, rows: Tensor) -> Tensor:
    """Return |w_i| |v_i| [R, n]: how much every token adds to the output of every row."""
    _, weights = scores_and_weights(layer, rows, layer.key_tokens, layer.scale_tokens)
    return weights.abs() * layer.value_tokens.norm(dim=1).to(weights)


def group_strengths(layer: Pattention, rows: Tensor, order: Tensor, group_size: int) -> Tensor:
    """Return the logarithm of sum_i (w_i |v_i|)^2 over every group, [R, groups]."""
    parts = []
    for some in row_chunks(layer, rows):
        squares = additions(layer, some)[:, order].square()
        padding = -squares.shape[1] % group_size
        squares = torch.nn.functional.pad(squares, (0, padding))
        parts.append(squares.unflatten(1, (-1, group_size)).sum(-1))
    energy = torch.cat(parts)
    return energy.clamp_min(1e-6 * energy.mean()).log()


def fit_router(rows: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [groups, d_in] and intercept [groups] by ridge regression."""
    normalized = Router.normalized(rows)
    inputs = normalized.double()
    center, middle = inputs.mean(0), strengths.double().mean(0)
    inputs = inputs - center
    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * gram.diagonal().mean().clamp_min(1e-12))
    weight = torch.linalg.solve(gram, inputs.T @ (strengths.double() - middle)).T
    return weight.to(normalized), (middle - weight @ center).to(normalized)


def chosen_share(
    layer: Pattention, rows: Tensor, keys: Tensor, chosen: Callable[[Tensor], Tensor]
) -> float:
    """Return the mean share of the chosen tokens in the norm; see `token_usage`."""
    shares = []
    for some in row_chunks(layer, rows):
        scores, weights = scores_and_weights(layer, some, keys, layer.scale_tokens)
        mass = MASSES[layer.theta].of_scores(scores, weights)
        total = mass.sum(1).clamp_min(torch.finfo(mass.dtype).tiny)
        shares.append((mass * chosen(some)).sum(1) / total)
    return max(torch.cat(shares).mean().item(), 1e-6)  # a scale is positive


@torch.no_grad()
def build_sparse(
    model: ModelT,
    places: dict[str, LayerProjection],
    found: dict[str, RoutedLayer],
    group_size: int,
) -> ModelT:
    """Return the routed model; its tensors are copies."""
    before: TokenConfig = model.config
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    groups: dict[str, list[int]] = {place[0]: [] for place in places.values()}
    scales = {
        name: [before.scale(name, layer) for layer in range(before.num_hidden_layers)]
        for name in PROJECTIONS
    }
    ages = {place: before.ages(*place) for place in token_counts(before)}
    for name, (projection, number) in places.items():
        layer, device = found[name], model.device
        old = ages[projection, number]
        ages[projection, number] = [old[row] for row in layer.order.tolist()]
        for kind in ("key_tokens", "value_tokens"):
            tensors[f"{name}.{kind}"] = tensors[f"{name}.{kind}"][layer.order]
        like = tensors[f"{name}.key_tokens"]
        tensors[f"{name}.router.weight"] = layer.weight.to(like)
        tensors[f"{name}.router.bias"] = layer.intercept.to(device)  # fp32 or wider
        tensors[f"{name}.bias"] = layer.bias.to(like)
        groups[projection].append(layer.active_groups)
        scales[projection][number] = layer.scale
        if before.learned_scale:
            tensors[f"{name}.scale_tokens"].fill_(layer.scale)
    config = type(before).from_dict(
        {
            **before.to_dict(),
            "active_groups": groups,
            "group_size": group_size,
            "router": "learned",
            "theta_norm": "all" if before.theta == "l2_gelu" else "chosen",
            "balance_rate": 0.0,
            "routed_bias": True,
            "scale_tokens": scales,
            "token_ages": rows_by_layer(ages, before.num_hidden_layers, usual=0),
        }
    )
    return build_model(type(model), config, tensors).train(model.training)
