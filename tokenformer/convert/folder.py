"""A Hugging Face folder written from tensors: configuration, weights, generation, tokenizer."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tokenformer.convert.receipt import Receipt
from tokenformer.convert.source import TOKENFORMER, Source
from tokenformer.convert.tokenizer import FoundTokenizer
from tokenformer.models.catalogue import blank
from tokenformer.models.configuration import LanguageConfig
from tokenformer.train.tensors import storable

SHARD = "2GB"


def write_folder(
    source: Source,
    config: LanguageConfig,
    tensors: Mapping[str, Tensor],
    found: FoundTokenizer | None,
    out: Path,
) -> Receipt:
    """Tensors that are memory-mapped go straight from their file into the new one."""
    dtype = next(iter(tensors.values())).dtype
    model = blank(config).to(dtype)
    model.save_pretrained(out, state_dict=storable(tensors, copy=False), max_shard_size=SHARD)
    if found is not None:
        found.tokenizer.save_pretrained(out)
    origin = None if found is None else found.origin
    return Receipt.of(source, config, tensors, to=TOKENFORMER, tokenizer=origin)
