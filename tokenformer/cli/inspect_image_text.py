"""The report of `tokenformer inspect` on a vision-language model."""

import sys
from json import dumps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

LENGTH = 128
"""Tokens of text beside an image, by default."""
FAMILY = "tokenformer"


def inspect_image_text(
    model: str, config: "TokenformerImageTextConfig", length: int | None, *, json: bool
) -> None:
    """Print parameters, FLOPs of an image with `length` tokens of text, and memory of weights and
    optimizer."""
    from tokenformer.cli.inspect import (
        add_parts,
        flops_table,
        headline,
        in_bytes,
        new_table,
        parameter_table,
        shape,
        with_total,
    )
    from tokenformer.models import accounting

    length = length or LENGTH
    found: dict[str, Any] = {
        **shape(config),
        "mode": config.mode,
        "tokens": token_parts(config),
        "parameters": with_total(accounting.count_parameters(config)),
        "flops": {
            "length": length,
            "forward": with_total(accounting.image_text_forward_flops(config, length)),
            "training": with_total(accounting.image_text_training_flops(config, length)),
        },
        "memory_bytes": {"state": with_total(accounting.state_bytes(config))},
    }
    if json:
        sys.stdout.write(dumps({"model": model, FAMILY: found}, indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    vision = config.vision_config
    size, side = vision.image_size, vision.patch_size
    console.print(headline(FAMILY, found))
    console.print(f"vision-language, {config.mode}; images of {size} x {size} in {side} x {side}")
    tokens = new_table(["first layer", "vision", "new", "language"])
    for name, parts in found["tokens"].items():
        tokens.add_row(name, *(f"{count:,}" for count in parts[0]))
    memory = new_table(["", FAMILY])
    add_parts(memory, [found["memory_bytes"]["state"]], in_bytes)
    for title, table in {
        "Parameter tokens": tokens,
        "Parameters": parameter_table([found], [FAMILY]),
        f"FLOPs by part, an image and {length:,} tokens of text": flops_table([found], [FAMILY]),
        "Memory of model and optimizer, fp32 and AdamW": memory,
    }.items():
        console.print()
        console.print(title, style="bold")
        console.print(table)


def token_parts(config: "TokenformerImageTextConfig") -> dict[str, list[list[int]]]:
    """Return the numbers of vision, new and language tokens by projection and layer."""
    from tokenformer.models.configuration import PROJECTIONS

    layers = range(config.num_hidden_layers)
    return {name: [list(config.parts(name, layer)) for layer in layers] for name in PROJECTIONS}
