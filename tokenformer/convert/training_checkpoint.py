"""A checkpoint of a training run to a Hugging Face folder, as the run itself exports its model."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tokenformer.convert.image_processor import find_image_processor
from tokenformer.convert.model_writer import write_folder
from tokenformer.convert.receipt import Receipt
from tokenformer.convert.source import TOKENFORMER, Source
from tokenformer.convert.tokenizer import TOKENIZER, find_tokenizer
from tokenformer.data.corpus import TOKENIZER as CORPUS_TOKENIZER
from tokenformer.errors import CheckpointError, ConversionError
from tokenformer.models.configuration import LanguageConfig
from tokenformer.train.checkpoint import manifest, read_state
from tokenformer.train.checkpoint.reader import compare
from tokenformer.train.checkpoint.storage import Metadata, read_metadata, read_tensors
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.recipe import CONFIG
from tokenformer.train.run_record import MODEL
from tokenformer.train.training_state import build_saved_model

AVERAGE, LAST = "average", "last"
PREFIXES = {AVERAGE: "extra.ema.", LAST: "model."}


def convert_checkpoint(
    source: Source, out: Path, tokenizer: str | None = None, weights: str | None = None
) -> Receipt:
    """From `runs/NAME/checkpoints/step-...`. Where the run keeps an average of the weights, that is
    what it validates and exports, and so what is taken, unless `weights` is `last`."""
    ranks = Ranks()
    try:
        manifest.verify(source.path)
        model = build_saved_model(source.path, read_state(source.path, {"config": dict})["config"])
        with ranks.together(f"checkpoint {source.path} cannot be read"):
            saved = read_metadata(source.path)
        prefix = PREFIXES[choose(weights, saved)]
        chosen = {name: m for name, m in saved.items() if name.startswith(prefix)}
        compare({f"{prefix}{name}": p for name, p in model.named_parameters()}, chosen)
        targets = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in chosen.items()}
        with ranks.together(f"checkpoint {source.path} cannot be read"):
            read_tensors(source.path, targets, ranks)
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
    tensors = {name.removeprefix(prefix): tensor for name, tensor in targets.items()}
    return written(source, model.config, tensors, tokenizer, out)


def written(
    source: Source, config: Any, tensors: dict[str, Tensor], tokenizer: str | None, out: Path
) -> Receipt:
    """The folder, with the tokenizer or the image processor of the run."""
    told = partial(Receipt.of, source, config, tensors, to=TOKENFORMER)
    if isinstance(config, LanguageConfig):
        found = find_tokenizer(tokenizer, tokenizer_folder(source.path), config.vocab_size)
        write_folder(config, tensors, None if found is None else found.tokenizer, out)
        return told(tokenizer=None if found is None else found.origin)
    if tokenizer is not None:
        raise ConversionError(f"--tokenizer {tokenizer} is not for a model of images")
    run = run_of(source.path)
    images = find_image_processor(run / MODEL, run, config)
    write_folder(config, tensors, images.processor, out)
    return told(image_processor=images.origin)


def choose(weights: str | None, saved: Metadata) -> str:
    kept = any(name.startswith(PREFIXES[AVERAGE]) for name in saved)
    if weights not in (None, *PREFIXES):
        raise ConversionError(f"--weights {weights} is unknown; choose {AVERAGE} or {LAST}")
    if weights == AVERAGE and not kept:
        raise ConversionError(f"--weights {AVERAGE}: the run kept no average of its weights")
    return weights or (AVERAGE if kept else LAST)


def run_of(path: Path) -> Path:
    return path.resolve().parent.parent


def tokenizer_folder(path: Path) -> Path:
    """That of the run's own export, or of the corpus that the run was told to train on."""
    run = run_of(path)
    if (run / MODEL / TOKENIZER).exists():
        return run / MODEL
    try:
        corpus = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))["data"]["corpus"]
        return Path(corpus) / CORPUS_TOKENIZER
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return path  # which has none
