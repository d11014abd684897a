"""Grow a language model in a plain PyTorch training loop.

    python examples/grow_in_pytorch.py

A byte-level model learns Python's own standard library. After half of the steps it gets four times
as many parameter tokens; AdamW keeps its moments. Takes about a minute on two cores.
"""

import argparse
import math
from pathlib import Path

import torch

import tokenformer

LENGTH = 128
BATCH_SIZE = 16


def read_bytes() -> torch.Tensor:
    folder = Path(argparse.__file__).parent
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: torch.Tensor) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH, (BATCH_SIZE,))
    return torch.stack([text[start : start + LENGTH] for start in starts])  # [B, T]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, steps: int
) -> None:
    model.train()
    for step in range(1, steps + 1):
        ids = batch(text)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 4) == 0:
            print(f"  step {step}: {loss.item() / math.log(2):.3f} bits per byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps before and after growth")
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    text = read_bytes()
    config = tokenformer.TokenformerConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        qkv_tokens=32,
        output_tokens=32,
        ffn_tokens=128,
        variant="paper",  # its initialization suits small widths
        positions="rotary",
    )
    model = tokenformer.TokenformerForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    print(f"{model.num_parameters():,} parameters")
    train(model, optimizer, text, steps)

    model, report = tokenformer.grow(model, qkv_tokens=128, output_tokens=128, ffn_tokens=512)
    optimizer = tokenformer.grow_optimizer(optimizer, report)
    print(f"{model.num_parameters():,} parameters; logits moved by {report.max_output_change:.1e}")
    train(model, optimizer, text, steps)


if __name__ == "__main__":
    main()
