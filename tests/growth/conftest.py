"""Text, and models trained on it: what pruning and merging lose only shows in a trained model."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def text() -> Any:
    """Some of Python's own sources, as bytes."""
    import torch

    from tokenformer.data.standard_library import standard_library

    return torch.from_numpy(standard_library()[0][:200_000].astype("int64"))


@pytest.fixture(scope="session")
def text_model(text: Any) -> Any:
    """text_model(theta): a TokenFormer after some seconds of training on the first nine tenths."""
    import torch

    import tokenformer
    from tests.support.growth import TEXT_LENGTH, train_on_text

    made: dict[str, Any] = {}

    def make(theta: str = "l2_gelu", steps: int = 150) -> Any:
        if theta not in made:
            torch.manual_seed(0)
            config = tokenformer.TokenformerConfig(
                vocab_size=257,
                hidden_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                qkv_tokens=48,
                output_tokens=48,
                ffn_tokens=128,
                max_position_embeddings=TEXT_LENGTH,
                variant="paper",
                positions="rotary",
                rotary_fraction=0.5,
                theta=theta,
            )
            made[theta] = tokenformer.TokenformerForCausalLM(config)
            train_on_text(made[theta], text[: len(text) * 9 // 10], steps)
        return made[theta]

    return make


@pytest.fixture(scope="session")
def train_batches(text: Any) -> Any:
    """Batches of the text that `text_model` was trained on."""
    from tests.support.growth import evenly_spaced

    return evenly_spaced(text[: len(text) * 9 // 10], 64).split(16)


@pytest.fixture(scope="session")
def held_out(text: Any) -> Any:
    """Held-out text, [64, TEXT_LENGTH]."""
    from tests.support.growth import evenly_spaced

    return evenly_spaced(text[len(text) * 9 // 10 :], 64)
