"""Converting a checkpoint of a training run to a Hugging Face folder, as the run exports it."""

from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor

from tokenformer.convert.conversion_summary import ConversionSummary
from tokenformer.convert.model_writer import write_folder
from tokenformer.convert.source import TOKENFORMER, Source
from tokenformer.convert.source_tokenizer import TOKENIZER, find_tokenizer
from tokenformer.data.corpus import TOKENIZER as CORPUS_TOKENIZER
from tokenformer.errors import CheckpointError, ConversionError
from tokenformer.models.configuration import LanguageConfig, VisionConfig
from tokenformer.models.image_processing import TokenformerImageProcessor
from tokenformer.train.checkpoint import manifest, read_state
from tokenformer.train.checkpoint.reader import compare
from tokenformer.train.checkpoint.storage import Metadata, read_metadata, read_tensors
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.recipe import CONFIG
from tokenformer.train.run_record import MODEL
from tokenformer.train.training_state import build_saved_model

IMAGE_PROCESSOR = "preprocessor_config.json"
AVERAGE, LAST = "average", "last"
PREFIXES = {AVERAGE: "extra.ema.", LAST: "model."}


def convert_checkpoint(
    source: Source, out: Path, tokenizer: str | None = None, weights: str | None = None
) -> ConversionSummary:
    """Convert `runs/NAME/checkpoints/step-...`. If the run keeps a moving average of the weights,
    which it then validates and exports, the average is converted unless `weights` is `last`."""
    ranks = Ranks()
    try:
        manifest.verify(source.path)
        model = build_saved_model(source.path, read_state(source.path, {"config": dict}))
        with ranks.together(f"checkpoint {source.path} cannot be read"):
            saved = read_metadata(source.path)
        prefix = PREFIXES[choose_weights(weights, saved)]
        chosen = {name: m for name, m in saved.items() if name.startswith(prefix)}
        compare({f"{prefix}{name}": p for name, p in model.named_parameters()}, chosen)
        targets = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in chosen.items()}
        with ranks.together(f"checkpoint {source.path} cannot be read"):
            read_tensors(source.path, targets, ranks)
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
    tensors = {name.removeprefix(prefix): tensor for name, tensor in targets.items()}
    return write_model(source, model.config, tensors, tokenizer, out)


def write_model(
    source: Source,
    config: LanguageConfig | VisionConfig,
    tensors: dict[str, Tensor],
    tokenizer: str | None,
    out: Path,
) -> ConversionSummary:
    """Write the model folder with the tokenizer or image processor of the run."""
    summary = partial(ConversionSummary.of, source, config, tensors, to=TOKENFORMER)
    if isinstance(config, LanguageConfig):
        found = find_tokenizer(tokenizer, tokenizer_folder(source.path), config.vocab_size)
        write_folder(config, tensors, None if found is None else found.tokenizer, out)
        return summary(tokenizer=None if found is None else found.location)
    if tokenizer is not None:
        raise ConversionError(f"--tokenizer {tokenizer} does not apply to an image classifier")
    processor, location = find_image_processor(run_of(source.path), config)
    write_folder(config, tensors, processor, out)
    return summary(image_processor=location)


def find_image_processor(run: Path, config: VisionConfig) -> tuple[TokenformerImageProcessor, str]:
    """Return an image processor and where it was found: in the run's exported model, or in its
    recipe; outside of a run, one for the model's image size."""
    saved = run / MODEL / IMAGE_PROCESSOR
    if saved.exists():
        return TokenformerImageProcessor.from_pretrained(saved.parent), str(saved)
    crop_share, location = 1.0, "the model's image size"
    try:
        recipe = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        crop_share, location = recipe["data"]["crop_share"], str(run / CONFIG)
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        pass
    processor = TokenformerImageProcessor.for_size(
        config.image_size, config.num_channels, crop_share=crop_share
    )
    return processor, location


def choose_weights(weights: str | None, saved: Metadata) -> str:
    averaged = any(name.startswith(PREFIXES[AVERAGE]) for name in saved)
    if weights not in (None, *PREFIXES):
        raise ConversionError(f"--weights {weights} is unknown; choose {AVERAGE} or {LAST}")
    if weights == AVERAGE and not averaged:
        raise ConversionError(f"--weights {AVERAGE}: the run has no moving average of its weights")
    return weights or (AVERAGE if averaged else LAST)


def run_of(path: Path) -> Path:
    return path.resolve().parent.parent


def tokenizer_folder(path: Path) -> Path:
    """Return the folder of the run's exported model, or else of its corpus."""
    run = run_of(path)
    if (run / MODEL / TOKENIZER).exists():
        return run / MODEL
    try:
        corpus = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))["data"]["corpus"]
        return Path(corpus) / CORPUS_TOKENIZER
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return path  # without a tokenizer
