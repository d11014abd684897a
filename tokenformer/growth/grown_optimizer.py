"""The optimizer of a model that has grown: what it knew of the old entries, and what of the new.

Kept as it is, Adam's step count with zero moments makes the first update of a new entry (1 - b1) /
sqrt(1 - b2) times the rate: 0.45 at b2 = 0.95, 3.2 at 0.999. `mean` gives new entries the second
moment that the old ones have on average, so that they begin as slowly as an old entry whose
gradient has just turned; `reset` forgets everything, as the authors' code does.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tokenformer.growth.growth_report import GrowthReport, kind_of
from tokenformer.growth.origin import Origin, like

STATES = ("keep", "mean", "reset")
SQUARED = "sq"
"""In the name of a state tensor: it is of squared gradients."""


def grow_optimizer(optimizer: Optimizer, report: GrowthReport, state: str = "keep") -> Optimizer:
    """The same optimizer for the grown model: its groups, their options, and its state.

    Args:
        optimizer: of the model before growth.
        report: of that growth, from memory.
        state: `keep`: moments of old entries kept, of new ones zero; `mean`: those of new ones the
            mean second moment of the old; `reset`: all fresh.
    """
    check_state(state)
    if not report.new:
        raise ValueError("the report has no parameters: it is of a growth on disk")
    names = {id(parameter): name for name, parameter in report.old.items()}
    homes: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not of the model that grew"
                )
            homes[names[id(parameter)]] = index
    groups: list[dict[str, Any]] = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": []}
        for group in optimizer.param_groups
    ]
    kinds = {kind_of(name): index for name, index in homes.items()}
    strangers = []
    for name, parameter in report.new.items():
        source, kind = report.origins[name].name, kind_of(name)
        if source in homes:
            groups[homes[source]]["params"].append(parameter)
        elif source is None and kind in kinds:  # such as a matrix of a new layer
            groups[kinds[kind]]["params"].append(parameter)
        elif source is None:
            strangers.append(parameter)
    if strangers:  # numbers that are no matrices: no decay
        groups.append({**groups[0], "params": strangers, "weight_decay": 0.0})
    accepted = signature(type(optimizer)).parameters  # AdamW notes more than it takes
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    grown = type(optimizer)(groups, **defaults)
    if state == "reset":
        return grown
    for name, parameter in report.new.items():
        origin = report.origins[name]
        if origin.name is None or origin.name not in homes:
            continue
        old = report.old[origin.name]
        if known := optimizer.state.get(old):
            grown.state[parameter] = {
                key: grow_moment(key, value, old, parameter, origin, state)
                for key, value in known.items()
            }
    return grown


def check_state(state: str) -> None:
    if state not in STATES:
        raise ValueError(f"state={state!r} is unknown; choose one of {', '.join(STATES)}")


@torch.no_grad()
def grow_moment(key: str, value: Any, old: Tensor, new: Tensor, origin: Origin, state: str) -> Any:
    """One entry of a parameter's state, such as `exp_avg_sq`."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != old.shape or value.ndim == 0:  # the step count
        return value.clone()
    power = 2 if SQUARED in key else 1
    moved = origin.moved(value) * like(origin.gradient_scale, value) ** power
    if state == "mean" and power == 2:
        fresh = origin.is_new(moved.shape, moved.device)
        # A column's mean over the old rows: what a token that knows nothing yet would have seen.
        average = value.mean(0, keepdim=True) if origin.columns is None else value.mean()
        moved = torch.where(fresh, average, moved)
    assert moved.shape == new.shape
    return moved


@torch.no_grad()
def grow_average(average: Tensor, old: Tensor, new: Tensor, origin: Origin) -> Tensor:
    """A moving average of an old parameter's weights, for the new one: it lags behind the new
    weights as it did behind the old, and not at all where they are fresh."""
    return new.detach() + origin.scaled(average - old)
