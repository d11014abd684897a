"""Samples of a prepared corpus, for verbs that look at what a model does on text."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenformer.cli.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 8
LONGEST = 512


def read_samples(
    data: Path, *, split: str, sequences: int, length: int, vocab_size: int
) -> "list[Tensor]":
    """Token ids [B, T] of sequences spread over a split."""
    import torch

    from tokenformer.data.batches import fixed_batches
    from tokenformer.data.corpus import Corpus

    corpus = Corpus(data)
    if corpus.vocab_size > vocab_size:
        raise InputError(
            f"--data {data} has a vocabulary of {corpus.vocab_size}, the model one of "
            f"{vocab_size}; prepare the text with the model's tokenizer"
        )
    found = fixed_batches(corpus.split(split), batch_size=1, length=length, count=sequences)
    return list(torch.cat(found)[:, :-1].split(BATCH_SIZE))
