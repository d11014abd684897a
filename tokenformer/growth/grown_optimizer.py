"""The optimizer of a grown model, with the state of the old entries.

`keep` gives new entries zero moments. With Adam's step count kept, their first update is (1 - b1) /
sqrt(1 - b2) times the learning rate: 0.45 at b2 = 0.95, 3.2 at 0.999. `mean` gives new entries the
mean second moment of the old ones, which makes their first updates small. `reset` drops all state,
as the authors' code does.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tokenformer.growth.growth_report import GrowthReport, without_layer_number
from tokenformer.growth.parameter_mapping import ParameterMapping, match_dtype

STATES = ("keep", "mean", "reset")
SQUARED = "sq"
"""Marks a state tensor of squared gradients, such as `exp_avg_sq`."""


def grow_optimizer(optimizer: Optimizer, report: GrowthReport, state: str = "keep") -> Optimizer:
    """Return an optimizer for the grown model, with the same groups, options and state.

    Args:
        optimizer: the optimizer of the model before growth.
        report: the report of a growth in memory.
        state: `keep` keeps the moments of old entries and gives new ones zero; `mean` gives new
            entries the mean second moment of the old; `reset` starts with empty state.
    """
    check_state(state)
    if not report.new:
        raise ValueError(
            "the report holds no parameters, as after growth on disk; "
            "give the report of tokenformer.grow"
        )
    names = {id(parameter): name for name, parameter in report.old.items()}
    group_of: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "in the model that grew"
                )
            group_of[names[id(parameter)]] = index
    groups: list[dict[str, Any]] = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": []}
        for group in optimizer.param_groups
    ]
    kinds = {without_layer_number(name): index for name, index in group_of.items()}
    ungrouped = []
    for name, parameter in report.new.items():
        source, kind = report.mappings[name].source, without_layer_number(name)
        if source in group_of:
            groups[group_of[source]]["params"].append(parameter)
        elif source is None and kind in kinds:  # such as a matrix of a new layer
            groups[kinds[kind]]["params"].append(parameter)
        elif source is None:
            ungrouped.append(parameter)
    if ungrouped:  # such as learned scales: no weight decay
        groups.append({**groups[0], "params": ungrouped, "weight_decay": 0.0})
    accepted = signature(type(optimizer)).parameters  # AdamW's defaults hold more than it accepts
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    grown = type(optimizer)(groups, **defaults)
    if state == "reset":
        return grown
    for name, parameter in report.new.items():
        mapping = report.mappings[name]
        if mapping.source is None or mapping.source not in group_of:
            continue
        old = report.old[mapping.source]
        if old_state := optimizer.state.get(old):
            grown.state[parameter] = {
                key: grow_moment(key, value, old, parameter, mapping, state)
                for key, value in old_state.items()
            }
    return grown


def check_state(state: str) -> None:
    if state not in STATES:
        raise ValueError(f"state={state!r} is unknown; choose one of {', '.join(STATES)}")


@torch.no_grad()
def grow_moment(
    key: str, value: Any, old: Tensor, new: Tensor, mapping: ParameterMapping, state: str
) -> Any:
    """Return one entry of a parameter's state, such as `exp_avg_sq`, for the grown parameter."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != old.shape or value.ndim == 0:  # the step count
        return value.clone()
    power = 2 if SQUARED in key else 1
    moved = mapping.gather(value) * match_dtype(mapping.gradient_scale, value) ** power
    if state == "mean" and power == 2:
        new_entries = mapping.is_new(moved.shape, moved.device)
        # The mean over the old rows, per column, is the best guess for a new token.
        average = value.mean(0, keepdim=True) if mapping.columns is None else value.mean()
        moved = torch.where(new_entries, average, moved)
    assert moved.shape == new.shape
    return moved


@torch.no_grad()
def grow_average(average: Tensor, old: Tensor, new: Tensor, mapping: ParameterMapping) -> Tensor:
    """Return the moving average of a grown parameter. Old entries keep their distance from the
    weights; new entries start at the weights."""
    return new.detach() + mapping.apply(average - old)
