"""From a recipe to what it describes: corpus, models, tasks; and its record in the run's folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from tokenformer.data.corpus import Corpus
from tokenformer.data.shards import write_whole
from tokenformer.models.catalogue import MODELS
from tokenformer.models.configuration import TokenformerConfig, TransformerConfig
from tokenformer.models.language import TokenformerForCausalLM, TransformerForCausalLM
from tokenformer.train.options import Recipe
from tokenformer.train.task import LanguageTask

CONFIG = "config.yaml"
FAMILIES: dict[str, tuple[Any, Any]] = {
    "tokenformer": (TokenformerConfig, TokenformerForCausalLM),
    "transformer": (TransformerConfig, TransformerForCausalLM),
}
FIXED = ("model", "data", "augmentation")
"""Sections that a run cannot change once it has begun."""


class Materials:
    """What a recipe trains on and with: text, tokenizer, and models as they are asked for."""

    unit = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        from transformers import AutoTokenizer

        if recipe.data.corpus is None:
            raise ValueError("data.corpus is missing; name a folder made by `tokenformer prepare`")
        self.recipe = recipe
        self.corpus = Corpus(recipe.data.corpus)
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.corpus.tokenizer, trust_remote_code=False
        )
        self.train, self.held_out = self.corpus.split("train"), self.corpus.split("validation")

    def first_model(self) -> Any:
        """The recipe's own: on the meta device, where `distribute` gives it weights, or loaded."""
        options = self.recipe.model
        if options.start_from is not None:
            return self.loaded(options.start_from, FAMILIES[options.family][1])
        config_class = FAMILIES[options.family][0]
        given = {
            "vocab_size": self.corpus.vocab_size,
            "max_position_embeddings": self.recipe.data.length,
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            **options.options,
        }
        if options.preset is not None:
            return blank(config_class.from_preset(options.preset, **given))
        return blank(config_class(**given))

    def loaded(self, folder: str, model_class: Any) -> Any:
        model = model_class.from_pretrained(folder)
        if model.config.vocab_size < self.corpus.vocab_size:
            raise ValueError(
                f"model.start_from={folder} has a vocabulary of {model.config.vocab_size}, the "
                f"corpus one of {self.corpus.vocab_size}"
            )
        return model

    def preprocessor(self, model: Any) -> Any:
        """What the model's text goes through, kept beside it."""
        return self.tokenizer

    def task(self, model: Any) -> LanguageTask:
        return LanguageTask(
            model,
            self.train,
            self.held_out,
            length=self.recipe.data.length,
            seed=self.recipe.run.seed,
            order=self.recipe.data.order,
            bytes_per_token=self.held_out.bytes / len(self.held_out),
        )


def blank(config: Any) -> Any:
    """A model of a configuration, or of one that was saved, on the meta device."""
    if isinstance(config, dict):
        config_class = {known.model_type: known for known in MODELS}[config["model_type"]]
        config = config_class.from_dict(config)
    with torch.device("meta"):
        return MODELS[type(config)](config)


def record(recipe: Recipe, folder: Path) -> None:
    """Keep the recipe beside the run; refuse another one there."""
    path = folder / CONFIG
    written = asdict(recipe)
    if path.exists():
        before = yaml.safe_load(path.read_text())
        for section in FIXED:
            known = before.get(section, {})  # an older record may lack options of today
            for name, value in plain(written[section]).items():
                if name in known and known[name] != value:
                    raise ValueError(
                        f"{folder} holds a run with {section}.{name} = {known[name]!r}, not "
                        f"{value!r}; name another --out"
                    )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, yaml.safe_dump(plain(written), sort_keys=False))


def plain(value: Any) -> Any:
    """Tuples as lists, which YAML can write without tags."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
