"""Small language models on disk."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TokenFormer that repeats one sentence."""
    from tests.support.parrot import save_parrot

    folder = tmp_path_factory.mktemp("parrot") / "model"
    save_parrot(folder)
    return folder


@pytest.fixture(scope="session")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-NeoX with a chat template and no embeddings for bytes from 128 on."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from tokenformer.data.byte_tokenizer import byte_tokenizer

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=20_000,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("neox") / "model"
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('no system messages') }}{% endif %}"
        "[{{ message.role }}] {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder
