"""Turns text and images into the inputs of a vision-language model: ids and pixel values.

    processor = TokenformerProcessor.for_model(model.config, tokenizer)
    inputs = processor(text="<image>", images=image, return_tensors="pt")
    processor.batch_decode(model.generate(**inputs, max_new_tokens=50), skip_special_tokens=True)

Every `<image>` in the text becomes as many placeholders as the image has positions, followed by the
begin-of-text token: an image position predicts no text, so the first word needs another token to
be predicted from.
"""

from pathlib import Path
from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from transformers.models.auto.processing_auto import AutoProcessor
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin

from tokenformer.models.block_configuration import STUB_MODULE
from tokenformer.models.image_processing import TokenformerImageProcessor
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{{- "assistant: " -}}
{%- generation -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{{- eos_token -}}
{%- endgeneration -%}
{%- else -%}
{{- message.role + ": " -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{{- "<image>" if part.type == "image" else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- "\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "assistant: " -}}{%- endif -%}
"""


class TokenformerProcessor(ProcessorMixin):
    """An image processor and a tokenizer that has the token `<image>`.

    Args:
        image_processor: makes pixels of images.
        tokenizer: makes ids of text; it must have the token `<image>`.
        patch_size: that of the model, for the number of positions of an image.
        class_tokens: those of the model.
        chat_template: a Jinja template of conversations with images.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        class_tokens: int = 1,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        self.patch_size, self.class_tokens = patch_size, class_tokens
        self.image_token = IMAGE_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        if IMAGE_TOKEN not in tokenizer.get_vocab():
            raise ValueError(
                f"the tokenizer has no token {IMAGE_TOKEN}; use TokenformerProcessor.for_model"
            )
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def for_model(
        cls,
        config: TokenformerImageTextConfig,
        tokenizer: Any,
        image_processor: TokenformerImageProcessor | None = None,
    ) -> "TokenformerProcessor":
        """Return the processor of a model. `<image>` is added to the tokenizer if it is missing; by
        default images are resized to the model's size and normalized as ImageNet."""
        add_image_token(tokenizer)
        found = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        if found != config.image_token_id:
            raise ValueError(
                f"{IMAGE_TOKEN} is id {found} of the tokenizer and id {config.image_token_id} of "
                f"the model; join the models with image_token_id={found}"
            )
        vision = config.vision_config
        if image_processor is None:
            image_processor = TokenformerImageProcessor.for_size(
                vision.image_size, vision.num_channels
            )
        tokenizer.padding_side = "left"
        return cls(
            image_processor,
            tokenizer,
            patch_size=vision.patch_size,
            class_tokens=vision.class_tokens,
            chat_template=CHAT_TEMPLATE,
        )

    @property
    def end_of_image(self) -> str:
        """The token after an image, which the first word of the text is predicted from."""
        token: str = self.tokenizer.bos_token or self.tokenizer.eos_token or ""
        return token

    def image_positions(self, height: int, width: int) -> int:
        """Return the number of placeholders of an image of this size, in pixels of the model."""
        return self.class_tokens + (height // self.patch_size) * (width // self.patch_size)

    def image_text(self, height: int, width: int) -> str:
        """Return what takes the place of `<image>` in the text, for an image of this size."""
        return IMAGE_TOKEN * self.image_positions(height, width) + self.end_of_image

    def __call__(
        self, images: Any = None, text: str | list[str] | None = None, **options: Any
    ) -> BatchFeature:
        """Return `input_ids`, `attention_mask` and, with images, `pixel_values`.

        `images` is an image, a list of all images in the order of the text, or a list of lists of
        them, one list per text. `options` are those of the tokenizer and of the image processor;
        `text_kwargs` and `images_kwargs` are for one of them.
        """
        if text is None:
            raise ValueError(f"text is missing; it says with {IMAGE_TOKEN} where the images are")
        texts = [text] if isinstance(text, str) else list(text)
        given = flat_images(images, texts)
        marked = sum(each.count(IMAGE_TOKEN) for each in texts)
        if marked != len(given):
            raise ValueError(f"the text has {marked} times {IMAGE_TOKEN} for {len(given)} images")
        merged = self._merge_kwargs(
            ProcessingKwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs, **options
        )
        data: dict[str, Any] = {}
        text_options = {"return_token_type_ids": False, **merged["text_kwargs"]}
        # With these `apply_chat_template` finds the assistant's tokens after the images.
        name = "return_text_replacement_offsets"
        wants_offsets = text_options.pop(name, merged.get(name, False))
        offsets: list[Any] = [[] for _ in texts]
        if given:
            pixels = self.image_processor(given, **merged["images_kwargs"])
            data["pixel_values"] = pixels["pixel_values"]
            expanded = self.image_text(*data["pixel_values"][0].shape[1:])
            offsets = [replacements(each, expanded) for each in texts]
            texts = [each.replace(IMAGE_TOKEN, expanded) for each in texts]
        encoded = self.tokenizer(texts, **text_options)
        found = BatchFeature({**encoded, **data}, tensor_type=text_options.get("return_tensors"))
        if wants_offsets:
            found["text_replacement_offsets"] = offsets
        return found

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """Save as transformers does, with the stub that `auto_map` names if a model has not."""
        from tokenformer.models.model_card import STUB
        from tokenformer.models.saved_folder import write_stub

        folder = Path(save_directory)
        if not folder.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / STUB).exists():
                write_stub(folder, ["TokenformerImageProcessor", type(self).__name__])
        return super().save_pretrained(save_directory, *args, **options)

    def to_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().to_dict()
        if type(self) is TokenformerProcessor:
            output["auto_map"] = {"AutoProcessor": f"{STUB_MODULE}.{type(self).__name__}"}
        return output

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoProcessor") -> None:
        """Do nothing, as for our configurations: transformers would copy our source files."""


def add_image_token(tokenizer: Any) -> None:
    """Add `<image>` to a tokenizer, unless it has it."""
    if IMAGE_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [IMAGE_TOKEN]}, replace_extra_special_tokens=False
        )


def replacements(text: str, expanded: str) -> list[dict[str, Any]]:
    """Return where each `<image>` of a text is and where `expanded` is that takes its place, as
    transformers describes it."""
    found, start, moved = [], 0, 0
    for part in text.split(IMAGE_TOKEN)[:-1]:
        start += len(part)
        end, new = start + len(IMAGE_TOKEN), start + moved
        found.append(
            {
                "type": "image",
                "span": (start, end),
                "new_span": (new, new + len(expanded)),
                "text": IMAGE_TOKEN,
                "replacement": expanded,
            }
        )
        start, moved = end, moved + len(expanded) - len(IMAGE_TOKEN)
    return found


def flat_images(images: Any, texts: list[str]) -> list[Any]:
    """Return all images of a batch in one list, in the order of its text."""
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        return [images]
    if not any(isinstance(each, list | tuple) or each is None for each in images):
        return list(images)
    nested = [[] if each is None else list(each) for each in images]
    counts = [each.count(IMAGE_TOKEN) for each in texts]
    if counts != [len(each) for each in nested]:
        raise ValueError(
            f"the texts have {counts} times {IMAGE_TOKEN} for {[len(each) for each in nested]} "
            "images"
        )
    return [image for each in nested for image in each]


AutoProcessor.register(TokenformerImageTextConfig, TokenformerProcessor, exist_ok=True)
