"""`tokenformer prune`: a trained model becomes a smaller one, on disk."""

import sys
from json import dumps
from pathlib import Path
from typing import Any

from tokenformer.cli.model import resolve_folder
from tokenformer.cli.samples import LONGEST, check_samples, read_image_samples, read_samples
from tokenformer.errors import InputError
from tokenformer.files import new_folder


def prune_model(
    model: str,
    data: Path | None = None,
    keep: float | None = None,
    out: Path | None = None,
    qkv_tokens: int | None = None,
    output_tokens: int | None = None,
    ffn_tokens: int | None = None,
    split: str = "train",
    sequences: int = 128,
    length: int | None = None,
    refit: bool = True,
    images: str | None = None,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Drop the parameter tokens that matter least on data; without data, those that cannot matter.

    Args:
        model: A model folder, a run folder or a hub name.
        data: A folder made by `tokenformer prepare`, to measure on what each token does. Without it
            and without --images only tokens with zero keys go, at no loss.
        keep: The share of every layer's tokens to keep, such as 0.5.
        out: A new folder for the smaller model, with its tokenizer or image processor and
            growth.json, the report; it must be given.
        qkv_tokens: Instead of --keep: tokens of each of the q, k and v projections.
        output_tokens: Instead of --keep: tokens of each output projection.
        ffn_tokens: Instead of --keep: tokens of each feed-forward layer.
        split: The split to measure on.
        sequences: How many sequences or images to measure on, spread over the split.
        length: Their length; by default what the model was made for, at most 512.
        refit: Fit the values that are kept to make up for those that are not; --refit=false leaves
            them as they are.
        images: For an image classifier, instead of --data: images as `tokenformer train` takes
            them, such as a folder of images by class, or digits.
        no_verify: Do not check the weights against checksums.json, nor for NaN and inf.
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the smaller model")
    for name, value in {"sequences": sequences, "length": length}.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be at least 1")
    counts = {"qkv_tokens": qkv_tokens, "output_tokens": output_tokens, "ffn_tokens": ffn_tokens}
    tokens: dict[str, Any] = {name: n for name, n in counts.items() if n is not None}
    source = resolve_folder(model)
    check_samples(data, images)

    from rich.console import Console
    from safetensors import SafetensorError
    from transformers.utils import logging

    from tokenformer.errors import DataError
    from tokenformer.growth.model_folder import save_model_folder
    from tokenformer.growth.tokens.prune import prune
    from tokenformer.models.configuration import VisionConfig
    from tokenformer.models.loading import load_tokens
    from tokenformer.train.parallel.distribute import device

    wanted = "data"
    logging.disable_progress_bar()
    try:
        with new_folder("--out", out) as folder:
            whole = load_tokens(source, verify=not no_verify).to(device())
            batches = None
            if isinstance(whole.config, VisionConfig):
                wanted = "images"
                refuse(model, "an image classifier", data=data, length=length)
                if images is not None:
                    batches = read_image_samples(images, source, whole, count=sequences)
            else:
                refuse(model, "a language model", images=images)
                longest = min(LONGEST, whole.config.max_position_embeddings)
                if data is not None:
                    batches = read_samples(
                        data,
                        split=split,
                        sequences=sequences,
                        length=length or longest,
                        vocab_size=whole.config.vocab_size,
                    )
            with Console(stderr=True).status("measuring what each token does"):
                smaller, report = prune(whole, batches, keep=keep, refit=refit, **tokens)
            save_model_folder(smaller, report, source, folder)
    except (ValueError, SafetensorError, DataError) as error:
        line = " ".join(str(error).split())
        raise InputError(line.replace("batches is missing", f"--{wanted} is missing")) from None
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        logging.enable_progress_bar()
    sys.stdout.write(
        (dumps(report.asdict(), indent=2) if json else f"{report}\nKept in {out}") + "\n"
    )


def refuse(model: str, kind: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{model} is {kind}, for which there is no --{name}")
