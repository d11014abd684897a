"""The application of `tokenformer serve` in this process, with an untrained model."""

from collections.abc import Iterator
from typing import Any

import pytest

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'sum' %}{{ 1 + message.content }}{% endif %}"
    "{% if message.content == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if message.content == 'power' %}{{ 9 ** (9 ** (messages|length + 8)) }}{% endif %}"
    "{% if message.content == 'memory' %}{{ message.content * 10 ** 10 }}{% endif %}"
    "{% if message.content == 'long' %}{{ message.content * 10 ** 5 }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def build(**limits: Any) -> tuple[Any, Any]:
    import torch

    import tokenformer
    from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
    from tokenformer.serve.generation_queue import GenerationQueue
    from tokenformer.serve.limits import Limits
    from tokenformer.serve.prompt_encoder import PromptEncoder
    from tokenformer.serve.server import build_app

    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = tokenformer.TokenformerForCausalLM(config).eval()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    limits = Limits(**limits)
    voice = GenerationQueue(64, limits.max_queue)
    encoder = PromptEncoder(tokenizer, 64, limits)
    return build_app("tiny", model, tokenizer, voice, encoder, limits), encoder


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    from starlette.testclient import TestClient

    app, encoder = build()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
    encoder.close()
