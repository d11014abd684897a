"""`tokenformer grow`: write a larger model that starts from a trained one."""

import sys
from collections.abc import Iterator
from itertools import cycle
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.model import model_errors, read_config, resolve_folder, resolve_model
from tokenformer.cli.samples import BATCH_SIZE, LONGEST, check_samples, read_samples
from tokenformer.errors import InputError
from tokenformer.files import new_folder
from tokenformer.paths import exists, expand_user, is_local
from tokenformer.train.options import GrowthOptions

if TYPE_CHECKING:
    from torch import Tensor

    from tokenformer.growth.growth_report import GrowthReport

LIGO, LIGO_STEPS = "ligo", 100
TOKEN_SIZES: tuple[str, ...] = ("qkv_tokens", "output_tokens", "ffn_tokens")
JOINT_SIZES: tuple[str, ...] = ("new_tokens",)
TRANSFORMER_SIZES: tuple[str, ...] = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
)
TOKEN_OPTIONS: tuple[str, ...] = ("init", "scale", "old_rate", *TOKEN_SIZES, *JOINT_SIZES)
TRANSFORMER_OPTIONS: tuple[str, ...] = ("method", "data", "steps", *TRANSFORMER_SIZES)
JOINT_REFUSED: tuple[str, ...] = ("to", "init", "scale", *TOKEN_SIZES, *TRANSFORMER_OPTIONS)


