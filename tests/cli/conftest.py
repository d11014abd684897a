"""A model that says one sentence, over and over, in characters of one to four bytes."""

from pathlib import Path

import pytest

SENTENCE = "Say 日本語, naïve — or 🙂!\n"


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    import tokenformer
    from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        qkv_tokens=32,
        output_tokens=32,
        ffn_tokens=64,
        max_position_embeddings=128,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
    )
    model = tokenformer.TokenformerForCausalLM(config)
    text = torch.tensor([*(SENTENCE * 4).encode()])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        starts = torch.randint(len(text) - 64, (4,))
        ids = torch.stack([text[start : start + 64] for start in starts])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("parrot") / "model"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another library, with a chat template, that knows no bytes from 128 on."""
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
