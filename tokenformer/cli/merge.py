"""`tokenformer merge`: merge the parameter tokens of two models."""

import sys
from json import dumps
from pathlib import Path

from tokenformer.cli.model import model_errors, resolve_folder
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
    """Merge the parameter tokens of two models of the same shape, such as two fine-tunes.

    Args:
        a: A model folder, a run folder or a hub name; its tokens come first.
        b: Another model, with the same tokenizer.
        out: New folder for the merged model, its tokenizer or image processor, and the report,
            growth.json. Required.
        embeddings: Which embeddings and norms to use: a, b or average.
        own: What to do with tokens that only one model has. average halves their values, so a layer
            becomes the mean of both; sum keeps them.
        no_verify: Skip verifying the weights (checksums.json, NaN, inf).
        json: Print the report as JSON.
    """
    if out is None:
        raise InputError("--out is missing; name a new folder for the merged model")
    first, second = resolve_folder(a), resolve_folder(b)

    from tokenformer.growth.model_folder import save_model_folder
    from tokenformer.growth.tokens.merge import merge
    from tokenformer.models.loading import load_tokenformer

    with model_errors(out), new_folder("--out", out) as folder:
        pair = [load_tokenformer(path, verify=not no_verify) for path in (first, second)]
        check_tokenizers(first, second)
        merged, report = merge(*pair, embeddings=embeddings, own=own)
        save_model_folder(merged, report, first, folder)
    sys.stdout.write(
        (dumps(report.asdict(), indent=2) if json else f"{report}\nSaved to {out}") + "\n"
    )


def check_tokenizers(a: Path, b: Path) -> None:
    """Refuse two different tokenizers; skipped if a folder has none."""
    files = [folder / TOKENIZER for folder in (a, b)]
    if all(file.exists() for file in files) and len({sha256(file) for file in files}) > 1:
        raise InputError(
            f"{files[0]} and {files[1]} differ; models with different tokenizers cannot be merged"
        )
