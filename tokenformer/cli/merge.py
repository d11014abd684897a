"""`tokenformer merge`: two models' tokens in one, on disk."""

import sys
from json import dumps
from pathlib import Path

from tokenformer.cli.model import resolve_folder
from tokenformer.errors import InputError
from tokenformer.files import new_folder, sha256

TOKENIZER = "tokenizer.json"


def merge_models(
    a: str,
    b: str,
    out: Path | None = None,
    embeddings: str = "average",
    own: str = "average",
    no_verify: bool = False,
    json: bool = False,
) -> None:
    """Join the parameter tokens of two models of one shape, such as two fine-tunes of one model.

    Args:
        a: A model folder, a run folder or a hub name; its tokens come first.
        b: Another, with the same tokenizer.
        out: A new folder for the joined model, with the tokenizer or image processor and
            growth.json, the report; it must be given.
        embeddings: Whose embeddings and norms: a, b or average.
        own: Tokens that only one has: average, with half their value, so that a layer becomes the
            mean of both; or sum, with all of it.
        no_verify: Do not check the weights against checksums.json, nor for NaN and inf.
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the joined model")
    first, second = resolve_folder(a), resolve_folder(b)

    from safetensors import SafetensorError
    from transformers.utils import logging

    from tokenformer.growth.model_folder import save_model_folder
    from tokenformer.growth.tokens.merge import merge
    from tokenformer.models.loading import load_tokens

    logging.disable_progress_bar()
    try:
        with new_folder("--out", out) as folder:
            pair = [load_tokens(path, verify=not no_verify) for path in (first, second)]
            check_tokenizers(first, second)
            joined, report = merge(*pair, embeddings=embeddings, own=own)
            save_model_folder(joined, report, first, folder)
    except (ValueError, SafetensorError) as error:
        raise InputError(" ".join(str(error).split())) from None
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        logging.enable_progress_bar()
    sys.stdout.write(
        (dumps(report.asdict(), indent=2) if json else f"{report}\nKept in {out}") + "\n"
    )


def check_tokenizers(a: Path, b: Path) -> None:
    """The same id must mean the same text in both; without a tokenizer nothing can be told."""

    files = [folder / TOKENIZER for folder in (a, b)]
    if all(file.exists() for file in files) and len({sha256(file) for file in files}) > 1:
        raise InputError(
            f"{files[0]} and {files[1]} differ; models of different tokenizers cannot be joined"
        )