def grow_model(
    model: str,
    to: str | None = None,
    out: Path | None = None,
    method: str | None = None,
    init: str | None = None,
    scale: str | None = None,
    qkv_tokens: int | None = None,
    output_tokens: int | None = None,
    ffn_tokens: int | None = None,
    new_tokens: int | None = None,
    hidden_size: int | None = None,
    num_hidden_layers: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    data: Path | None = None,
    steps: int | None = None,
    optimizer_state: str | None = None,
    old_rate: float | None = None,
    seed: int = 0,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Make a trained model larger: a TokenFormer by tokens, a Transformer by one of the baselines.

    A vision-language model grows by --new_tokens, which belong to neither of its halves.

    Args:
        model: A model folder, a run folder, a hub name or a checkpoint of a run. A checkpoint grows
            with its optimizer; --out is then a run that `tokenformer train RECIPE --out` continues.
        to: The size to grow to: a preset (354m, base, ...), which for a TokenFormer must have the
            same width and depth, or the folder of another model.
        out: A new folder for the grown model, its tokenizer or image processor, and the report,
            growth.json. Required.
        method: How a Transformer grows. net2net (the default), hypercloning and bert2bert_fpi are
            exact at whole multiples of the width, lemon at any width; block_padding, bert2bert_aki
            and stacking are not exact; ligo is trained on --data.
        init: How new tokens are initialized. zero (the default) sets the keys to zero and preserves
            the output exactly; clone copies old tokens, also exact; zero_value (random keys, zero
            values) is exact if many tokens are added; random and shrink, which also scales
            the old values down, change the output; shrink ended lowest in our study.
        scale: What happens to the scale: frozen, current, anneal or learned. The default depends on
            --init.
        qkv_tokens: Instead of --to, tokens of each of the q, k and v projections.
        output_tokens: Instead of --to, tokens of each output projection.
        ffn_tokens: Instead of --to, tokens of each feed-forward layer.
        new_tokens: For a vision-language model, the new tokens of every layer after growth.
        hidden_size: Instead of --to, the width of a Transformer; heads and hidden units follow.
        num_hidden_layers: Instead of --to, the layers of a Transformer.
        intermediate_size: Instead of --to, the hidden units of each feed-forward layer of a
            Transformer.
        num_attention_heads: Instead of --to, the heads of a Transformer; the width follows.
        data: For --method ligo, a folder made by `tokenformer prepare` to train on.
        steps: For --method ligo, training steps of 8 sequences; 100 by default.
        optimizer_state: For a checkpoint: keep the moments of old entries (the default), give new
            entries the mean second moment of the old, or reset all.
        old_rate: Factor on the learning rate of the old tokens; 0 freezes them.
        seed: Seed of the new random weights.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print the report as JSON.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    if out is None:
        raise InputError("--out is missing; name a new folder for the grown model")
    is_checkpoint = exists(expand_user(model) / "manifest.json")
    source = expand_user(model) if is_checkpoint else resolve_folder(model)
    if not is_checkpoint and optimizer_state is not None:
        raise InputError(f"--optimizer_state {optimizer_state} is for a checkpoint of a run")
    if is_checkpoint and no_verify:
        raise InputError("--no_verify is for a model folder; a checkpoint is always verified")
    check_samples(data)
    if to is not None and is_local(to):
        given["to"] = resolve_model(to)  # a wrong path fails before the slow imports
    for name in ("data", "steps"):
        if name in given and method != LIGO:
            raise InputError(f"--{name} {given[name]} is for --method {LIGO}")

    from tokenformer.train.model_growth import grow_model_folder

    with model_errors(out):
        options = growth_options(given)
        config = saved_config(source, is_checkpoint)
        check_family(given, config)
        batches = None
        if method == LIGO:
            batches = ligo_batches(config, data, options.sizes["steps"])
        with new_folder("--out", out) as folder:
            if is_checkpoint:
                from tokenformer.train.training_state import grow_checkpoint

                report = grow_checkpoint(source, folder, options, batches)
            else:
                verify = not no_verify
                report = grow_model_folder(source, folder, options, batches, verify=verify)
    show(report, out, json)


def growth_options(given: dict[str, Any]) -> GrowthOptions:
    """Return the options of a stage that grows as the command line says."""
    named = ("to", "method", "init", "scale", "optimizer_state", "old_rate", "seed")
    options = {name: given[name] for name in named if name in given}
    names = TOKEN_SIZES + JOINT_SIZES + TRANSFORMER_SIZES
    sizes = {name: given[name] for name in names if name in given}
    if given.get("method") == LIGO:
        sizes["steps"] = given.get("steps", LIGO_STEPS)
    return GrowthOptions(**options, sizes=sizes)


def saved_config(source: Path, is_checkpoint: bool) -> dict[str, Any]:
    """Return the model configuration of a checkpoint or a model folder."""
    if not is_checkpoint:
        return read_config(source)

    from tokenformer.train.checkpoint import read_state

    config: dict[str, Any] = read_state(source, {"config": dict})["config"]
    return config


def check_family(given: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse options that do not apply to a model of this configuration."""
    from tokenformer.models.configuration import CONFIG_CLASSES, TokenConfig
    from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

    family = CONFIG_CLASSES.get(str(config.get("model_type")))
    if family is None:
        return  # another kind of model: refused where it is loaded
    if issubclass(family, TokenformerImageTextConfig):
        model, sizes, others = "vision-language model", JOINT_SIZES, JOINT_REFUSED
    elif issubclass(family, TokenConfig):
        model, sizes, others = "TokenFormer", TOKEN_SIZES, JOINT_SIZES + TRANSFORMER_OPTIONS
    else:
        model, sizes, others = "Transformer", TRANSFORMER_SIZES, TOKEN_OPTIONS
    for name in others:
        if name in given:
            options = ", ".join(f"--{size}" for size in sizes)
            raise InputError(
                f"--{name} {given[name]} does not apply to a {model}; its sizes are {options}"
            )


def ligo_batches(config: dict[str, Any], data: Path | None, steps: int) -> "Iterator[Tensor]":
    """Return the token ids that LiGO trains on, repeated without end."""
    if data is None:
        raise InputError(f"--method {LIGO} is trained on data; give --data FOLDER")
    if steps < 1:
        raise InputError(f"--steps {steps} must be at least 1")
    batches = read_samples(
        data,
        split="train",
        sequences=steps * BATCH_SIZE,
        length=min(LONGEST, config.get("max_position_embeddings", LONGEST)),
        vocab_size=config.get("vocab_size", 0),
    )
    return cycle(batches)


def show(report: "GrowthReport", out: Path, json: bool) -> None:
    text = dumps(report.asdict(), indent=2) if json else f"{report}\nSaved to {out}"
    sys.stdout.write(text + "\n")
