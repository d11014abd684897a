"""What a recipe of text trains on and with."""

from pathlib import Path
from typing import Any

from tokenformer.data.corpus import Corpus
from tokenformer.data.model_corpus import open_corpus
from tokenformer.data.tokenizer import tokenizer_of_file
from tokenformer.models.catalogue import MODELS, blank
from tokenformer.models.configuration import TokenformerConfig, TransformerConfig
from tokenformer.models.loading import load_for_training
from tokenformer.train.options import Recipe
from tokenformer.train.task import LanguageTask

TEXT_FAMILIES: dict[str, type[Any]] = {
    "tokenformer": TokenformerConfig,
    "transformer": TransformerConfig,
}


class TextMaterials:
    """Text, its tokenizer, and models as they are asked for."""

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
        config_class = TEXT_FAMILIES[options.family]
        if options.start_from is not None:
            return self.loaded(options.start_from, MODELS[config_class])
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
        model = load_for_training(model_class, folder)
        file = Path(folder) / "tokenizer.json"
        tokenizer = tokenizer_of_file(file) if file.exists() else None
        open_corpus(self.corpus.folder, tokenizer, model.config.vocab_size)  # or it is refused
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
