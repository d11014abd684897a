"""`tokenformer join`: join a vision and a language model into a vision-language model."""

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenformer.cli.model import model_errors, resolve_folder, resolve_model
from tokenformer.errors import InputError
from tokenformer.files import new_folder

if TYPE_CHECKING:
    from tokenformer.growth.tokens.join import JoinReport
    from tokenformer.models.image_text import TokenformerForImageTextToText

REPORT = "join.json"


def join_models(
    vision: str,
    language: str,
    out: Path | None = None,
    mode: Literal["routed", "shared", "projector"] = "routed",
    new_tokens: int = 64,
    projector_size: int | None = None,
    seed: int = 0,
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Join a vision and a language TokenFormer into one vision-language model.

    Args:
        vision: An image classifier: a model folder, a run folder or a hub name.
        language: A language model of the same width and depth, with its tokenizer.
        out: New folder for the joint model, its processor, and the report, join.json. Required.
        mode: routed keeps both models as they are, each position using the tokens of its own
            modality and new ones; shared lets every position use all tokens; projector is the
            baseline in the style of LLaVA, for models of any width and depth.
        new_tokens: New tokens in every layer, to be trained for alignment.
        projector_size: Hidden units of the projector; by default the width of the language model.
        seed: Seed of the new tokens, and of the projector.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the joint model")
    if new_tokens < 0:
        raise InputError(f"--new_tokens {new_tokens} must be at least 0")
    if projector_size is not None and mode != "projector":
        raise InputError(
            f"--projector_size {projector_size} does not apply to --mode {mode}; leave it out, or "
            "use --mode projector"
        )
    for name, kind in ((vision, "an image classifier"), (language, "a language model")):
        resolve_model(name, kind)
    of_vision, of_language = resolve_folder(vision), resolve_folder(language)

    with model_errors(out), new_folder("--out", out) as folder:
        report = join_folders(
            of_vision,
            of_language,
            folder,
            verify=not no_verify,
            mode=mode,
            new_tokens=new_tokens,
            projector_size=projector_size,
            seed=seed,
        )
    sys.stdout.write(
        (dumps(report.asdict(), indent=2) if json else f"{report}\nSaved to {out}") + "\n"
    )


def join_folders(
    vision: Path, language: Path, folder: Path, verify: bool = True, **options: Any
) -> "JoinReport":
    """Join the models in two folders and write the result, its processor and report to another."""
    from tokenformer.growth.tokens.join import join_modalities
    from tokenformer.models.image_text_processing import IMAGE_TOKEN, add_image_token
    from tokenformer.models.loading import load_tokenformer

    classifier, reader = (load_tokenformer(path, verify=verify) for path in (vision, language))
    tokenizer = load_tokenizer(language)
    add_image_token(tokenizer)
    marker = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    model, report = join_modalities(classifier, reader, image_token_id=marker, **options)
    save(model, report, vision, tokenizer, folder)
    return report


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder} has no tokenizer that can be loaded; copy its tokenizer.json into the folder"
        ) from error
    if tokenizer.eos_token is None:
        raise InputError(f"the tokenizer of {folder} has no end-of-text token (eos_token)")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def save(
    model: "TokenformerForImageTextToText",
    report: "JoinReport",
    vision: Path,
    tokenizer: Any,
    folder: Path,
) -> None:
    """Save the model with its processor, whose image processor is that of the vision model."""
    from tokenformer.models.image_processing import TokenformerImageProcessor
    from tokenformer.models.image_text_processing import TokenformerProcessor

    found = (vision / "preprocessor_config.json").exists()
    images = TokenformerImageProcessor.from_pretrained(str(vision)) if found else None
    processor = TokenformerProcessor.for_model(model.config, tokenizer, images)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    report.save(folder / REPORT)
