"""A corpus that every machine has: the sources of Python's standard library, as bytes.

About eleven megabytes of English and code. Every twentieth file is held out for validation.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenformer.data.byte_tokenizer import END_OF_TEXT
from tokenformer.data.corpus import TokenIds

# Installed packages and Python's own tests differ from machine to machine; `encodings` and
# `pydoc_data` are tables, neither English nor code.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
HELD_OUT_EVERY = 20


def standard_library() -> tuple[TokenIds, TokenIds]:
    """Return training and validation tokens; each file ends with the end-of-text token."""
    files = list(source_files(Path(sysconfig.get_path("stdlib"))))
    if not files:
        raise FileNotFoundError(
            f"no Python sources under {sysconfig.get_path('stdlib')}; the demo needs a Python "
            "installed with its standard library as .py files"
        )
    documents = [file.read_bytes() for file in files]
    train = [text for index, text in enumerate(documents) if index % HELD_OUT_EVERY]
    return encode_documents(train), encode_documents(documents[::HELD_OUT_EVERY])


def source_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            yield path


def encode_documents(documents: list[bytes]) -> TokenIds:
    end = np.array([END_OF_TEXT], dtype=np.uint16)
    parts = [part for text in documents for part in (np.frombuffer(text, dtype=np.uint8), end)]
    return np.concatenate(parts, dtype=np.uint16) if parts else np.empty(0, dtype=np.uint16)
