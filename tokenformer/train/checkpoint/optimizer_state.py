"""Optimizer state by parameter name, independent of wrappers and of the number of ranks.

Tensors are named "optimizer.<parameter>.<key>". Hyperparameters and other Python scalars are stored
as JSON (`read_groups`): torch's safetensors storage cannot read a file with scalars.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tokenformer.errors import CheckpointError
from tokenformer.train.checkpoint.tensors import plain_name, unwrap

# These only choose an implementation: the current optimizer keeps its own.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
Groups = list[dict[str, Any]]


def optimizer_parameters(model: nn.Module, optimizer: Optimizer) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each optimizer group, by their names in the model."""
    names = {id(p): plain_name(name) for name, p in unwrap(model).named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            shape = tuple(unknown[0].shape)
            raise CheckpointError(
                f"the optimizer holds a parameter of shape {shape} that is not the model's; "
                "create the optimizer after the model is wrapped"
            )
        groups.append({names[id(p)]: p for p in group["params"]})
    return groups


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{key}": value.detach()
        for group in optimizer_parameters(model, optimizer)
        for name, parameter in group.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def read_groups(model: nn.Module, optimizer: Optimizer) -> Groups:
    """Return the hyperparameters and non-tensor state of each group, as JSON values."""
    groups = []
    for named, group in zip(
        optimizer_parameters(model, optimizer), optimizer.param_groups, strict=True
    ):
        options = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params" and key not in IMPLEMENTATION
        }
        scalars = {
            name: {
                key: value
                for key, value in optimizer.state.get(parameter, {}).items()
                if not isinstance(value, Tensor)
            }
            for name, parameter in named.items()
        }
        groups.append(
            {
                "parameters": list(named),
                "options": options,
                "state": {name: values for name, values in scalars.items() if values},
            }
        )
    return groups


def match_groups(
    model: nn.Module, optimizer: Optimizer, saved: Groups, *, hyperparameters: bool = True
) -> Groups:
    """Return the saved group of each optimizer group. With `hyperparameters=False` an optimizer
    group may combine saved groups that differ in nothing else."""
    places = {name: index for index, group in enumerate(saved) for name in group["parameters"]}
    named_groups = optimizer_parameters(model, optimizer)
    matched = []
    for index, named in enumerate(named_groups):
        unknown = [name for name in named if name not in places]
        if unknown:
            raise CheckpointError(f"it has no optimizer state for {unknown[0]}")
        homes = sorted({places.pop(name) for name in named})
        options = [saved[home]["options"] for home in homes if hyperparameters] or [{}]
        if any(other != options[0] for other in options):
            raise CheckpointError(
                f"group {index} of the optimizer mixes parameters of the saved groups {homes}"
            )
        # Groups that differ only in the mesh of their parameters are one group on other ranks.
        state = {name: kept for home in homes for name, kept in saved[home]["state"].items()}
        matched.append({"options": options[0], "state": state})
    if places:
        raise CheckpointError(
            f"its optimizer state for {min(places)} has no place in the optimizer"
        )
    return matched


def optimizer_targets(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Return a tensor to load each saved one into: the optimizer's own, if it fits."""
    targets = {}
    for named, group in zip(
        optimizer_parameters(model, optimizer), optimizer.param_groups, strict=True
    ):
        for full_name, wanted in saved.items():
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            if name not in named:
                continue
            parameter, dtype = named[name], wanted.properties.dtype
            present = optimizer.state.get(parameter, {}).get(key)
            if (
                isinstance(present, Tensor)
                and present.shape == wanted.size
                and present.dtype == dtype
            ):
                targets[full_name] = present.detach()
            elif isinstance(parameter, DTensor) and parameter.shape == wanted.size:
                targets[full_name] = torch.zeros_like(parameter.detach(), dtype=dtype)
            else:
                # As in torch, the step count is on the CPU unless a fused kernel reads it.
                on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
                device = "cpu" if on_cpu else parameter.device
                targets[full_name] = torch.zeros(wanted.size, dtype=dtype, device=device)
    return targets


def fill_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], groups: Groups
) -> None:
    """Replace the optimizer's state and hyperparameters."""
    states: dict[str, dict[str, Any]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
        states.setdefault(name, {})[key] = tensor
    for named, group, saved in zip(
        optimizer_parameters(model, optimizer), optimizer.param_groups, groups, strict=True
    ):
        for name, parameter in named.items():
            optimizer.state.pop(parameter, None)
            state = {**states.get(name, {}), **saved["state"].get(name, {})}
            if state:
                optimizer.state[parameter] = state
        for key, value in saved["options"].items():
            present = group.get(key)
            if isinstance(present, Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
