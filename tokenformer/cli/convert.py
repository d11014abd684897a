"""`tokenformer convert`: convert models between other formats and ours."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from tokenformer.cli.model import model_errors
from tokenformer.cli.progress import progress
from tokenformer.errors import InputError
from tokenformer.files import new_folder


@dataclass(frozen=True)
class Conversion:
    """A function that converts, and the options it accepts."""

    function: str
    """`module:name` of a function (source, out, **options) -> report, with `asdict` and `str`."""
    options: tuple[str, ...] = ()
    """Command line options that it accepts."""
    reports_progress: bool = False
    """Whether it takes `on_progress`, a `ShowProgress` function."""


PRETRAINED = Conversion(
    "tokenformer.convert.pretrained.transformer_folder:convert_transformer",
    ("data", "distill", "steps", "linear", "tokenizer", "no_verify"),
    reports_progress=True,
)
# By source kind (tokenformer/convert/source.py) and target format.
CONVERSIONS = {
    ("released", "tokenformer"): Conversion(
        "tokenformer.convert.released:convert_released", ("num_attention_heads", "tokenizer")
    ),
    ("tokenformer", "released"): Conversion(
        "tokenformer.convert.released:convert_to_released", ("no_verify",)
    ),
    ("checkpoint", "tokenformer"): Conversion(
        "tokenformer.convert.training_checkpoint:convert_checkpoint", ("tokenizer", "weights")
    ),
    ("gpt2", "tokenformer"): PRETRAINED,
    ("gpt_neox", "tokenformer"): PRETRAINED,
    ("llama", "tokenformer"): PRETRAINED,
    ("mistral", "tokenformer"): PRETRAINED,
    ("qwen2", "tokenformer"): PRETRAINED,
    ("tokenformer_transformer", "tokenformer"): PRETRAINED,
}


def convert_model(
    source: str,
    out: Path | None = None,
    to: str = "tokenformer",
    tokenizer: str | None = None,
    num_attention_heads: int | None = None,
    weights: str | None = None,
    data: Path | None = None,
    linear: str | None = None,
    distill: Path | None = None,
    steps: int | None = None,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Convert a released checkpoint, a training checkpoint or a pretrained Transformer.

    Args:
        source: A released pytorch_model.bin, its folder or its hub name
            (Haiyang-W/TokenFormer-150M); a training checkpoint (runs/x/checkpoints/step-...); the
            folder or hub name of a GPT-2, GPT-NeoX (Pythia), Llama, Mistral or Qwen2 model or of
            our Transformer baseline; or, with --to released, one of our model folders.
        out: A new folder for the model; required.
        to: tokenformer (our Hugging Face format) or released (the authors' format).
        tokenizer: A tokenizer.json, a folder or a hub name; by default the source's tokenizer.
        num_attention_heads: For a released checkpoint without config.json: the number of heads.
        weights: For a training checkpoint: average (the default if the run has a moving average of
            the weights) or last.
        data: For a Transformer: calibration text, a folder made by `tokenformer prepare` or a text
            file. Required for models with RMS norms or gated MLPs.
        linear: For a Transformer: tokens of a linear projection: pair, two per channel (the
            default), or shift, one per channel, which is only exact in fp32.
        distill: For a Transformer: text to distill on after the conversion.
        steps: Distillation steps of 8 sequences; by default 200.
        no_verify: For our model folders: skip verifying the weights (checksums.json, NaN, inf).
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; give a new folder for the model")
    targets = sorted({target for _, target in CONVERSIONS})
    if to not in targets:
        raise InputError(f"--to {to} is unknown; choose {' or '.join(targets)}")
    given = {
        "tokenizer": tokenizer,
        "num_attention_heads": num_attention_heads,
        "weights": weights,
        "data": data,
        "linear": linear,
        "distill": distill,
        "steps": steps,
        "no_verify": no_verify or None,
    }
    options = {name: value for name, value in given.items() if value is not None}

    from tokenformer.convert.source import RELEASED, find_source
    from tokenformer.models.loading import load_config
    from tokenformer.models.model_card import public_name, write_card

    with model_errors(out, source), new_folder("--out", out) as folder:
        found = find_source(source)
        function, conversion = choose(found.kind, to, options)
        with progress_option(conversion) as shown:
            report = function(found, folder, **options, **shown)
        if to != RELEASED:
            config = load_config(str(folder))
            line = f"Converted from {public_name(source)} ({found.kind})"
            write_card(folder, config, [*history_of(found), line])
    fields = report.asdict()
    lines = [str(report), preprocessor_line(fields), f"Saved to {out}"]
    sys.stdout.write((dumps(fields, indent=2) if json else "\n".join(lines)) + "\n")


def choose(kind: str, to: str, options: dict[str, Any]) -> tuple[Any, Conversion]:
    """Return the conversion function; raise if it does not accept the given options."""
    conversion = CONVERSIONS.get((kind, to))
    if conversion is None:
        targets = " or ".join(f"--to {t}" for k, t in CONVERSIONS if k == kind)
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in CONVERSIONS))
        hint = f"use {targets}" if targets else f"supported kinds are {kinds}"
        raise InputError(f"--to {to} does not apply to a source of kind {kind}; {hint}")
    for name, value in options.items():
        if name not in conversion.options:
            raise InputError(f"--{name} {value} does not apply to a source of kind {kind}")
    module, _, name = conversion.function.partition(":")
    return getattr(importlib.import_module(module), name), conversion


def history_of(source: Any) -> list[str]:
    """Return the training history of the source for the model card."""
    from tokenformer.convert.source import CHECKPOINT
    from tokenformer.models.model_card import read_history
    from tokenformer.train.run_history import run_history

    if source.kind == CHECKPOINT:
        return run_history(source.path.resolve().parent.parent)
    return read_history(source.folder)


def preprocessor_line(fields: dict[str, Any]) -> str:
    """Return a line that says where the tokenizer or image processor was found."""
    for name in ("tokenizer", "image_processor"):
        if location := fields.get(name):
            return f"{name.replace('_', ' ')} from {location}"
    return "no tokenizer found: give --tokenizer FILE, or copy its files into the folder"


@contextmanager
def progress_option(conversion: Conversion) -> Iterator[dict[str, Any]]:
    """Yield the `on_progress` option of a conversion, if it has one."""
    from rich.console import Console

    if not conversion.reports_progress:
        yield {}
        return
    with progress(Console(stderr=True, highlight=False)) as show:
        yield {"on_progress": show}
