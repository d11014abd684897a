"""A model that has read something: what pruning and joining lose cannot be seen on noise."""

from typing import Any

import pytest

LENGTH = 64


@pytest.fixture(scope="session")
def text() -> Any:
    """Some of Python's own sources, as bytes."""
    import torch

    from tokenformer.data.standard_library import standard_library

    return torch.from_numpy(standard_library()[0][:200_000].astype("int64"))


@pytest.fixture(scope="session")
def reader(text: Any) -> Any:
    """reader(theta): a TokenFormer after some seconds of training on the first nine tenths."""
    import torch

    import tokenformer

    made: dict[str, Any] = {}

    def read(theta: str = "l2_gelu", steps: int = 150) -> Any:
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
                max_position_embeddings=LENGTH,
                variant="paper",
                positions="rotary",
                rotary_fraction=0.5,
                theta=theta,
            )
            made[theta] = tokenformer.TokenformerForCausalLM(config)
            train_on(made[theta], text[: len(text) * 9 // 10], steps)
        return made[theta]

    return read


@pytest.fixture(scope="session")
def seen(text: Any) -> Any:
    """Batches of what the reader was trained on."""
    return windows(text[: len(text) * 9 // 10], 64).split(16)


@pytest.fixture(scope="session")
def unseen(text: Any) -> Any:
    """What it was not, [64, LENGTH]."""
    return windows(text[len(text) * 9 // 10 :], 64)


def windows(tokens: Any, count: int) -> Any:
    import torch

    starts = torch.linspace(0, len(tokens) - LENGTH, count).long()
    return torch.stack([tokens[start : start + LENGTH] for start in starts])


def train_on(model: Any, tokens: Any, steps: int, rate: float = 3e-3, before: Any = None) -> None:
    """`before` is called with the number of each step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for step in range(steps):
        if before:
            before(step)
        starts = torch.randint(len(tokens) - LENGTH, (8,))
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
