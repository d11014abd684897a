"""The data and models of a recipe for images with text."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenformer.data.augmentation_options import AugmentationOptions
from tokenformer.data.image_text_batches import ImageTextEncoder, ImageTextReader
from tokenformer.data.image_text_sources import AnyImageText, load_image_text
from tokenformer.data.tokenizer import load_tokenizer
from tokenformer.errors import CheckpointError, DataError, one_line
from tokenformer.models.configuration import LanguageConfig, VisionConfig
from tokenformer.models.image_text import TokenformerForImageTextToText
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig
from tokenformer.models.image_text_processing import (
    IMAGE_TOKEN,
    TokenformerProcessor,
    add_image_token,
)
from tokenformer.models.loading import load_config, load_for_training
from tokenformer.models.model_classes import build_on_meta
from tokenformer.train.export import export
from tokenformer.train.image_text_task import ImageTextTask
from tokenformer.train.options import Recipe
from tokenformer.train.recipe_inputs import check_image_text, new_config
from tokenformer.train.run_record import MODEL

PROCESSOR = "processor"
"""The key of the processor in a checkpoint's state."""
ANY_BYTES = "surrogateescape"
"""How bytes that are not UTF-8 become text, and back."""


class ImageTextWorkload:
    """Images with text, and the models and tasks that a run trains on them."""

    unit = "samples"
    export_name = MODEL

    def __init__(self, recipe: Recipe) -> None:
        data = recipe.data
        check_image_text(recipe)
        assert data.image_text is not None
        if recipe.augmentation != AugmentationOptions():
            raise ValueError("augmentation is for images with classes; leave it out")
        self.recipe = recipe
        splits = load_image_text(
            data.image_text,
            held_out_share=data.held_out_share if recipe.run.validate_every else 0,
            on_corrupt=data.on_corrupt,
        )
        self.train: AnyImageText = splits.train
        self.held_out = splits.held_out if recipe.run.validate_every else None
        self.processor: TokenformerProcessor | None = None
        self.files: dict[str, str] | None = None
        """Those of the processor."""

    def first_model(self) -> TokenformerForImageTextToText:
        """Return the initial model: on the meta device, or loaded from `start_from`."""
        options = self.recipe.model
        if options.start_from is not None:
            trained_config(options.start_from)
            model: TokenformerForImageTextToText = load_for_training(
                TokenformerForImageTextToText, options.start_from
            )
            return model
        built = build_on_meta(fresh_config(self.recipe))
        assert isinstance(built, TokenformerForImageTextToText)
        return built

    def saved_model(self, state: dict[str, Any]) -> TokenformerForImageTextToText:
        """Return the model of a checkpoint, on the meta device, and take over its processor."""
        self.files = state.get(PROCESSOR)
        model = build_on_meta(state["config"])
        assert isinstance(model, TokenformerForImageTextToText)
        return model

    def state(self) -> dict[str, Any]:
        """Keep the processor in every checkpoint: the folder of `start_from` may be gone when the
        run resumes."""
        return {PROCESSOR: self.files}

    def notes(self, model: TokenformerForImageTextToText) -> list[str]:
        return []

    def export(self, model: TokenformerForImageTextToText, folder: Path) -> None:
        export(model, self.preprocessor(model), folder)

    def token_batches(self) -> None:
        """A vision-language model does not grow."""

    def preprocessor(self, model: TokenformerForImageTextToText) -> TokenformerProcessor:
        """Return the processor to export with the model: that of the checkpoint, of the model the
        run started from, or a new one."""
        if self.processor is None:
            if self.files is None:
                self.files = pack_processor(self.first_processor(model))
            # Loaded also in a new run: one that was loaded is saved with more entries.
            self.processor = unpack_processor(self.files)
        return self.processor

    def first_processor(self, model: TokenformerForImageTextToText) -> TokenformerProcessor:
        start = self.recipe.model.start_from
        if start is not None:
            return load_processor(start)
        tokenizer = new_tokenizer(self.recipe.data.tokenizer)
        return TokenformerProcessor.for_model(model.config, tokenizer)

    def task(self, model: TokenformerForImageTextToText) -> ImageTextTask:
        rates = self.recipe.optimizer.part_rates
        if rates and not model.config.is_joined:
            raise ValueError(
                f"optimizer.part_rates={rates}: a model of mode projector has one set of tokens; "
                'use rates, such as {"*": 0, "model.images.projector.*": 1}'
            )
        length, context = self.recipe.data.length, model.config.max_position_embeddings
        encoder = ImageTextEncoder(self.preprocessor(model), length, context)
        positions = len(encoder.image_run) + length
        if positions > context:
            raise DataError(
                f"an image and data.length={length} tokens of text take {positions} positions, "
                f"more than the {context} of the model; lower data.length"
            )
        workers = self.recipe.data.workers
        return ImageTextTask(
            model,
            ImageTextReader(self.train, encoder, workers),
            None if self.held_out is None else ImageTextReader(self.held_out, encoder, workers),
            length=length,
            seed=self.recipe.run.seed,
        )


