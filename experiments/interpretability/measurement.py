"""The jobs of the study: each measures a trained model, and trains nothing.

Sparsity(run)                                # how few tokens carry the output of a layer
ClearTokens(run)                             # the tokens that are easiest to name
Control(run, "closing brackets", rise=1.0)   # the tokens that a behavior needs
OldAndNew(run)                               # what growth has added, after training on
PageCost(run, sequences=1000)                # seconds and memory of `tokenformer explore`
"""

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from experiments.interpretability.behaviors import BEHAVIORS, Choose
from experiments.job import Job, Result
from experiments.language import LanguageRun
from experiments.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from tokenformer.interpret import Behavior, ClearToken, LayerIndex, TokenIndex, Vocabulary
    from tokenformer.interpret.controlling_set import Measured

SHARES = (0.01, 0.05, 0.1, 0.25)
"""Shares of the tokens of a layer."""
BATCH = 8
SEARCHED = 8192
"""Sequences that are looked through for those that have a behavior."""
MOST = 100
"""Tokens of a set that controls a behavior."""
DRAWS = 3
"""Random sets per measurement."""


@dataclass(frozen=True)
class ModelJob(Job):
    start: LanguageRun
    """The run that trains the model."""

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.start,)

    @property
    def data(self) -> tuple[str, ...]:
        return self.start.data

    @property
    def forward_flops(self) -> float:
        """Of one sequence."""
        return self.start.models[-1].training_flops(self.start.length) / 3

    def reduced(self) -> "Self":
        return replace(self, start=self.start.reduced())

    def with_seed(self, seed: int) -> "Self":
        return replace(self, start=self.start.with_seed(seed))

    def load(self, workspace: Workspace) -> Any:
        from tokenformer import TokenformerForCausalLM

        return TokenformerForCausalLM.from_pretrained(workspace.model(self.start)).eval()

    def text(self, workspace: Workspace, split: str, sequences: int) -> "Tensor":
        """Return sequences spread over a split, [S, T + 1]."""
        import torch

        from tokenformer.data.batches import fixed_batches
        from tokenformer.data.corpus import Corpus

        tokens = Corpus(workspace.corpus(self.start.corpus)).split(split)
        length = self.start.length
        return torch.cat(fixed_batches(tokens, batch_size=1, length=length, count=sequences))

    def run(self, workspace: Workspace) -> Result:
        started = time.perf_counter()
        result = self.measure(workspace)
        return {**result, "seconds": round(time.perf_counter() - started, 1)}

    def measure(self, workspace: Workspace) -> Result:
        raise NotImplementedError


@dataclass(frozen=True)
class Sparsity(ModelJob):
    """How much of the work and of the output the hardest-working tokens of each position carry."""

    trained: bool = True
    """False measures the weights that the run starts from."""
    sequences: int = 64

    @property
    def flops(self) -> float:
        return 2 * self.sequences * self.forward_flops

    def reduced(self) -> "Sparsity":
        return replace(super().reduced(), sequences=8)

    def measure(self, workspace: Workspace) -> Result:
        """Return by layer and share: the share of the work, means over all positions; the share of
        the squared length of the output (`ScoreMap.explained`); and of the work by the tokens that
        do most of it over all positions."""
        import torch

        from tokenformer.interpret import score_maps

        model = self.load(workspace)
        if not self.trained:
            torch.manual_seed(self.start.seed)
            model = type(model)(model.config).eval()
        ids = self.text(workspace, "validation", self.sequences)[:, :-1]
        work: dict[str, list[Any]] = defaultdict(list)
        explained: dict[str, list[Any]] = defaultdict(list)
        total: dict[str, Any] = {}
        for batch in ids.split(BATCH):
            for name, each in score_maps(model, batch).items():
                counts = [top_count(share, len(each.values)) for share in SHARES]
                work[name].append(torch.stack([each.share(k).mean() for k in counts]))
                explained[name].append(torch.stack([each.explained(k).mean() for k in counts]))
                added = each.contributions.sum((0, 1)).double()
                total[name] = total.get(name, 0) + added
        return {
            "layers": {
                name: {
                    "work": rounded(torch.stack(work[name]).mean(0)),
                    "explained": rounded(torch.stack(explained[name]).mean(0)),
                    "always": rounded(concentration(total[name])),
                }
                for name in total
            }
        }


