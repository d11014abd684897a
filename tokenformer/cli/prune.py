"""`tokenformer prune`: remove parameter tokens from a trained model."""

import sys
from json import dumps
from pathlib import Path
from typing import Any, Literal

from tokenformer.cli.model import IMAGE_TEXT, model_errors, resolve_folder
from tokenformer.cli.samples import (
    LONGEST,
    check_samples,
    read_image_samples,
    read_image_text_samples,
    read_samples,
)
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
    image_text: str | None = None,
    on_corrupt: Literal["refuse", "skip"] | None = None,
    parts: tuple[Literal["vision", "new", "language"], ...] = (),
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Remove the least important parameter tokens, measured on data; without data, unused ones.

    Args:
        model: A model folder, a run folder or a hub name.
        data: A folder made by `tokenformer prepare`, to measure the importance of tokens on.
            Without --data and --images, only tokens with zero keys are removed, which changes
            nothing.
        keep: Share of the tokens of every layer to keep, such as 0.5; of a sparse layer the share
            of its groups.
        out: New folder for the smaller model, its tokenizer or image processor, and the report,
            growth.json. Required.
        qkv_tokens: Instead of --keep: tokens in each of the q, k and v projections.
        output_tokens: Instead of --keep: tokens in each output projection.
        ffn_tokens: Instead of --keep: tokens in each feed-forward layer; a multiple of the group
            size if it is sparse.
        split: Split to measure on.
        sequences: Number of sequences or images to measure on, spread over the split.
        length: Tokens per sequence, without images; by default the model's context, at most 512.
        refit: Refit the remaining value tokens to compensate for the removed ones; disable with
            --refit=false.
        images: For an image classifier, instead of --data: an image source as in `tokenformer
            train`, such as a folder of images by class, or digits.
        image_text: For a vision-language model, instead of --data: images with captions or
            conversations, as data.image_text of a recipe.
        on_corrupt: What to do at an image of --image_text that cannot be decoded: refuse stops with
            an error, the default; skip uses the next one.
        parts: For a vision-language model, which tokens to remove: vision, new, language; several,
            or the option again. By default all.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the smaller model")
    for name, value in {"sequences": sequences, "length": length}.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be at least 1")
    counts = {"qkv_tokens": qkv_tokens, "output_tokens": output_tokens, "ffn_tokens": ffn_tokens}
    tokens: dict[str, Any] = {name: n for name, n in counts.items() if n is not None}
    if on_corrupt is not None and image_text is None:
        raise InputError(f"--on_corrupt {on_corrupt} needs --image_text")
    source = resolve_folder(model)
    check_samples(data, images, image_text)

    from rich.console import Console

    from tokenformer.growth.model_folder import save_model_folder
    from tokenformer.growth.tokens.prune import prune
    from tokenformer.models.configuration import VisionConfig
    from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
    from tokenformer.models.loading import device, load_tokenformer

    with model_errors(out), new_folder("--out", out) as folder:
        loaded = load_tokenformer(source, verify=not no_verify).to(device())
        batches: list[Any] | None = None
        if isinstance(loaded.config, VisionConfig):
            option, others = "images", {"data": data, "length": length}
            refuse(model, "an image classifier", **others, image_text=image_text, parts=parts)
            if images is not None:
                batches = read_image_samples(images, source, loaded, count=sequences)
        elif isinstance(loaded.config, TokenformerImageTextConfig):
            option = "image_text"
            refuse(model, IMAGE_TEXT, data=data, images=images, **tokens)
            tokens |= {"parts": parts} if parts else {}
            if image_text is not None:
                batches = read_image_text_samples(
                    image_text,
                    source,
                    loaded,
                    count=sequences,
                    length=length or LONGEST,
                    on_corrupt=on_corrupt or "refuse",
                )
        else:
            option = "data"
            refuse(model, "a language model", images=images, image_text=image_text, parts=parts)
            if data is not None:
                batches = read_samples(
                    data,
                    split=split,
                    sequences=sequences,
                    length=length or min(LONGEST, loaded.config.max_position_embeddings),
                    vocab_size=loaded.config.vocab_size,
                )
        try:
            with Console(stderr=True).status("measuring the importance of tokens"):
                smaller, report = prune(loaded, batches, keep=keep, refit=refit, **tokens)
        except ValueError as error:
            line = str(error).replace("batches is missing", f"--{option} is missing")
            raise ValueError(line) from None
        save_model_folder(smaller, report, source, folder)
    sys.stdout.write(
        (dumps(report.asdict(), indent=2) if json else f"{report}\nSaved to {out}") + "\n"
    )


def refuse(model: str, kind: str, **options: Any) -> None:
    for name, value in options.items():
        if value not in (None, ()):
            raise InputError(f"--{name} does not apply: {model} is {kind}")
