"""Continual learning: three corpora one after the other, with an adapter each or with one LoRA.

Every held-out text has two halves. The first one chooses an adapter, that which predicts it best,
or none; what counts is the loss of the second. Of questions the halves are prompt and answer.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.adapters.adapt_run import AdaptRun
from experiments.job import Job, Result
from experiments.workspace import Workspace

BASE, OWN, CHOSEN, MERGED, SEQUENTIAL = (
    "base",
    "its own adapter",
    "adapter chosen by likelihood",
    "all adapters merged",
    "one LoRA through all",
)
RIGHT = "chosen right"


class Text(NamedTuple):
    ids: Any
    """[1, T + 1]"""
    boundary: int
    """Targets before it choose an adapter; the others are measured."""


class Losses(NamedTuple):
    first: float
    """Mean over the first half, in nats."""
    second: float
    """Sum over the second half, in nats."""
    count: int
    """Bytes of the second half."""


@dataclass(frozen=True)
class Continual(Job):
    """Measures finished runs on the corpora of all; trains nothing."""

    adapters: tuple[AdaptRun, ...]
    """A run per corpus, each from the base."""
    sequential: AdaptRun
    """The last of the runs that train one LoRA through all corpora."""
    texts: int = 64

    @property
    def needs(self) -> tuple[Job, ...]:
        return (*self.adapters, self.sequential)

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(self.corpora)

    @property
    def corpora(self) -> list[str]:
        """That of the base, then the others in the order of training."""
        return [self.sequential.start.corpus, *(run.corpus for run in self.adapters)]

    def reduced(self) -> "Continual":
        """Return a job on fewer texts; the runs it is made of are reduced themselves."""
        return replace(self, texts=4)

    def run(self, workspace: Workspace) -> Result:
        """Return by corpus the bits per byte of every way and how often the choice was right."""
        from peft import PeftModel

        old, *new = self.corpora
        model: Any = PeftModel.from_pretrained(
            self.load_base(workspace), workspace.model(self.adapters[0]), new[0]
        )
        for run in self.adapters[1:]:
            model.load_adapter(workspace.model(run), adapter_name=run.corpus)
        sequential: Any = PeftModel.from_pretrained(
            self.load_base(workspace), workspace.model(self.sequential)
        )
        result: Result = {}
        for corpus in self.corpora:
            texts = self.held_out(workspace, corpus)
            with model.disable_adapter():
                losses = {old: measure(model, texts)}
            for name in new:
                model.base_model.set_adapter([name])
                losses[name] = measure(model, texts)
            model.base_model.set_adapter(new)
            choices = [min(losses, key=lambda n: losses[n][row].first) for row in range(len(texts))]
            result[corpus] = {
                BASE: bits_per_byte(losses[old]),
                OWN: bits_per_byte(losses[corpus]),
                CHOSEN: bits_per_byte([losses[name][row] for row, name in enumerate(choices)]),
                MERGED: bits_per_byte(measure(model, texts)),
                SEQUENTIAL: bits_per_byte(measure(sequential, texts)),
                RIGHT: choices.count(corpus) / len(choices),
            }
        return result

    def load_base(self, workspace: Workspace) -> Any:
        from tokenformer import TokenformerForCausalLM

        return TokenformerForCausalLM.from_pretrained(workspace.model(self.sequential.start))

    def held_out(self, workspace: Workspace, name: str) -> list[Text]:
        import torch

        from tokenformer.data.batches import fixed_batches
        from tokenformer.data.corpus import Corpus
        from tokenformer.data.examples import ExampleSplit, open_split

        split = open_split(Corpus(workspace.corpus(name)), "validation")
        length = self.sequential.start.length
        if not isinstance(split, ExampleSplit):
            rows = fixed_batches(split, batch_size=1, length=length, count=self.texts)
            return [Text(row, length // 2) for row in rows]
        texts = []
        for batch in split.fixed_batches(batch_size=1, length=length, count=self.texts):
            row = torch.from_numpy(batch)  # a token without a loss is ~id
            answer = int((row[0] >= 0).int().argmax())
            texts.append(Text(torch.maximum(row, ~row), answer - 1))
        return texts


def measure(model: Any, texts: list[Text]) -> list[Losses]:
    import torch
    import torch.nn.functional as F

    found = []
    with torch.no_grad():
        for ids, boundary in texts:
            logits = model.eval()(input_ids=ids[:, :-1]).logits[0]
            losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
            first, second = losses[:boundary], losses[boundary:]
            found.append(Losses(first.mean().item(), second.sum().item(), len(second)))
    return found


def bits_per_byte(losses: list[Losses]) -> float:
    nats = sum(row.second for row in losses) / sum(row.count for row in losses)
    return round(nats / math.log(2), 5)
