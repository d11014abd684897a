"""`tokenformer convert`: a model in another format becomes one of ours, or goes back to it."""

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from tokenformer.errors import InputError
from tokenformer.files import new_folder


@dataclass(frozen=True)
class Conversion:
    function: str
    """`module:name` of a function (source, out, **options) -> report, with `asdict` and `str`."""
    options: tuple[str, ...] = ()
    """Options of the command that it takes."""
    reports_progress: bool = False
    """Whether it takes `on_progress`, a function to tell how far it is."""


PRETRAINED = Conversion(
    "tokenformer.convert.pretrained.convert_folder:convert_transformer",
    ("data", "distill", "steps", "linear", "tokenizer", "no_verify"),
    reports_progress=True,
)
# By the kind of the source (tokenformer/convert/source.py) and what it is to become.
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
SECONDS_BETWEEN_LINES = 10.0


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
    """Convert a released checkpoint, one of a training run, or a pretrained Transformer; or back.

    Args:
        source: The authors' pytorch_model.bin, its folder or its name on the hub
            (Haiyang-W/TokenFormer-150M); a checkpoint of a run (runs/x/checkpoints/step-...); a
            folder or hub name of a GPT-2, GPT-NeoX (Pythia), Llama, Mistral or Qwen2 model or of a
            plain Transformer of ours; or, with --to released, a model folder of ours.
        out: A new folder for the model; it must be given.
        to: tokenformer, a Hugging Face folder of ours, or released, the authors' format.
        tokenizer: A tokenizer.json, a folder or a hub name; by default the one beside the source.
        num_attention_heads: Of a released checkpoint without its config.json: how many heads.
        weights: Of a checkpoint of a run: average, as the run exports where it keeps one, or last.
        data: Of a Transformer: text to fit and measure on, a folder made by `tokenformer prepare`
            or a text file. Models with RMS norms or gated networks cannot do without.
        linear: Of a Transformer: tokens of a linear map: pair, two for each channel, the default,
            or shift, one, which is only exact in fp32.
        distill: Of a Transformer: text to train on afterwards, towards the source's predictions.
        steps: How long to; by default 200 steps of 8 sequences.
        no_verify: Of a model folder of ours: do not check its weights against checksums.json, nor
            for NaN and inf.
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
        "data": data,
        "linear": linear,
        "distill": distill,
        "steps": steps,
        "no_verify": no_verify or None,
    }
    options = {name: value for name, value in given.items() if value is not None}

    from safetensors import SafetensorError
    from transformers.utils import logging

    from tokenformer.convert.source import RELEASED, find_source
    from tokenformer.errors import ConversionError
    from tokenformer.models.loading import load_config
    from tokenformer.models.model_card import public_name, write_card

    shown = logging.is_progress_bar_enabled()
    if json or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        with new_folder("--out", out) as folder:
            found = find_source(source)
            function, conversion = choose(found.kind, to, options)
            with progress(conversion) as more:
                report = function(found, folder, **options, **more)
            if to != RELEASED:
                config = load_config(str(folder))
                line = f"Converted from {public_name(source)} ({found.kind})"
                write_card(folder, config, [*history_of(found), line])
    except (ConversionError, ValueError, SafetensorError) as error:
        told = " ".join(str(error).split())
        raise InputError(told if source in told else f"{source}: {told}") from None
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        if shown:
            logging.enable_progress_bar()
    told = report.asdict()
    lines = [str(report), origin_line(told), f"Kept in {out}"]
    sys.stdout.write((dumps(told, indent=2) if json else "\n".join(lines)) + "\n")


def choose(kind: str, to: str, options: dict[str, Any]) -> tuple[Any, Conversion]:
    """The function that converts, if it takes the options that were given."""
    conversion = CONVERSIONS.get((kind, to))
    if conversion is None:
        fitting = " or ".join(f"--to {t}" for k, t in CONVERSIONS if k == kind)
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in CONVERSIONS))
        hint = f"it takes {fitting}" if fitting else f"what can be converted is {kinds}"
        raise InputError(f"--to {to} is not for a source of kind {kind}; {hint}")
    for name, value in options.items():
        if name not in conversion.options:
            raise InputError(f"--{name} {value} is not for a source of kind {kind}")
    module, _, name = conversion.function.partition(":")
    return getattr(importlib.import_module(module), name), conversion


def history_of(source: Any) -> list[str]:
    """What is known of the source's training, for the model card."""
    from tokenformer.convert.source import CHECKPOINT
    from tokenformer.models.model_card import read_history
    from tokenformer.train.run_history import run_history

    if source.kind == CHECKPOINT:
        return run_history(source.path.resolve().parent.parent)
    return read_history(source.folder)


def origin_line(told: dict[str, Any]) -> str:
    """Where the tokenizer, or the image processor, came from."""
    for name in ("tokenizer", "image_processor"):
        if origin := told.get(name):
            return f"{name.replace('_', ' ')} from {origin}"
    return "no tokenizer found: give --tokenizer FILE, or copy its files into the folder"


@contextmanager
def progress(conversion: Conversion) -> Iterator[dict[str, Any]]:
    """What a conversion is to be told so that it says how far it is: on a terminal in one line that
    changes, elsewhere a line every ten seconds."""
    from rich.console import Console

    if not conversion.reports_progress:
        yield {}
        return
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("reading the model") as status:
            yield {"on_progress": status.update}
        return
    printed = time.monotonic()

    def show_line(line: str) -> None:
        nonlocal printed
        if time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            console.print(line, markup=False)

    yield {"on_progress": show_line}
