"""From a recipe to what it describes: corpus, model, task; and its record in the run's folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from tokenformer.data.corpus import Corpus
from tokenformer.data.shards import write_whole
from tokenformer.models.configuration import TokenformerConfig, TransformerConfig
from tokenformer.models.language import TokenformerForCausalLM, TransformerForCausalLM
from tokenformer.train.options import ModelOptions, Recipe
from tokenformer.train.task import LanguageTask

CONFIG = "config.yaml"
FAMILIES: dict[str, tuple[Any, Any]] = {
    "tokenformer": (TokenformerConfig, TokenformerForCausalLM),
    "transformer": (TransformerConfig, TransformerForCausalLM),
}
FIXED = ("model", "data")
"""Sections that a run cannot change once it has begun."""


def build_task(recipe: Recipe) -> tuple[LanguageTask, Any]:
    """The task of a recipe and its tokenizer. A fresh model is on the meta device; `distribute`
    gives it weights."""
    from transformers import AutoTokenizer

    if recipe.data.corpus is None:
        raise ValueError("data.corpus is missing; name a folder made by `tokenformer prepare`")
    corpus = Corpus(recipe.data.corpus)
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    validation = corpus.split("validation")
    model = build_model(recipe.model, corpus.vocab_size, recipe.data.length, tokenizer)
    task = LanguageTask(
        model,
        corpus.split("train"),
        validation,
        length=recipe.data.length,
        seed=recipe.run.seed,
        order=recipe.data.order,
        bytes_per_token=validation.bytes / len(validation),
    )
    return task, tokenizer


def build_model(options: ModelOptions, vocab_size: int, length: int, tokenizer: Any) -> Any:
    config_class, model_class = FAMILIES[options.family]
    if options.start_from is not None:
        model = model_class.from_pretrained(options.start_from)
        if model.config.vocab_size < vocab_size:
            raise ValueError(
                f"model.start_from={options.start_from} has a vocabulary of "
                f"{model.config.vocab_size}, the corpus one of {vocab_size}"
            )
        return model
    given = {
        "vocab_size": vocab_size,
        "max_position_embeddings": length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **options.options,
    }
    if options.preset is not None:
        config = config_class.from_preset(options.preset, **given)
    else:
        config = config_class(**given)
    with torch.device("meta"):
        return model_class(config)


def record(recipe: Recipe, folder: Path) -> None:
    """Keep the recipe beside the run; refuse another one there."""
    path = folder / CONFIG
    written = asdict(recipe)
    if path.exists():
        before = yaml.safe_load(path.read_text())
        for section in FIXED:
            for name, value in written[section].items():
                if before.get(section, {}).get(name) != value:
                    raise ValueError(
                        f"{folder} holds a run with {section}.{name} = "
                        f"{before.get(section, {}).get(name)!r}, not {value!r}; name another --out"
                    )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, yaml.safe_dump(plain(written), sort_keys=False))


def plain(value: Any) -> Any:
    """Tuples as lists, which YAML can write without tags."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
