"""`tokenformer inspect`: parameters, FLOPs and memory of a model, from its configuration alone."""

import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenformer.cli.inspect_image_text import inspect_image_text
from tokenformer.cli.model import CONFIG, read_config, resolve_folder
from tokenformer.errors import InputError
from tokenformer.models.presets import (
    IMAGE_TEXT_PRESETS,
    TOKENFORMER_PRESETS,
    TRANSFORMER_PRESETS,
    VISION_TOKENFORMER_PRESETS,
    VISION_TRANSFORMER_PRESETS,
)
from tokenformer.paths import closest_path, expand_user, is_local

if TYPE_CHECKING:
    from rich.table import Table

    from tokenformer.models.block_configuration import BlockConfig
    from tokenformer.models.configuration import LanguageConfig, VisionConfig

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LONGEST = 10**9
TRANSFORMER_PREFIX = "transformer-"
WIDEST = 80  # no table is wider
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
LABELS = {
    "qkv": "q, k, v projections",
    "token_token": "token-token attention",
    "output": "output projection",
    "ffn": "feed-forward",
    "head": "output head",
    "encoder": "frozen encoder",
    "adamw_moments": "AdamW moments",
}


def inspect(
    model: str,
    lengths: tuple[int, ...] = LENGTHS,
    batch_size: int = 1,
    length: int | None = None,
    plot: Path | None = None,
    json: bool = False,
) -> None:
    """Print parameters, FLOPs and memory of a model, next to those of its Transformer baseline.

    For an image classifier or a vision-language model: parameters, FLOPs per image, memory of
    weights and optimizer.

    Args:
        model: A preset (124m, 354m, ...; for images base-match, base, large-match, large; for both
            base+124m; transformer-124m, transformer-base, ... for the baselines alone), a model
            folder, a run folder or a hub name.
        lengths: Sequence lengths to count FLOPs for.
        batch_size: Sequences per batch, for the memory of activations.
        length: Tokens per sequence, for FLOPs by part and for memory; by default the model's
            context.
        plot: Save the paper's plot of FLOPs over sequence length to this png, pdf or svg file: the
            four growth sizes, up to the longest of the lengths.
        json: Print JSON instead of tables.
    """
    check_sizes(lengths=lengths, batch_size=[batch_size], length=[] if length is None else [length])
    if not lengths:
        raise InputError(f"--lengths is empty; give at least one, for example {list(LENGTHS)}")
    check_plot(plot)
    config = load_config(model)

    from tokenformer.models.accounting import matching_transformer
    from tokenformer.models.configuration import LanguageConfig, TokenformerConfig
    from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

    if isinstance(config, TokenformerImageTextConfig):
        if plot is not None:
            raise InputError(f"--plot does not apply: {model} is a vision-language model")
        inspect_image_text(model, config, length, json=json)
        return
    if not isinstance(config, LanguageConfig):
        inspect_images(model, config, {"length": length, "plot": plot}, json=json)
        return
    length = length or config.max_position_embeddings
    configs = {"tokenformer": config} if isinstance(config, TokenformerConfig) else {}
    configs["transformer"] = (
        matching_transformer(config) if isinstance(config, TokenformerConfig) else config
    )
    report = {
        "model": model,
        "batch_size": batch_size,
        "length": length,
        "plot": None if plot is None else str(plot),
        **{
            family: account(family_config, lengths, batch_size, length)
            for family, family_config in configs.items()
        },
    }
    if plot is not None:
        write_plot(plot, max(lengths))
    if json:
        sys.stdout.write(dumps(report, indent=2) + "\n")
    else:
        show(report, list(configs))


def check_sizes(**sizes: Any) -> None:
    for name, values in sizes.items():
        for value in values:
            if not 1 <= value <= LONGEST:
                raise InputError(f"--{name} {value} must be a whole number from 1 to {LONGEST}")


def check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"--plot {plot} must end in {', '.join(PLOT_SUFFIXES)}")
    if not is_folder(plot.parent):
        raise InputError(f"--plot {plot} is in a folder that does not exist; make it first")
    if is_folder(plot):
        raise InputError(f"--plot {plot} is a folder; give the name of a file")


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or a parent folder is not accessible
        return False


