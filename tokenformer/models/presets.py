"""Sizes of the paper's tables, the released OpenWebText2 pair and the Transformer baselines.

Plain data, without heavy imports. Used by `TokenformerConfig.from_preset("124m")` and
`TransformerConfig.from_preset("354m")`.
"""

from typing import Any


def _tokenformer(layers: int, width: int, heads: int, tokens: int, length: int) -> dict[str, Any]:
    """In every published size the feed-forward layer has four times the tokens of attention."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "qkv_tokens": tokens,
        "output_tokens": tokens,
        "ffn_tokens": 4 * tokens,
        "max_position_embeddings": length,
    }


def _transformer(width: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": 12,
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "max_position_embeddings": 1024,
    }


TOKENFORMER_PRESETS: dict[str, dict[str, Any]] = {
    # Progressive scaling on OpenWebText: one width, one depth, more tokens.
    "124m": _tokenformer(12, 768, 12, 576, 1024),
    "354m": _tokenformer(12, 768, 12, 2140, 1024),
    "757m": _tokenformer(12, 768, 12, 4850, 1024),
    "1.4b": _tokenformer(12, 768, 12, 8620, 1024),
    # The four released Pile models.
    "150m": _tokenformer(12, 768, 12, 768, 2048),
    "450m": _tokenformer(24, 1024, 16, 1024, 2048),
    "900m": _tokenformer(32, 1280, 16, 1280, 2048),
    "1.5b": _tokenformer(40, 1536, 16, 1536, 2048),
    # The released growth run on OpenWebText2, before and after.
    "owt2-354m": _tokenformer(24, 1024, 16, 768, 2048),
    "owt2-757m": _tokenformer(24, 1024, 16, 1792, 2048),
}

TRANSFORMER_PRESETS: dict[str, dict[str, Any]] = {
    # The progressive-scaling baselines; their widths follow from the paper's token-token FLOPs.
    "124m": _transformer(768),
    "354m": _transformer(1408),
    "757m": _transformer(2112),
    "1.4b": _transformer(2944),
}


def _image_size(layers: int, width: int, heads: int) -> dict[str, Any]:
    """ImageNet-1K at 224 x 224 in patches of 16 x 16."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "num_labels": 1000,
    }


def _image_tokens(tokens: int) -> dict[str, Any]:
    return {"qkv_tokens": tokens, "output_tokens": tokens, "ffn_tokens": 4 * tokens}


VISION_TRANSFORMER_PRESETS: dict[str, dict[str, Any]] = {
    # ViT-B/16 and ViT-L/16; the TokenFormer sizes named `match` have as many parameters.
    "base": _image_size(12, 768, 12),
    "large": _image_size(24, 1024, 16),
}

VISION_TOKENFORMER_PRESETS: dict[str, dict[str, Any]] = {
    "base-match": VISION_TRANSFORMER_PRESETS["base"] | _image_tokens(576),
    "base": VISION_TRANSFORMER_PRESETS["base"] | _image_tokens(768),
    # The paper prints 768 feed-forward tokens, a typo: its parameter count needs 3072.
    "large-match": VISION_TRANSFORMER_PRESETS["large"] | _image_tokens(768),
    "large": VISION_TRANSFORMER_PRESETS["large"] | _image_tokens(1024),
}

IMAGE_TEXT_PRESETS: dict[str, dict[str, Any]] = {
    # A vision and a language model of equal width and depth, to be joined.
    "base+124m": {"vision": "base", "language": "124m"},
}


def preset(name: str, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    try:
        return dict(table[name.lower()])
    except KeyError:
        raise ValueError(f"preset {name!r} is unknown; choose one of {', '.join(table)}") from None
