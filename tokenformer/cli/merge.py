"""`tokenformer merge`: two models' tokens in one, on disk."""

import sys
from json import dumps
from pathlib import Path

from tokenformer.cli.errors import InputError
from tokenformer.cli.folder import new_folder

TOKENIZER = "tokenizer.json"


def merge_models(
    a: Path,
    b: Path,
    out: Path | None = None,
    embeddings: str = "average",
    own: str = "average",
    json: bool = False,
) -> None:
    """Join the parameter tokens of two models of one shape, such as two fine-tunes of one model.

    Args:
        a: A model folder; its tokens come first.
        b: Another, with the same tokenizer.
        out: A new folder for the joined model, with the tokenizer or image processor and
            growth.json, the report; it must be given.
        embeddings: Whose embeddings and norms: a, b or average.
        own: Tokens that only one has: average, with half their value, so that a layer becomes the
            mean of both; or sum, with all of it.
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the joined model")

    from safetensors import SafetensorError
    from transformers.utils import logging

    from tokenformer.cli.model import load_tokenformer
    from tokenformer.growth.folder import save
    from tokenformer.growth.merge import merge

    logging.disable_progress_bar()
    try:
        with new_folder("--out", out) as folder:
            pair = [load_tokenformer(path) for path in (a, b)]
            check_tokenizers(a, b)
            joined, report = merge(*pair, embeddings=embeddings, own=own)
            save(joined, report, a, folder)
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
    from tokenformer.data.corpus import sha256_of

    files = [folder / TOKENIZER for folder in (a, b)]
    if all(file.exists() for file in files) and len({sha256_of(file) for file in files}) > 1:
        raise InputError(
            f"{files[0]} and {files[1]} differ; models of different tokenizers cannot be joined"
        )
