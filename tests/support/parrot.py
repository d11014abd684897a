"""A small model that has learned one sentence, with characters of one to four bytes."""

from pathlib import Path

import torch

import tokenformer
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

SENTENCE = "Say 日本語, naïve — or 🙂!\n"


def save_parrot(folder: Path) -> None:
    """Train the model, which repeats the sentence, and save it with its tokenizer."""
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
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