def top_count(share: float, tokens: int) -> int:
    return max(1, round(share * tokens))


def concentration(work: "Tensor") -> "Tensor":
    """Return the shares of the work that the tokens with most of it do."""
    import torch

    ordered = work.sort(descending=True).values.cumsum(0) / work.sum()
    return torch.stack([ordered[top_count(share, len(work)) - 1] for share in SHARES])


def rounded(values: "Tensor") -> list[float]:
    return [round(value, 4) for value in values.tolist()]


@dataclass(frozen=True)
class ClearTokens(ModelJob):
    """The clearest tokens by the rule of `interpret.clearest_tokens`, with their contexts, and how
    well the text that these share says where they fire on held-out text."""

    count: int = 10
    sequences: int = 2000
    """To index, of the training split."""
    held_out: int = 400

    @property
    def flops(self) -> float:
        return (2 * self.sequences + self.held_out) * self.forward_flops

    def reduced(self) -> "ClearTokens":
        return replace(super().reduced(), sequences=24, held_out=16)

    def measure(self, workspace: Workspace) -> Result:
        from tokenformer.data.byte_tokenizer import byte_tokenizer
        from tokenformer.interpret import Vocabulary, clearest_tokens, index_tokens

        model, vocabulary = self.load(workspace), Vocabulary(byte_tokenizer())
        batches = self.text(workspace, "train", self.sequences)[:, :-1].split(BATCH)
        index = index_tokens(model, batches, vocabulary=vocabulary)
        ids = self.text(workspace, "validation", self.held_out)[:, :-1]
        return {
            "tokens": [
                {**describe(each, index, vocabulary), **check(each, index, model, ids)}
                for each in clearest_tokens(index, vocabulary, self.count)
            ]
        }


def describe(clear: "ClearToken", index: "TokenIndex", vocabulary: "Vocabulary") -> Result:
    name, number = clear.token
    layer = index.layers[name]
    promoted = zip(layer.promoted[number].tolist(), layer.promoted_by[number], strict=True)
    return {
        "token": str(clear.token),
        "pattern": clear.pattern,
        "selectivity": round(clear.selectivity, 3),
        "agreement": round(clear.agreement, 3),
        "frequency": round(layer.frequency[number].item(), 4),
        "contexts": [[c.before[-24:], c.fired, c.after[:12]] for c in clear.contexts[:3]],
        "promotes": [vocabulary.label(each) for each, by in promoted if by > 0][:4],
    }


def check(clear: "ClearToken", index: "TokenIndex", model: Any, ids: "Tensor") -> Result:
    """Return on held-out text where the token fires strongly, at half its largest weight or more:
    the share of these positions at which its pattern ends, and of all ends of the pattern, the
    share at which it does; None if its contexts share no text."""
    import torch

    from tokenformer.interpret import score_maps

    if not clear.pattern:
        return {"precision": None, "recall": None}
    name, number = clear.token
    bar = index.layers[name].largest[number] / 2
    fires = torch.cat(
        [score_maps(model, part, [name])[name].weights[..., number] >= bar for part in ids.split(8)]
    )
    ends = pattern_ends(ids, clear.pattern.encode())
    both = int((fires & ends).sum())
    return {
        "precision": round(both / int(fires.sum()), 3) if fires.any() else None,
        "recall": round(both / int(ends.sum()), 3) if ends.any() else None,
    }


def pattern_ends(ids: "Tensor", pattern: bytes) -> "Tensor":
    """Return the positions of byte ids [S, T] at which a pattern ends."""
    import torch

    found = torch.ones_like(ids, dtype=torch.bool)
    for back, byte in enumerate(reversed(pattern)):
        here = ids.roll(back, 1) == byte
        here[:, :back] = False
        found &= here
    return found


