"""`tokenformer convert`: a model in another format becomes one of ours, or goes back to it."""

import importlib
import sys
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from tokenformer.cli.errors import InputError
from tokenformer.cli.folder import new_folder


@dataclass(frozen=True)
class Conversion:
    function: str
    """`module:name` of a function (source, out, **options) -> report, with `asdict` and `str`."""
    options: tuple[str, ...] = ()
    """Options of the command that it takes."""


# By the kind of the source (tokenformer/convert/source.py) and what it is to become.
CONVERSIONS = {
    ("released", "tokenformer"): Conversion(
        "tokenformer.convert.released:convert_released", ("num_attention_heads", "tokenizer")
    ),
    ("tokenformer", "released"): Conversion("tokenformer.convert.released:convert_to_released"),
    ("checkpoint", "tokenformer"): Conversion(
        "tokenformer.convert.training_checkpoint:convert_checkpoint", ("tokenizer", "weights")
    ),
}


def convert_model(
    source: str,
    out: Path | None = None,
    to: str = "tokenformer",
    tokenizer: str | None = None,
    num_attention_heads: int | None = None,
    weights: str | None = None,
    json: bool = False,
) -> None:
    """Convert a released checkpoint, or one of a training run, to a model folder; or back.

    Args:
        source: The authors' pytorch_model.bin, its folder or its name on the hub
            (Haiyang-W/TokenFormer-150M); a checkpoint of a run (runs/x/checkpoints/step-...); or,
            with --to released, a model folder of ours.
        out: A new folder for the model; it must be given.
        to: tokenformer, a Hugging Face folder of ours, or released, the authors' format.
        tokenizer: A tokenizer.json, a folder or a hub name; by default the one beside the source.
        num_attention_heads: Of a released checkpoint without its config.json: how many heads.
        weights: Of a checkpoint of a run: average, as the run exports where it keeps one, or last.
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the model")
    targets = sorted({target for _, target in CONVERSIONS})
    if to not in targets:
        raise InputError(f"--to {to} is unknown; choose {' or '.join(targets)}")
    given = {
        "tokenizer": tokenizer,
        "num_attention_heads": num_attention_heads,
        "weights": weights,
    }
    options = {name: value for name, value in given.items() if value is not None}

    from safetensors import SafetensorError
    from transformers.utils import logging

    from tokenformer.convert.errors import ConversionError
    from tokenformer.convert.source import find_source

    shown = logging.is_progress_bar_enabled()
    if json or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        with new_folder("--out", out) as folder:
            found = find_source(source)
            report = choose(found.kind, to, options)(found, folder, **options)
    except (ConversionError, ValueError, SafetensorError) as error:
        raise InputError(" ".join(str(error).split())) from None
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        if shown:
            logging.enable_progress_bar()
    text = dumps(report.asdict(), indent=2) if json else f"{report}\nKept in {out}"
    sys.stdout.write(text + "\n")


def choose(kind: str, to: str, options: dict[str, Any]) -> Any:
    """The function that converts, if it takes the options that were given."""
    conversion = CONVERSIONS.get((kind, to))
    if conversion is None:
        fitting = " or ".join(f"--to {t}" for k, t in CONVERSIONS if k == kind)
        hint = f"it takes {fitting}" if fitting else "it is of a kind that cannot be converted"
        raise InputError(f"--to {to} is not for a source of kind {kind}; {hint}")
    for name, value in options.items():
        if name not in conversion.options:
            raise InputError(f"--{name} {value} is not for a source of kind {kind}")
    module, _, name = conversion.function.partition(":")
    return getattr(importlib.import_module(module), name)