def fresh_config(recipe: Recipe) -> TokenformerImageTextConfig:
    """Return the configuration of a model with fresh weights, with the tokenizer of the recipe."""
    tokenizer = new_tokenizer(recipe.data.tokenizer)
    marker = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    config: TokenformerImageTextConfig = new_config(
        recipe.model,
        TokenformerImageTextConfig,
        # `<image>` needs no embedding if it is the last token.
        vocab_size=len(tokenizer) - int(marker == len(tokenizer) - 1),
        image_token_id=marker,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return config


def trained_config(start: str) -> TokenformerImageTextConfig:
    """Return the configuration of the model that a run starts from."""
    config = load_config(start)
    if not isinstance(config, TokenformerImageTextConfig):
        kinds = {LanguageConfig: "a language model", VisionConfig: "an image classifier"}
        found = (name for kind, name in kinds.items() if isinstance(config, kind))
        raise DataError(
            f"model.start_from={start} is {next(found, f'a {config.model_type} model')}, not a "
            "vision-language model; make one with `tokenformer join`"
        )
    return config


def new_tokenizer(name: str) -> Any:
    """Return the tokenizer of a fresh model, with `<image>`; see `data.tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    found = load_tokenizer(name, None)
    tokenizer = found.pretrained or PreTrainedTokenizerFast(
        tokenizer_object=found.backend,
        bos_token=found.end_of_text,
        eos_token=found.end_of_text,
        pad_token=found.end_of_text,
        clean_up_tokenization_spaces=False,
    )
    add_image_token(tokenizer)
    return tokenizer


def pack_processor(processor: TokenformerProcessor) -> dict[str, str]:
    """Return the files of a processor by name, as JSON values."""
    with TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return {
            str(path.relative_to(folder)): path.read_bytes().decode(errors=ANY_BYTES)
            for path in sorted(files)
        }


def unpack_processor(files: Any) -> TokenformerProcessor:
    damaged = CheckpointError("the checkpoint has no processor that can be loaded")
    if not isinstance(files, dict):
        raise damaged
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, name)
            inside = path.resolve().is_relative_to(Path(folder).resolve())
            if not inside or not isinstance(content, str):
                raise damaged
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode(errors=ANY_BYTES))
        try:
            return load_processor(folder)
        except DataError:
            raise damaged from None


def load_processor(folder: str) -> TokenformerProcessor:
    """Load the processor in a model folder or of a hub name."""
    try:
        found: TokenformerProcessor = TokenformerProcessor.from_pretrained(
            str(Path(folder)) if Path(folder).is_dir() else folder, trust_remote_code=False
        )
    except Exception as error:  # transformers can raise anything on a damaged folder
        raise DataError(f"{folder} has no processor: {one_line(error)}") from None
    return found
