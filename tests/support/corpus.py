"""A small prepared corpus for tests that start real runs."""

import random
from pathlib import Path

from tokenformer.cli import main


def prepare_small_corpus(folder: Path) -> Path:
    """Write eight texts of a few words under `folder`, prepare them and return the corpus."""
    texts, corpus = folder / "texts", folder / "corpus"
    texts.mkdir()
    words = random.Random(0).choices(["token", "key", "value", "grow", "\n"], k=20_000)
    for name in "abcdefgh":
        (texts / f"{name}.txt").write_text(" ".join(words[ord(name) :: 9]))
    main(["prepare", str(texts), "--out", str(corpus), "--validation", "0.3"])
    return corpus
