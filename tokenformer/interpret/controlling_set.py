"""The smallest set of tokens found that controls a behavior, and the check that it does.

    found = controlling_set(model, behavior, rise=1.0, held_out=other)
    print(found)

Tokens are ranked by attribution, which is computed anew as more of them are switched off. The
shortest beginning of the ranking whose ablation raises the loss by `rise` is found by bisection;
then tokens that it does not need are dropped one by one. The check, on held-out inputs: the same
ablation, that of the tokens that do most work on the inputs of the search, and of random ones, each
as many from the same layers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.tokens.token_usage import eval_mode, observe_inputs, row_chunks
from tokenformer.interpret.attribution import attribute, strongest
from tokenformer.interpret.behavior import BATCH_SIZE, Behavior
from tokenformer.interpret.intervention import intervene
from tokenformer.interpret.token_name import Token, full_names, named_layers
from tokenformer.layers.pattention import Pattention


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
    """On the held-out inputs, as are the baselines."""
    busiest: Measured
    """Without the tokens that do most work in the same layers, as many of each."""
    busiest_shared: int
    """How many of these are in the set."""
    random: list[Measured] = field(default_factory=list)
    """Without random other tokens of the same layers, as many of each."""

    def __str__(self) -> str:
        def row(name: str, each: Measured) -> str:
            rest = "" if each.rest_loss is None else f"{each.rest_loss:12.3f}"
            return f"{name:<24}{each.loss:8.3f}{each.accuracy:10.1%}{rest}"

        counts = Counter(token.layer for token in self.tokens)
        where = ", ".join(f"{count} in {name}" for name, count in counts.items())
        lines = [
            f"{len(self.tokens)} tokens control the behavior: {where}"
            if self.reached
            else f"{len(self.tokens)} tokens are not enough to control the behavior: {where}",
            f"{'':<24}{'loss':>8}{'accuracy':>10}"
            + ("" if self.before.rest_loss is None else f"{'other loss':>12}"),
            row("all tokens on", self.before),
            row("these tokens off", self.after),
            row("the busiest tokens off", self.busiest),
        ]
        lines += [row(f"random set {n} off", each) for n, each in enumerate(self.random, 1)]
        return "\n".join(lines)

    @property
    def rise(self) -> float:
        """The rise of the loss."""
        return self.after.loss - self.before.loss

    @property
    def busiest_rise(self) -> float:
        return self.busiest.loss - self.before.loss

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
        ranking = rank(model, behavior, max_tokens, layers)
        count, reached = shortest_beginning(model, behavior, ranking, goal)
        tokens = ranking[:count]
        if reached:
            tokens = without_needless(model, behavior, tokens, goal)
        generator = torch.Generator().manual_seed(seed)
        pools = {name: each.num_tokens for name, each in named_layers(model, layers).items()}
        draws = [random_set(pools, tokens, generator) for _ in range(random_sets)]
        busiest = busiest_set(model, behavior, tokens)
        return ControllingSet(
            tokens,
            reached,
            before=measure(model, check, []),
            after=measure(model, check, tokens),
            busiest=measure(model, check, busiest),
            busiest_shared=len({*busiest} & {*tokens}),
            random=[measure(model, check, draw) for draw in draws],
        )


def rank(
    model: PreTrainedModel, behavior: Behavior, count: int, layers: Iterable[str] | None
) -> list[Token]:
    """Return the tokens that the behavior needs most, by attribution. It is computed anew when
    1, 2, 4, ... of them are off: at a low loss the gradient says little about a large change, and
    other tokens may take over."""
    ranking: list[Token] = []
    while len(ranking) < count:
        with intervene(model, off=ranking):
            estimates = attribute(model, behavior, layers)
        for token in ranking:
            estimates[token.layer][token.number] = -torch.inf
        best = strongest(estimates, min(max(1, len(ranking)), count - len(ranking)))
        best = [token for token in best if estimates[token.layer][token.number] > -torch.inf]
        if not best:  # there are no more
            break
        ranking += best
    return ranking


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
    """Drop tokens, the last first, as long as the others reach the goal. A token that was needed
    can become needless when others are dropped, so this goes on until all are needed."""
    kept, before = list(tokens), 0
    while len(kept) != before:
        before = len(kept)
        for token in reversed(list(kept)):
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


def busiest_set(model: PreTrainedModel, behavior: Behavior, tokens: list[Token]) -> list[Token]:
    """Return the tokens that add most to the outputs of their layers, by mean square, as many of
    each layer as the set has. Tokens of the set may be among them."""
    counts, names = Counter(token.layer for token in tokens), full_names(model)
    layers = {name: layer for name, layer in named_layers(model).items() if name in counts}
    squares = {n: torch.zeros(each.num_tokens).double() for n, each in layers.items()}

    def add(name: str, layer: Pattention, x: Tensor) -> None:
        for rows in row_chunks(layer, x):
            squares[name] += layer.token_weights(rows).weights.square().sum(0).cpu().double()

    observers = {names[name]: partial(add, name, layer) for name, layer in layers.items()}
    observe_inputs(model, behavior.inputs.split(BATCH_SIZE), observers)
    found = list[Token]()
    for name, count in counts.items():
        lengths = layers[name].value_tokens.detach().cpu().double().square().sum(1)
        most = (squares[name] * lengths).topk(count).indices
        found += [Token(name, number) for number in most.tolist()]
    return found


def measure(model: PreTrainedModel, behavior: Behavior, tokens: list[Token]) -> Measured:
    with intervene(model, off=tokens):
        rest = behavior.rest().loss(model) if behavior.others is not None else None
        return Measured(behavior.loss(model), behavior.accuracy(model), rest)
