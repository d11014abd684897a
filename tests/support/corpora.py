"""Test corpora: compressed files, zip archives, and the text of a prepared corpus."""

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path
from typing import Any

import zstandard

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


def prepared_text(corpus: Path, out: Path, **read_options: Any) -> str:
    """Prepare a corpus of one text by bytes and return the text."""
    options = ReadOptions(**read_options)
    prepare(PrepareOptions(str(corpus), validation=0, read_options=options), out)
    return bytes(Corpus(out).split("train")[:-1].tolist()).decode()
