"""The job that trains a language model and records its derivatives and gradients on the way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.job import Job, Result
from experiments.language import LanguageRun
from experiments.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenformer.train.loop import Loop

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
VANISHED = 1e-4
"""A derivative below this share of the largest one counts as vanished."""
SEQUENCES, EVERY = 4, 4
"""Held-out sequences that are measured, and of how many rows one has its derivatives computed."""
KINDS = ("diagonal", "off_diagonal", "score_gradients", "key_gradients")
"""dS_i/dA_i, dS_i/dA_j, and the gradients of the loss by the scores and by the keys."""


@dataclass(frozen=True)
class GradientRun(Job):
    training: LanguageRun
    """What is trained, in one stage."""
    record: tuple[int, ...] = (0, 10, 50, 150, 300, 532)
    """Steps after which derivatives are recorded."""

    @property
    def data(self) -> tuple[str, ...]:
        return self.training.data

    @property
    def flops(self) -> float:
        return self.training.flops

    def reduced(self) -> "GradientRun":
        return replace(self, training=self.training.reduced(), record=(0, 1, 2))

    def run(self, workspace: Workspace) -> Result:
        from experiments.in_memory import summarize_rows, train_in_memory

        loop = self.training.loop(workspace)
        recorded: dict[int, list[Result]] = {}

        def on_row(row: dict[str, Any]) -> None:
            if row["step"] in self.record and "problem" not in row:
                recorded[row["step"]] = measure(loop)

        result = summarize_rows(train_in_memory(loop, on_row))
        return {**result, "recorded": [[step, layers] for step, layers in recorded.items()]}


def measure(loop: "Loop") -> list[Result]:
    """Return the distributions of every projection, on held-out text. Weights and gradients of the
    model stay as they are between steps."""
    from tokenformer.train.optimizer import pattention_layers

    model = loop.task.model
    batch: Any = loop.held_out[0]
    batch = batch[:SEQUENCES]
    with kept_scores(model) as scores:
        loss = loop.task.module(batch) / batch[:, 1:].numel()
        loss.backward()
    layers = dict(pattention_layers(model))
    found = [describe_layer(name, layers[name], scores[name]) for name in scores]
    loop.optimizer.zero_grad()
    return found


@contextmanager
def kept_scores(model: "nn.Module") -> Iterator[dict[str, "Tensor"]]:
    """Compute every Pattention layer in the block by its plain formula, and keep its scores with
    their gradients, by the prefix of the layer's parameters."""
    from tokenformer.train.optimizer import pattention_layers

    scores: dict[str, Tensor] = {}
    layers = list(pattention_layers(model))
    for prefix, layer in layers:
        layer.forward = partial(plain_forward, prefix, layer, scores)  # type: ignore[method-assign]
    try:
        yield scores
    finally:
        for _, layer in layers:
            del layer.forward


def plain_forward(prefix: str, layer: Any, store: dict[str, "Tensor"], x: "Tensor") -> "Tensor":
    from tokenformer.ops.theta import ThetaOptions

    keys, values, scale = layer.token_set()
    scores = x @ keys.T  # [B, T, n]
    scores.retain_grad()
    store[prefix] = scores
    return ThetaOptions(layer.theta, scale, layer.approximate, layer.eps).weights(scores) @ values


def describe_layer(prefix: str, layer: Any, scores: "Tensor") -> Result:
    from experiments.gradients.derivatives import DERIVATIVES, split_diagonal
    from tokenformer.ops.theta import ThetaOptions

    rows = scores.detach().flatten(0, 1)  # [R, n]
    options = ThetaOptions(layer.theta, layer.scale_tokens, layer.approximate, layer.eps)
    derivatives = DERIVATIVES[layer.theta](rows[::EVERY].double(), float(layer.scale_tokens))
    diagonal, others = split_diagonal(derivatives)
    assert scores.grad is not None
    assert layer.key_tokens.grad is not None
    numbers = dict(zip(KINDS, (diagonal, others, scores.grad, layer.key_tokens.grad), strict=True))
    words = prefix.rstrip(".").split(".")
    return {
        "layer": next(int(word) for word in words if word.isdigit()),
        "projection": words[-1],
        "effective_tokens": significant(effective_tokens(options.weights(rows))),
        **{kind: distribution(tensor) for kind, tensor in numbers.items()},
    }


def effective_tokens(weights: "Tensor") -> float:
    """Return the share of the tokens that a row weighs, (sum |S|)^2 / (n sum S^2), its mean over
    the rows: 1 if all weigh the same, 1/n if one has all the weight."""
    shares = weights.abs().sum(-1).square() / (weights.shape[-1] * weights.square().sum(-1))
    return float(shares.mean())


def distribution(numbers: "Tensor") -> Result:
    """Return quantiles of the magnitudes, the largest, and the share that has vanished."""
    import torch

    sizes = numbers.detach().abs().flatten().double().sort().values
    last = len(sizes) - 1
    places = torch.tensor([round(quantile * last) for quantile in QUANTILES])
    largest = float(sizes[-1])
    return {
        "quantiles": [significant(size) for size in sizes[places].tolist()],
        "largest": significant(largest),
        "vanished": significant(float((sizes < VANISHED * largest).double().mean())),
    }


def significant(number: float) -> float:
    """Round to three digits, which keeps the results small."""
    return float(f"{number:.3g}")
