"""Test corpora: compressed files, zip archives, and small prepared corpora."""

import bz2
import gzip
import io
import lzma
import random
import zipfile
from pathlib import Path
from typing import Any

import zstandard

from tokenformer.cli import main
from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.data.text_encoding import ReadOptions

COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def prepare_small_corpus(folder: Path) -> Path:
    """Write eight texts of a few words under `folder`, prepare them and return the corpus."""
    texts, corpus = folder / "texts", folder / "corpus"
    texts.mkdir()
    words = random.Random(0).choices(["token", "key", "value", "grow", "\n"], k=20_000)
    for name in "abcdefgh":
        (texts / f"{name}.txt").write_text(" ".join(words[ord(name) :: 9]))
    main(["prepare", str(texts), "--out", str(corpus), "--validation", "0.3"])
    return corpus


def prepared_text(corpus: Path, out: Path, **read_options: Any) -> str:
    """Prepare a corpus of one text by bytes and return the text."""
    options = ReadOptions(**read_options)
    prepare(PrepareOptions(str(corpus), validation=0, read_options=options), out)
    return bytes(Corpus(out).split("train")[:-1].tolist()).decode()
