"""Grow a model by `GrowthOptions`, which a stage of a recipe and `tokenformer grow` share.

A TokenFormer grows by its tokens, a Transformer by `options.method`; here is where that is decided.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tokenformer.growth.grow import grow
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_folder import grow_folder, grow_transformer_folder
from tokenformer.growth.tokens.token_counts import config_with_tokens, target_token_counts
from tokenformer.models.block_configuration import BlockConfig
from tokenformer.models.configuration import TokenConfig, TransformerConfig
from tokenformer.models.loading import load_config
from tokenformer.paths import is_local
from tokenformer.train.options import GrowthOptions
from tokenformer.train.stages import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIGO = "ligo"


def grow_model(
    model: "PreTrainedModel", options: GrowthOptions, batches: Iterable[Tensor] | None = None
) -> tuple["PreTrainedModel", GrowthReport]:
    """Return a larger model and a report. LiGO learns on `batches` of token ids [B, T]."""
    to = target(options.to, model.config)
    arguments = growth_arguments(model.config, options, batches)
    return grow(model, to, method=options.method, **arguments)


def grow_model_folder(
    source: Path,
    out: Path,
    options: GrowthOptions,
    batches: Iterable[Tensor] | None = None,
    *,
    verify: bool = True,
) -> GrowthReport:
    """Grow the model in folder `source` into folder `out`; `verify=False` skips the checksums."""
    config = load_config(str(source))
    to = target(options.to, config)
    arguments = {**growth_arguments(config, options, batches), "verify": verify}
    if isinstance(config, TokenConfig):
        return grow_folder(source, out, to, **arguments)
    if isinstance(config, TransformerConfig):
        method = options.method or "net2net"
        return grow_transformer_folder(source, out, to, method=method, **arguments)
    raise ValueError(
        f"{source} holds a model of another kind, {config.model_type}; a TokenFormer or a "
        "Transformer language model can grow"
    )


def growth_arguments(
    config: BlockConfig, options: GrowthOptions, batches: Iterable[Tensor] | None
) -> dict[str, Any]:
    """Return the keyword arguments that apply to a model of `config`."""
    arguments = {"seed": options.seed, **options.sizes}
    if isinstance(config, TokenConfig):
        arguments |= {"init": options.init, "scale": options.scale, "old_rate": options.old_rate}
    elif options.method == LIGO and batches is not None:
        arguments["batches"] = batches
    return arguments


def target(to: str | None, config: BlockConfig) -> Any:
    """Return the preset to grow to, or the configuration of the model in folder `to`."""
    if to is None or not is_local(to):
        return to
    other = load_config(to)
    if type(other) is not type(config):
        raise ValueError(f"to={to} is a {other.model_type} model, not a {config.model_type}")
    return other


def check_growth(config: BlockConfig, stages: list[Stage]) -> None:
    """Raise at the start of a run if a later stage could not grow its TokenFormer."""
    for stage in stages:
        if stage.grow is not None and isinstance(config, TokenConfig):
            to = target(stage.grow.to, config)
            config = config_with_tokens(config, target_token_counts(config, to, stage.grow.sizes))