@dataclass(frozen=True)
class Control(ModelJob):
    """The smallest set found whose ablation raises the loss of a behavior by `rise` nats."""

    behavior: str = ""
    rise: float = 1.0
    max_tokens: int = MOST
    sequences: int = 64
    """With the behavior, of the training split, for the search."""
    held_out: int = 128

    @property
    def flops(self) -> float:
        """With as many passes as a search that ends with 20 tokens takes."""
        return (60 * self.sequences + 7 * self.held_out) * self.forward_flops

    def reduced(self) -> "Control":
        return replace(super().reduced(), max_tokens=4, sequences=2, held_out=2)

    @property
    def choose(self) -> Choose:
        return BEHAVIORS[self.start.corpus][self.behavior]

    def measure(self, workspace: Workspace) -> Result:
        """Return what `interpret.controlling_set` found; only the counts if a text lacks it."""
        from tokenformer.interpret import controlling_set

        search = self.predictions(workspace, "train", self.sequences)
        held_out = self.predictions(workspace, "validation", self.held_out)
        counts = [0 if each is None else len(each) for each in (search, held_out)]
        if search is None or held_out is None:
            return {"predictions": counts}
        found = controlling_set(
            self.load(workspace),
            search,
            rise=self.rise,
            max_tokens=self.max_tokens,
            held_out=held_out,
            random_sets=DRAWS,
        )
        return {
            "predictions": counts,
            "tokens": [str(token) for token in found.tokens],
            "reached": found.reached,
            "before": figures(found.before),
            "after": figures(found.after),
            "busiest": figures(found.busiest),
            "busiest_shared": found.busiest_shared,
            "random": [figures(each) for each in found.random],
        }

    def predictions(self, workspace: Workspace, split: str, sequences: int) -> "Behavior | None":
        """Return the behavior in sequences that have it, spread over a split."""
        import torch

        from tokenformer.interpret import Behavior

        ids = self.text(workspace, split, SEARCHED)
        rows = self.choose(ids[:, :-1], ids[:, 1:]).any(1).nonzero().flatten()
        if not len(rows):
            return None
        spread = torch.linspace(0, len(rows) - 1, min(sequences, len(rows))).round().long()
        return Behavior.predicting(ids[rows[spread]], self.choose)


def figures(measured: "Measured") -> dict[str, float]:
    rest = measured.rest_loss
    assert rest is not None
    values = {"loss": measured.loss, "accuracy": measured.accuracy, "elsewhere": rest}
    return {name: round(value, 4) for name, value in values.items()}


@dataclass(frozen=True)
class OldAndNew(ModelJob):
    """What the tokens of every age do in a model that has grown, and the loss without them."""

    sequences: int = 400
    held_out: int = 100
    share: float = 0.125
    """Of the tokens of every layer, old or new, that are switched off at a time."""

    @property
    def flops(self) -> float:
        return (2 * self.sequences + (2 * DRAWS + 1) * self.held_out) * self.forward_flops

    def reduced(self) -> "OldAndNew":
        return replace(super().reduced(), sequences=8, held_out=8)

    def measure(self, workspace: Workspace) -> Result:
        from tokenformer.interpret import Behavior, effect, growth_view, index_tokens

        model = self.load(workspace)
        batches = self.text(workspace, "train", self.sequences)[:, :-1].split(BATCH)
        index = index_tokens(model, batches)
        ids = self.text(workspace, "validation", self.held_out)
        text = Behavior(ids[:, :-1], ids[:, 1:])
        view = growth_view(index)
        rises = {
            age: [
                effect(model, text.loss, off=random_tokens(index, age, self.share, draw)).change
                for draw in range(DRAWS)
            ]
            for age in view.ages
        }
        rows = [
            {n: round(v, 4) if isinstance(v, float) else v for n, v in row.items()}
            for row in view.asdict()
        ]
        rise = {str(age): round(mean(each), 4) for age, each in rises.items()}
        new = [f"{name}.{n}" for name, e in index.layers.items() for n in new_tokens(e)]
        without = effect(model, text.loss, off=new).change
        return {"rows": rows, "rise": rise, "without_new": round(without, 4)}


def new_tokens(layer: "LayerIndex") -> list[int]:
    found: list[int] = (layer.ages > 0).nonzero().flatten().tolist()
    return found


def random_tokens(index: "TokenIndex", age: int, share: float, seed: int) -> list[str]:
    """Return random tokens of one age, a share of the whole layer from every layer."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, layer in index.layers.items():
        numbers = (layer.ages == age).nonzero().flatten()
        order = numbers[torch.randperm(len(numbers), generator=generator)]
        found += [f"{name}.{n}" for n in order[: top_count(share, len(layer))].tolist()]
    return found