def load_config(model: str) -> "LanguageConfig | VisionConfig":
    """Return the configuration of a preset or of a model folder. For a folder with the name of a
    preset, give ./NAME."""
    name, size = model.lower(), model.lower().removeprefix(TRANSFORMER_PREFIX)
    folder = None if is_preset(name, size) else config_folder(model)

    from tokenformer.models.configuration import (
        CONFIG_CLASSES,
        TokenformerConfig,
        TokenformerVisionConfig,
        TransformerConfig,
        TransformerVisionConfig,
    )

    if name in TOKENFORMER_PRESETS:
        return TokenformerConfig.from_preset(name)
    if name in IMAGE_TEXT_PRESETS:
        from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

        return TokenformerImageTextConfig.from_preset(name)
    if name in VISION_TOKENFORMER_PRESETS:
        return TokenformerVisionConfig.from_preset(name)
    if size in TRANSFORMER_PRESETS:
        return TransformerConfig.from_preset(size)
    if folder is None:
        return TransformerVisionConfig.from_preset(size)
    options = read_config(folder)
    # Only our own classes: nothing that a config.json names is imported.
    kind = options.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_CLASSES:
        accepted = ", ".join(CONFIG_CLASSES)
        raise InputError(f"{folder} has model_type {kind!r}; accepted are {accepted}")
    try:
        return CONFIG_CLASSES[kind].from_dict(options)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / CONFIG}: {' '.join(str(error).split())}") from None


def is_preset(name: str, size: str) -> bool:
    own = {**TOKENFORMER_PRESETS, **VISION_TOKENFORMER_PRESETS, **IMAGE_TEXT_PRESETS}
    return name in own or size in TRANSFORMER_PRESETS or size in VISION_TRANSFORMER_PRESETS


def config_folder(model: str) -> Path:
    """Return the folder of a model that is not a preset; `owner/name` may be on the hub."""
    if is_local(model) or "/" in model:
        return resolve_folder(model)
    own = (*TOKENFORMER_PRESETS, *VISION_TOKENFORMER_PRESETS, *IMAGE_TEXT_PRESETS)
    plain = (*TRANSFORMER_PRESETS, *VISION_TRANSFORMER_PRESETS)
    presets = [*own, *(TRANSFORMER_PREFIX + size for size in plain)]
    alike: list[str | Path] = [*get_close_matches(model.lower(), presets, n=1)]
    near = alike[0] if alike else closest_path(expand_user(model))
    hint = f"did you mean {near}? " if near else ""
    raise InputError(
        f"{model} is neither a preset nor a folder; {hint}presets are {', '.join(presets)}"
    )


def account(
    config: "LanguageConfig", lengths: tuple[int, ...], batch_size: int, length: int
) -> dict[str, Any]:
    """Return the report on one model; every dict of parts has a total."""
    from tokenformer.models import accounting

    def flops(at: int) -> dict[str, Any]:
        return {
            "length": at,
            "forward": with_total(accounting.forward_flops(config, at)),
            "training": with_total(accounting.training_flops(config, at)),
        }

    state = accounting.state_bytes(config)
    activations = accounting.activation_bytes(config, batch_size, length)
    return {
        **shape(config),
        "parameters": with_total(accounting.count_parameters(config)),
        "active_parameters": with_total(accounting.active_parameters(config)),
        "flops": flops(length),
        "flops_by_length": [flops(at) for at in lengths],
        "memory_bytes": {
            "state": with_total(state),
            "activations": with_total(activations),
            "total": sum(state.values()) + sum(activations.values()),
        },
    }


