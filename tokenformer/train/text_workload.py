"""The data and models of a text recipe."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenformer.data.batches import fixed_batches, sample_batch
from tokenformer.data.corpus import Corpus, Split, open_corpus
from tokenformer.data.examples import ExampleSplit
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
from tokenformer.train.example_task import ExampleTask
from tokenformer.train.export import export
from tokenformer.train.options import Recipe
from tokenformer.train.recipe_inputs import TextSplit, new_config, text_splits
from tokenformer.train.run_record import MODEL
from tokenformer.train.task import LanguageTask

TEXT_FAMILIES: dict[str, type[Any]] = {
    "tokenformer": TokenformerConfig,
    "transformer": TransformerConfig,
}


class TextWorkload:
    """A corpus, its tokenizer, and the models and tasks that a run trains on it."""

    unit = "tokens"
    export_name = MODEL
    unfrozen: tuple[str, ...] = ()

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

    def load_base(self, folder: str, family: str, seed: int) -> LanguageModelForCausalLM:
        """Load a model to adapt, which may be quantized."""
        return self.load(folder, MODEL_CLASSES[TEXT_FAMILIES[family]], quantized=True)

    def load(
        self, folder: str, model_class: Any, *, quantized: bool = False
    ) -> LanguageModelForCausalLM:
        model = load_for_training(model_class, folder, quantized=quantized)
        self.check_tokenizer(folder, model)
        return model

    def check_tokenizer(self, folder: str, model: LanguageModelForCausalLM) -> None:
        """Raise if the corpus was not prepared with the tokenizer of the model in `folder`."""
        file = Path(folder) / "tokenizer.json"
        tokenizer = tokenizer_from_file(file) if file.exists() else None
        open_corpus(self.corpus.folder, tokenizer, model.config.vocab_size)

    def token_batches(self) -> Iterator[Tensor]:
        """Yield the token ids [B, T] of the run's batches, from the first sample on."""
        data, run = self.recipe.data, self.recipe.run
        for first in count(0, run.batch_size):
            yield sample_batch(
                self.train.split if isinstance(self.train, ExampleSplit) else self.train,
                length=data.length,
                seed=run.seed,
                first_sample=first,
                count=run.batch_size,
                mode=data.order,
            )[:, :-1]

    def saved_model(self, state: dict[str, Any]) -> LanguageModelForCausalLM:
        """Return the model of a checkpoint, on the meta device."""
        model = build_on_meta(state["config"])
        assert isinstance(model, LanguageModelForCausalLM)
        return model

    def state(self) -> dict[str, Any]:
        return {}

    def notes(self, model: LanguageModelForCausalLM) -> list[str]:
        length = self.recipe.data.length
        if not isinstance(self.train, ExampleSplit) or not (cut := self.train.count_longer(length)):
            return []
        return [
            f"{cut:,} of {self.train.count:,} examples are longer than {length:,} tokens and lose "
            "the start of their prompt; a larger data.length keeps it"
        ]

    def inputs(self, model: LanguageModelForCausalLM, count: int) -> list[Tensor]:
        """Return at most `count` inputs [1, T] that are spread over the training split."""
        length = self.recipe.data.length
        if isinstance(self.train, ExampleSplit):
            examples = self.train.fixed_batches(batch_size=1, length=length, count=count)
            rows = [torch.from_numpy(row) for row in examples]
            return [torch.maximum(row, ~row)[:, :-1] for row in rows]
        found = fixed_batches(self.train, batch_size=1, length=length, count=count)
        return [row[:, :-1] for row in found]

    def export(self, model: LanguageModelForCausalLM, folder: Path) -> None:
        export(model, self.preprocessor(model), folder)

    def preprocessor(self, model: LanguageModelForCausalLM) -> Any:
        """Return the tokenizer to export with the model."""
        return self.tokenizer

    def task(self, model: LanguageModelForCausalLM) -> LanguageTask:
        check_vocabulary(self.corpus, model.config)
        return make_task(
            model,
            self.train,
            self.held_out,
            length=self.recipe.data.length,
            seed=self.recipe.run.seed,
            order=self.recipe.data.order,
        )


def make_task(
    model: LanguageModelForCausalLM,
    train: TextSplit,
    held_out: TextSplit | None,
    **options: Any,
) -> LanguageTask:
    """Return the task of a corpus of text or of examples."""
    if isinstance(train, ExampleSplit):
        assert not isinstance(held_out, Split)
        if held_out is not None:
            options["bytes_per_token"] = held_out.trained_bytes / held_out.trained_tokens
        return ExampleTask(model, train.split, None, examples=train, held_out=held_out, **options)
    assert not isinstance(held_out, ExampleSplit)
    if held_out is not None:
        options["bytes_per_token"] = held_out.bytes / len(held_out)
    return LanguageTask(model, train, held_out, **options)


def check_vocabulary(corpus: Corpus, config: LanguageConfig) -> None:
    if corpus.vocab_size > config.vocab_size:
        raise DataError(
            f"{corpus.folder} has a vocabulary of {corpus.vocab_size}, the model one of "
            f"{config.vocab_size}; prepare the text with the model's tokenizer"
        )
