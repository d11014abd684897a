"""`tokenformer grow`: a trained model becomes a larger one, on disk."""

import sys
from json import dumps
from pathlib import Path

from tokenformer.cli.errors import InputError
from tokenformer.cli.folder import new_folder


def grow_model(
    model: Path,
    to: str | None = None,
    out: Path | None = None,
    init: str = "zero",
    scale: str | None = None,
    qkv_tokens: int | None = None,
    output_tokens: int | None = None,
    ffn_tokens: int | None = None,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Add parameter tokens to a trained model; it knows all it knew before.

    Args:
        model: A model folder.
        to: The size to grow to: a preset of the same width and depth (354m, 757m, ...), or the
            folder of another model.
        out: A new folder for the grown model, with its tokenizer and growth.json, the report; it
            must be given.
        init: How new tokens begin. zero: zero keys, the output is exactly preserved. clone: copies
            of the old, exact too. zero_value: nearly exact. random: the output jumps.
        scale: frozen, current, anneal or learned; by default as the init needs.
        qkv_tokens: Instead of --to: tokens of each of the q, k and v projections.
        output_tokens: Instead of --to: tokens of each output projection.
        ffn_tokens: Instead of --to: tokens of each feed-forward layer.
        seed: Seed of what is drawn.
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the grown model")
    if not (model / "config.json").exists():
        raise InputError(f"{model} is not a model folder: it has no config.json")
    counts = {"qkv_tokens": qkv_tokens, "output_tokens": output_tokens, "ffn_tokens": ffn_tokens}
    tokens = {name: count for name, count in counts.items() if count is not None}

    from safetensors import SafetensorError
    from transformers.utils import logging

    from tokenformer.growth.folder import grow_folder
    from tokenformer.models.configuration import TokenformerConfig

    logging.disable_progress_bar()
    try:
        target = TokenformerConfig.from_pretrained(to) if to and Path(to).is_dir() else to
        with new_folder("--out", out) as folder:
            report = grow_folder(model, folder, target, init=init, scale=scale, seed=seed, **tokens)
    except (ValueError, SafetensorError) as error:
        raise InputError(" ".join(str(error).split())) from None
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        logging.enable_progress_bar()
    sys.stdout.write(
        (dumps(report.asdict(), indent=2) if json else f"{report}\nKept in {out}") + "\n"
    )
