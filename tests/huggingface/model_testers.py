"""Small models in the form that transformers' ModelTesterMixin asks for."""

import unittest
from typing import Any

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import tokenformer
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.models.image_text import TokenformerImageTextModel
from tokenformer.models.image_text_processing import CHAT_TEMPLATE, add_image_token
from tokenformer.models.language import TokenformerModel, TransformerModel
from tokenformer.models.vision import TokenformerVisionModel, TransformerVisionModel

BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"qkv_tokens": 24, "output_tokens": 20, "ffn_tokens": 44}
TEXT = {"vocab_size": 99, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 30, "patch_size": 6, "num_channels": 3}
MLP = {"intermediate_size": 40}

LANGUAGE: dict[str, Any] = {
    "tokenformer": (
        tokenformer.TokenformerConfig,
        {**BLOCKS, **TEXT, **TOKENS},
        (TokenformerModel, tokenformer.TokenformerForCausalLM),
    ),
    "transformer": (
        tokenformer.TransformerConfig,
        {**BLOCKS, **TEXT, **MLP},
        (TransformerModel, tokenformer.TransformerForCausalLM),
    ),
    "llama": (LlamaConfig, {**BLOCKS, **TEXT, **MLP}, (LlamaModel, LlamaForCausalLM)),
    "gpt_neox": (
        GPTNeoXConfig,
        {**BLOCKS, **TEXT, **MLP, "hidden_size": 64},  # a quarter of each head rotates: 4 channels
        (GPTNeoXModel, GPTNeoXForCausalLM),
    ),
}
VISION: dict[str, Any] = {
    "tokenformer": (
        tokenformer.TokenformerVisionConfig,
        {**BLOCKS, **IMAGE, **TOKENS},
        (TokenformerVisionModel, tokenformer.TokenformerForImageClassification),
    ),
    "transformer": (
        tokenformer.TransformerVisionConfig,
        {**BLOCKS, **IMAGE, **MLP},
        (TransformerVisionModel, tokenformer.TransformerForImageClassification),
    ),
    "vit": (ViTConfig, {**BLOCKS, **IMAGE, **MLP}, (ViTModel, ViTForImageClassification)),
}
IMAGE_ID = 3
SMALL_IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3}
POSITIONS = 1 + (SMALL_IMAGE["image_size"] // SMALL_IMAGE["patch_size"]) ** 2


def joint_model(mode: str) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    own = {"mode": mode, "new_tokens": 5, "image_token_id": IMAGE_ID}
    vision = {**BLOCKS, **SMALL_IMAGE, "qkv_tokens": 16, "output_tokens": 18, "ffn_tokens": 40}
    return (
        tokenformer.TokenformerImageTextConfig,
        {**BLOCKS, **TEXT, **TOKENS, **own, "vision_config": vision},
        (TokenformerImageTextModel, tokenformer.TokenformerForImageTextToText),
    )


IMAGE_TEXT: dict[str, Any] = {
    **{mode: joint_model(mode) for mode in ("routed", "shared", "projector")},
    "llava": (
        LlavaConfig,
        {
            "text_config": {**BLOCKS, **TEXT, **MLP, "model_type": "llama"},
            "vision_config": {
                **BLOCKS,
                **SMALL_IMAGE,
                **MLP,
                "model_type": "clip_vision_model",
                "projection_dim": 32,
            },
            "image_token_index": IMAGE_ID,
            "vision_feature_select_strategy": "full",  # with the class token
            "vision_feature_layer": -1,
        },
        (LlavaModel, LlavaForConditionalGeneration),
    ),
}

# The mixin finds out by name which classes take which labels; these are its names for ours.
NAMES = {
    "MODEL_MAPPING_NAMES": [
        TokenformerModel,
        TransformerModel,
        TokenformerVisionModel,
        TransformerVisionModel,
        TokenformerImageTextModel,
    ],
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": [
        tokenformer.TokenformerForCausalLM,
        tokenformer.TransformerForCausalLM,
    ],
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": [tokenformer.TokenformerForImageTextToText],
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": [
        tokenformer.TokenformerForImageClassification,
        tokenformer.TransformerForImageClassification,
    ],
}


