"""Replace nn.Linear with Pattention in your own network, train it, then make it larger.

    python examples/drop_in_layer.py

A classifier of 8x8 digits (scikit-learn's, 1,797 images). The hidden layer grows from 32 to 128
parameter tokens in the middle of training and computes the same function before and after.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from tokenformer import Pattention


def network(hidden_tokens: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(64),
        Pattention(in_features=64, out_features=64, num_tokens=hidden_tokens),
        nn.LayerNorm(64),
        Pattention(in_features=64, out_features=10, num_tokens=64),
    )


def grow_layer(layer: Pattention, num_tokens: int) -> Pattention:
    """More tokens, same function: new keys are zero, and `scale_tokens` keeps its old value."""
    grown = Pattention(
        layer.in_features, layer.out_features, num_tokens, scale_tokens=layer.scale_tokens
    )
    with torch.no_grad():
        grown.key_tokens.zero_()
        grown.key_tokens[: layer.num_tokens] = layer.key_tokens
        grown.value_tokens[: layer.num_tokens] = layer.value_tokens
    return grown


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,))
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return (model(x).argmax(dim=1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="steps before and after growth")
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16  # [1797, 64]
    y = torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]

    model = network(hidden_tokens=32)
    train(model, train_x, train_y, steps)
    print(f"32 hidden tokens: {accuracy(model, test_x, test_y):.1%} of the test images correct")

    before = model(test_x)
    model[1] = grow_layer(model[1], num_tokens=128)
    print(f"largest change of a logit at growth: {(model(test_x) - before).abs().max():.1e}")

    train(model, train_x, train_y, steps)
    print(f"128 hidden tokens: {accuracy(model, test_x, test_y):.1%}")


if __name__ == "__main__":
    main()
