"""Grow a model by `GrowthOptions`, which a stage of a recipe and `tokenformer grow` share.

A TokenFormer grows by its tokens, a Transformer by `options.method`; here is where that is decided.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tokenformer.growth.grow import TOKENS, grow
from tokenformer.growth.growth_report import GrowthReport
from tokenformer.growth.model_folder import (
    grow_folder,
    grow_joint_folder,
    grow_transformer_folder,
)
from tokenformer.growth.tokens.token_counts import config_with_tokens, target_token_counts
from tokenformer.growth.tokens.token_growth import check_options
from tokenformer.growth.transformer.methods import check_method
from tokenformer.growth.transformer.target_config import SIZES, target_config
from tokenformer.models.block_configuration import BlockConfig
from tokenformer.models.configuration import TokenConfig, TransformerConfig
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
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
    if isinstance(config, TokenformerImageTextConfig):
        return grow_joint_folder(source, out, to, **arguments)
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


def grown_config(config: BlockConfig, options: GrowthOptions) -> BlockConfig:
    """Return the configuration, apart from scales and rates of tokens, of the model that
    `grow_model` returns for one of `config`. Raises for options it cannot grow by, except those
    that only the method of a Transformer checks."""
    to = target(options.to, config)
    if isinstance(config, TokenConfig):
        if options.method not in (None, TOKENS):
            raise ValueError(
                f"method={options.method!r}: a TokenFormer grows by its tokens; leave it out"
            )
        counts = target_token_counts(config, to, options.sizes)
        check_options(config, counts, options.init, options.scale, options.old_rate)
        learned = config.learned_scale or options.scale == "learned"
        return config_with_tokens(config, counts, learned_scale=learned)
    if not isinstance(config, TransformerConfig):
        raise ValueError(
            f"a {config.model_type} model cannot grow; a TokenFormer or a Transformer language "
            "model can"
        )
    check_method(options.method or "net2net", options.sizes.keys() - SIZES)
    sizes = {name: size for name, size in options.sizes.items() if name in SIZES}
    return target_config(config, to, sizes)


def stage_configs(config: BlockConfig, stages: list[Stage]) -> list[BlockConfig]:
    """Return the configuration of every stage; raise if one of them could not grow."""
    found = []
    for stage in stages:
        if stage.grow is not None:
            try:
                config = grown_config(config, stage.grow)
            except (ValueError, TypeError) as error:
                raise ValueError(f"stage {stage.index + 1} cannot grow: {error}") from None
        found.append(config)
    return found