def with_our_names(common: Any) -> Any:
    """The module of the mixin, which then knows our classes too."""
    get_values = common.get_values
    ours = {id(getattr(common, name)): classes for name, classes in NAMES.items()}

    def get_all_values(mapping: Any) -> list[Any]:
        return [*get_values(mapping), *(c.__name__ for c in ours.get(id(mapping), []))]

    common.get_values = get_all_values
    return common


class Tester:
    """`model_tester` of a test case: sizes, a configuration and a batch."""

    is_training = True
    batch_size = 3

    def __init__(self, config_class: Any, options: dict[str, Any]) -> None:
        self.config_class, self.options = config_class, options
        for name, value in options.items():
            setattr(self, name, value)

    def get_config(self) -> Any:
        return self.config_class(**self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.get_config(), self.inputs()

    def inputs(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class LanguageTester(Tester):
    seq_length = 7

    def inputs(self) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, TEXT["vocab_size"], (self.batch_size, self.seq_length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class VisionTester(Tester):
    seq_length = 1 + (IMAGE["image_size"] // IMAGE["patch_size"]) ** 2
    num_masks, mask_length = 12, seq_length - 1  # of the models that take `bool_masked_pos`

    def inputs(self) -> dict[str, torch.Tensor]:
        side = IMAGE["image_size"]
        return {"pixel_values": torch.rand(self.batch_size, IMAGE["num_channels"], side, side)}


class ImageTextTester(Tester):
    """An image, then text, in every row."""

    seq_length = encoder_seq_length = POSITIONS + 7

    def __init__(self, config_class: Any, options: dict[str, Any]) -> None:
        super().__init__(config_class, BLOCKS | TEXT | options)
        self.given = options

    def get_config(self) -> Any:
        return self.config_class(**self.given)

    def inputs(self) -> dict[str, torch.Tensor]:
        ids = torch.randint(IMAGE_ID + 1, TEXT["vocab_size"], (self.batch_size, self.seq_length))
        ids[:, :POSITIONS] = IMAGE_ID
        side = SMALL_IMAGE["image_size"]
        pixels = torch.rand(self.batch_size, SMALL_IMAGE["num_channels"], side, side)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def language_case(common: Any, generation: type, name: str) -> type[unittest.TestCase]:
    config_class, options, classes = LANGUAGE[name]

    class Case(common.ModelTesterMixin, generation, unittest.TestCase):  # type: ignore[misc, valid-type, name-defined]
        all_model_classes = classes
        test_can_init_all_missing_weights_before_2023 = True

        def setUp(self) -> None:
            self.model_tester = LanguageTester(config_class, options)

    return Case


def vision_case(common: Any, name: str) -> type[unittest.TestCase]:
    config_class, options, classes = VISION[name]

    class Case(common.ModelTesterMixin, unittest.TestCase):  # type: ignore[misc, name-defined]
        all_model_classes = classes
        test_resize_embeddings = False
        test_can_init_all_missing_weights_before_2023 = True

        def setUp(self) -> None:
            self.model_tester = VisionTester(config_class, options)

    return Case


def image_text_case(common: Any, generation: type, name: str) -> type[unittest.TestCase]:
    config_class, options, classes = IMAGE_TEXT[name]

    class Case(common.ModelTesterMixin, generation, unittest.TestCase):  # type: ignore[misc, valid-type, name-defined]
        all_model_classes = classes
        _is_composite = True
        test_can_init_all_missing_weights_before_2023 = True

        def setUp(self) -> None:
            self.model_tester = ImageTextTester(config_class, options)

    return Case


def processor_case(processing: Any) -> type[unittest.TestCase]:
    class Case(processing.ProcessorTesterMixin, unittest.TestCase):  # type: ignore[misc, name-defined]
        processor_class = tokenformer.TokenformerProcessor

        @classmethod
        def _setup_tokenizer(cls) -> Any:
            tokenizer = byte_tokenizer()
            add_image_token(tokenizer)
            return tokenizer

        @classmethod
        def _setup_image_processor(cls) -> Any:
            return tokenformer.TokenformerImageProcessor.for_size(16)

        @staticmethod
        def prepare_processor_dict() -> dict[str, Any]:
            return {"patch_size": 8, "class_tokens": 1, "chat_template": CHAT_TEMPLATE}

    return Case