def inspect_images(
    model: str, config: "VisionConfig", unfit: dict[str, Any], *, json: bool
) -> None:
    """Report on an image classifier; refuse `unfit`, the options for language models."""
    from tokenformer.models import accounting

    for name, value in unfit.items():
        if value is not None:
            raise InputError(f"--{name} does not apply: {model} is an image classifier")
    found: dict[str, Any] = {
        **shape(config),
        "parameters": with_total(accounting.count_parameters(config)),
        "active_parameters": with_total(accounting.active_parameters(config)),
        "flops": {
            "images": 1,
            "forward": with_total(accounting.image_forward_flops(config)),
            "training": with_total(accounting.image_training_flops(config)),
        },
        "memory_bytes": {"state": with_total(accounting.state_bytes(config))},
    }
    family = "tokenformer" if hasattr(config, "ffn_tokens") else "transformer"
    if json:
        sys.stdout.write(dumps({"model": model, family: found}, indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    size, side = config.image_size, config.patch_size
    image_shape = f"images of {size} x {size} in patches of {side} x {side}"
    console.print(headline(family, found))
    console.print(f"{image_shape}, {config.num_labels:,} classes")
    memory = new_table(["", family])
    add_parts(memory, [found["memory_bytes"]["state"]], in_bytes)
    for title, table in {
        "Parameters": parameter_table([found], [family]),
        "FLOPs by part, one image": flops_table([found], [family]),
        "Memory of model and optimizer, fp32 and AdamW": memory,
    }.items():
        console.print()
        console.print(title, style="bold")
        console.print(table)


def shape(config: "BlockConfig") -> dict[str, int]:
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
    }


def headline(family: str, found: dict[str, Any]) -> str:
    return f"{family}: {found['layers']} layers, width {found['width']}, {found['heads']} heads"


def with_total(parts: dict[str, int]) -> dict[str, int]:
    return {**parts, "total": sum(parts.values())}


def show(report: dict[str, Any], families: list[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, WIDEST)  # wrap rather than cut off digits
    models = [report[family] for family in families]
    for family, model in zip(families, models, strict=True):
        console.print(headline(family, model))
    length, batch_size = report["length"], report["batch_size"]
    legend = "share: token-token attention"
    if len(models) == 2:
        legend += "; ratio: transformer / tokenformer"
    tables = {
        "Parameters": parameter_table(models, families),
        f"FLOPs by part, one sequence of {length:,} tokens": flops_table(models, families),
        f"FLOPs by length ({legend})": length_table(models, families),
        f"Training memory, fp32 and AdamW, {batch_size:,} x {length:,} tokens": memory_table(
            models, families
        ),
    }
    for title, table in tables.items():
        console.print()
        console.print(title, style="bold")
        console.print(table)
    if report["plot"]:
        console.print()
        console.print(f"Plot saved to {report['plot']}", markup=False, soft_wrap=True)


def parameter_table(models: list[dict[str, Any]], families: list[str]) -> "Table":
    table = new_table(["", *families])
    add_parts(table, [model["parameters"] for model in models], "{:,}".format)
    active = [model.get("active_parameters", model["parameters"])["total"] for model in models]
    if active != [model["parameters"]["total"] for model in models]:
        table.add_row("active per token", *map("{:,}".format, active))
    return table


def flops_table(models: list[dict[str, Any]], families: list[str]) -> "Table":
    table = new_table(["", *grouped(families, ["forward", "training"])])
    kinds = [model["flops"][kind] for model in models for kind in ("forward", "training")]
    add_parts(table, kinds, quantity)
    return table


def length_table(models: list[dict[str, Any]], families: list[str]) -> "Table":
    columns = ["\nlength", *grouped(families, ["forward", "training", "share"])]
    table = new_table(columns + (["\nratio"] if len(models) == 2 else []))
    for rows in zip(*(model["flops_by_length"] for model in models), strict=True):
        cells = [f"{rows[0]['length']:,}"]
        for row in rows:
            forward, training = row["forward"], row["training"]
            share = forward["token_token"] / forward["total"]
            cells += [quantity(forward["total"]), quantity(training["total"]), f"{share:.0%}"]
        if len(rows) == 2:
            cells.append(f"{rows[1]['training']['total'] / rows[0]['training']['total']:.2f}")
        table.add_row(*cells)
    return table


def memory_table(models: list[dict[str, Any]], families: list[str]) -> "Table":
    table = new_table(["", *families])
    memories = [model["memory_bytes"] for model in models]
    add_parts(table, [memory["state"] for memory in memories], in_bytes, "model and optimizer")
    add_parts(table, [memory["activations"] for memory in memories], in_bytes, "activations")
    table.add_row("total", *(in_bytes(memory["total"]) for memory in memories))
    return table


def grouped(families: list[str], columns: list[str]) -> list[str]:
    """Return the columns once per family, with its name above the first."""
    return [
        f"{family if place == 0 else ''}\n{column}"
        for family in families
        for place, column in enumerate(columns)
    ]


def new_table(columns: list[str]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


def add_parts(
    table: "Table",
    columns: list[dict[str, int]],
    as_text: Callable[[int], str],
    total: str = "total",
) -> None:
    """Add a row for each part that is not zero everywhere, and the total."""
    for part in columns[0]:
        if part != "total" and any(column[part] for column in columns):
            table.add_row(LABELS.get(part, part), *(as_text(column[part]) for column in columns))
    table.add_section()
    table.add_row(total, *(as_text(column["total"]) for column in columns))
    table.add_section()


def in_bytes(number: int) -> str:
    return quantity(number, "B")


def quantity(number: int, unit: str = "") -> str:
    """Format a number with three digits and a decimal prefix: 1.20 T."""
    scaled, prefix = float(number), ""
    for larger in ("k", "M", "G", "T", "P", "E", "Z", "Y"):
        if scaled < 999.5:
            break
        scaled, prefix = scaled / 1000, larger
    digits = f"{scaled:#.3g}".rstrip(".") if prefix else str(number)
    return f"{digits} {prefix}{unit}".rstrip()


def write_plot(plot: Path, longest: int) -> None:
    """Draw to a temporary file, then rename it, so that no partial plot is visible."""
    from tokenformer.models.accounting_plot import draw_flops

    unfinished = plot.with_name(f".inspect-{os.getpid()}")
    try:
        try:
            with unfinished.open("xb") as file:
                draw_flops(file, plot.suffix.lower().removeprefix("."), longest)
            unfinished.replace(plot)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--plot {plot} cannot be written: {error.strerror}") from None
