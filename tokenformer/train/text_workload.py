"""The data and models of a text recipe."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenformer.data.batches import sample_batch
from tokenformer.data.corpus import Corpus, open_corpus
from tokenformer.data.tokenizer import tokenizer_from_file
from tokenformer.errors import DataError
from tokenformer.models.configuration import (
    LanguageConfig,
    TokenformerConfig,
    TransformerConfig,
)
from tokenformer.models.language import LanguageModelForCausalLM
from tokenformer.models.loading import load_for_training
from tokenformer.models.model_classes import MODEL_CLASSES, build_on_meta
from tokenformer.train.options import Recipe
from tokenformer.train.recipe_inputs import new_config, text_splits
from tokenformer.train.task import LanguageTask

TEXT_FAMILIES: dict[str, type[Any]] = {
    "tokenformer": TokenformerConfig,
    "transformer": TransformerConfig,
}


class TextWorkload:
    """A corpus, its tokenizer, and the models and tasks that a run trains on it."""

    unit = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        from transformers import AutoTokenizer

        self.recipe = recipe
        self.corpus, self.train, self.held_out = text_splits(recipe)
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.corpus.tokenizer, trust_remote_code=False
        )

    def first_model(self) -> LanguageModelForCausalLM:
        """Return the initial model: on the meta device, or loaded from `start_from`."""
        options = self.recipe.model
        config_class = TEXT_FAMILIES[options.family]
        if options.start_from is not None:
            return self.load(options.start_from, MODEL_CLASSES[config_class])
        config = new_config(
            options,
            config_class,
            vocab_size=self.corpus.vocab_size,
            max_position_embeddings=self.recipe.data.length,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return build_on_meta(config)

    def load(self, folder: str, model_class: Any) -> LanguageModelForCausalLM:
        model = load_for_training(model_class, folder)
        file = Path(folder) / "tokenizer.json"
        tokenizer = tokenizer_from_file(file) if file.exists() else None
        open_corpus(
            self.corpus.folder, tokenizer, model.config.vocab_size
        )  # raises if they do not match
        return model

    def token_batches(self) -> Iterator[Tensor]:
        """Yield the token ids [B, T] of the run's batches, from the first sample on."""
        data, run = self.recipe.data, self.recipe.run
        for first in count(0, run.batch_size):
            yield sample_batch(
                self.train,
                length=data.length,
                seed=run.seed,
                first_sample=first,
                count=run.batch_size,
                mode=data.order,
            )[:, :-1]

    def preprocessor(self, model: LanguageModelForCausalLM) -> Any:
        """Return the tokenizer to export with the model."""
        return self.tokenizer

    def task(self, model: LanguageModelForCausalLM) -> LanguageTask:
        check_vocabulary(self.corpus, model.config)
        held_out = self.held_out
        return LanguageTask(
            model,
            self.train,
            held_out,
            length=self.recipe.data.length,
            seed=self.recipe.run.seed,
            order=self.recipe.data.order,
            bytes_per_token=1.0 if held_out is None else held_out.bytes / len(held_out),
        )


def check_vocabulary(corpus: Corpus, config: LanguageConfig) -> None:
    if corpus.vocab_size > config.vocab_size:
        raise DataError(
            f"{corpus.folder} has a vocabulary of {corpus.vocab_size}, the model one of "
            f"{config.vocab_size}; prepare the text with the model's tokenizer"
        )
