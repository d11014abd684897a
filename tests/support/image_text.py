"""Small vision, language and joint models, and images with text for them."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor

import tokenformer
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

SIDE, PATCH = 16, 8
POSITIONS = 1 + (SIDE // PATCH) ** 2
IMAGE_ID = VOCAB_SIZE


def make_halves(**options: Any) -> tuple[Any, Any]:
    """Return a vision and a language model of two layers, with other scales than token counts."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    } | options
    depth = shape["num_hidden_layers"]
    vision = tokenformer.TokenformerVisionConfig(
        image_size=SIDE,
        patch_size=PATCH,
        num_labels=3,
        qkv_tokens=20,
        output_tokens=18,
        ffn_tokens=41,
        scale_tokens={"ffn": [50.0] * depth},
        **shape,
    )
    language = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        rotary_fraction=0.5,
        qkv_tokens=24,
        output_tokens=[22 + layer for layer in range(depth)],
        ffn_tokens=48,
        scale_tokens={"q": [30.0, *[None] * (depth - 1)]},
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
        **shape,
    )
    models = (
        tokenformer.TokenformerForImageClassification(vision),
        tokenformer.TokenformerForCausalLM(language),
    )
    for model in models:  # far from their initialization, so that every part matters
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return models[0].eval(), models[1].eval()


def make_joint(mode: str = "routed", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    vision, language = make_halves()
    joint, _ = tokenformer.join_modalities(
        vision.to(dtype), language.to(dtype), new_tokens=7, mode=mode, **options
    )
    return joint.eval()


def train_new_tokens(joint: Any) -> Any:
    """Give the new tokens keys, as training does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in joint.modules():
            if isinstance(layer, tokenformer.Pattention):
                start = getattr(layer, "vision_tokens", 0)
                layer.key_tokens[start : start + 7].normal_(std=0.3)
    return joint


def make_processor(joint: Any) -> Any:
    return tokenformer.TokenformerProcessor.for_model(joint.config, byte_tokenizer())


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    """Images of random pixels, in a size that must be resized."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 20, 24, 3), generator=generator, dtype=torch.uint8)
    return [Image.fromarray(each.numpy()) for each in pixels]


def text_ids(text: str) -> Tensor:
    return torch.tensor([list(text.encode())])


def image_run() -> list[int]:
    """The ids of an image in the text, as the processor writes them."""
    return [IMAGE_ID] * POSITIONS + [END_OF_TEXT]
