"""The smallest set of tokens found that controls a behavior, and the check that it does.

    found = controlling_set(model, behavior, rise=1.0, held_out=other)
    print(found)

Tokens are ranked by attribution. The shortest beginning of the ranking whose ablation raises the
loss by `rise` is found by bisection; then tokens that it does not need are dropped one by one. The
check, on held-out inputs: the same ablation, and random sets of equal size from the same layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.tokens.token_usage import eval_mode
from tokenformer.interpret.attribution import attribute, strongest
from tokenformer.interpret.behavior import Behavior
from tokenformer.interpret.intervention import intervene
from tokenformer.interpret.token_name import Token, named_layers


@dataclass(frozen=True)
class Measured:
    """A behavior under one ablation."""

    loss: float
    accuracy: float
    rest_loss: float | None
    """The loss of all other predictions on the same inputs, if they are known."""


@dataclass(frozen=True)
class ControllingSet:
    tokens: list[Token]
    reached: bool
    """Whether the set raises the loss by what was asked for, on the inputs it was found on."""
    before: Measured
    after: Measured
    """On the held-out inputs, as are the random sets."""
    random: list[Measured] = field(default_factory=list)

    def __str__(self) -> str:
        def row(name: str, each: Measured) -> str:
            rest = "" if each.rest_loss is None else f"{each.rest_loss:12.3f}"
            return f"{name:<24}{each.loss:8.3f}{each.accuracy:10.1%}{rest}"

        counts = {name: sum(t.layer == name for t in self.tokens) for name, _ in self.tokens}
        where = ", ".join(f"{count} in {name}" for name, count in counts.items())
        lines = [
            f"{len(self.tokens)} tokens control the behavior: {where}"
            if self.reached
            else f"{len(self.tokens)} tokens are not enough to control the behavior: {where}",
            f"{'':<24}{'loss':>8}{'accuracy':>10}"
            + ("" if self.before.rest_loss is None else f"{'other loss':>12}"),
            row("all tokens on", self.before),
            row("these tokens off", self.after),
        ]
        lines += [row(f"random set {n} off", each) for n, each in enumerate(self.random, 1)]
        return "\n".join(lines)

    @property
    def random_rise(self) -> float:
        """The mean rise of the loss over the random sets."""
        return mean(each.loss for each in self.random) - self.before.loss


def controlling_set(
    model: PreTrainedModel,
    behavior: Behavior,
    *,
    rise: float = 1.0,
    max_tokens: int = 100,
    held_out: Behavior | None = None,
    random_sets: int = 3,
    seed: int = 0,
    layers: Iterable[str] | None = None,
) -> ControllingSet:
    """Return the smallest set found whose ablation raises the behavior's mean loss by `rise` nats.

    Args:
        model: a TokenFormer.
        behavior: the predictions to find the set on.
        rise: nats.
        max_tokens: how many tokens the set may have. If that is not enough, the set is the
            `max_tokens` best and `reached` is False.
        held_out: the same behavior on other inputs, for the check; by default the same inputs.
        random_sets: how many random sets to compare with.
        seed: seed of the random sets.
        layers: only tokens of these layers, blocks or projections.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    check = held_out or behavior
    with eval_mode(model):
        goal = behavior.loss(model) + rise
        ranking = strongest(attribute(model, behavior, layers), max_tokens)
        count, reached = shortest_beginning(model, behavior, ranking, goal)
        tokens = ranking[:count]
        if reached:
            tokens = without_needless(model, behavior, tokens, goal)
        generator = torch.Generator().manual_seed(seed)
        pools = {name: each.num_tokens for name, each in named_layers(model, layers).items()}
        draws = [random_set(pools, tokens, generator) for _ in range(random_sets)]
        return ControllingSet(
            tokens,
            reached,
            measure(model, check, []),
            measure(model, check, tokens),
            [measure(model, check, draw) for draw in draws],
        )


def loss_without(model: PreTrainedModel, behavior: Behavior, tokens: list[Token]) -> float:
    with intervene(model, off=tokens):
        return behavior.loss(model)


def shortest_beginning(
    model: PreTrainedModel, behavior: Behavior, ranking: list[Token], goal: float
) -> tuple[int, bool]:
    """Return how many of the first tokens reach the goal, and whether all of them do. The loss need
    not rise with every token, so a shorter beginning may be missed."""
    low, high = 0, 1  # `low` do not reach it
    while loss_without(model, behavior, ranking[:high]) < goal:
        if high >= len(ranking):
            return len(ranking), False
        low, high = high, min(2 * high, len(ranking))
    while high - low > 1:
        middle = (low + high) // 2
        if loss_without(model, behavior, ranking[:middle]) < goal:
            low = middle
        else:
            high = middle
    return high, True


def without_needless(
    model: PreTrainedModel, behavior: Behavior, tokens: list[Token], goal: float
) -> list[Token]:
    """Drop tokens, the last first, as long as the others reach the goal."""
    kept = list(tokens)
    for token in reversed(tokens):
        others = [each for each in kept if each != token]
        if others and loss_without(model, behavior, others) >= goal:
            kept = others
    return kept


def random_set(
    pools: dict[str, int], tokens: list[Token], generator: torch.Generator
) -> list[Token]:
    """Return random other tokens, as many of each layer as the set has, if it has so many."""
    drawn = []
    for name, count in pools.items():
        taken = {token.number for token in tokens if token.layer == name}
        order: Tensor = torch.randperm(count, generator=generator)
        others = [number for number in order.tolist() if number not in taken]
        drawn += [Token(name, number) for number in others[: len(taken)]]
    return drawn


def measure(model: PreTrainedModel, behavior: Behavior, tokens: list[Token]) -> Measured:
    with intervene(model, off=tokens):
        rest = behavior.rest().loss(model) if behavior.others is not None else None
        return Measured(behavior.loss(model), behavior.accuracy(model), rest)
