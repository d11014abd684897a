"""Conversion: small pretrained Transformers converted to TokenFormers, against random weights.

A GPT-NeoX, a GPT-2 and a Llama of transformers train on the bytes of Python's standard library.
Each is converted; the result and a TokenFormer of the same size with random weights then train for
a few steps, by distillation from the source or on the text.
"""

import math
import time
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from experiments.exhibit import Exhibit, Findings, Scale, Table
from experiments.job import Job, Result, Results
from experiments.workspace import Workspace

KINDS = {"gpt_neox": "GPT-NeoX", "gpt2": "GPT-2", "llama": "Llama, grouped-query attention"}
FORMS = {
    "pair, without data": "`pair`, without data",
    "pair": "`pair`",
    "pair, in bf16": "`pair`, in bf16",
    "shift, without data": "`shift`, without data",
    "shift": "`shift`",
    "shift, in bf16": "`shift`, in bf16",
    "pair, a tenth pruned": "`pair`, a tenth of the tokens pruned",
    "random": "random weights",
}
"""Rows of the table, under the source."""
MAPS = {
    "q, k, v": ("attention.q", "attention.k", "attention.v"),
    "output projection": ("attention.o",),
    "feed-forward": ("ffn",),
}


@dataclass(frozen=True)
class SourceModel(Job):
    """Trains a Transformer and keeps it in the workspace's folder of models."""

    kind: str
    steps: int = 1000
    width: int = 128
    layers: int = 4
    length: int = 128
    batch: int = 16
    rate: float = 2e-3

    @property
    def parameters(self) -> int:
        """About as many as it has, without building it."""
        return 12 * self.layers * self.width**2

    @property
    def flops(self) -> float:
        return 6.0 * self.parameters * self.steps * self.batch * self.length

    def reduced(self) -> "SourceModel":
        return replace(self, steps=30, width=32, layers=1, length=16)

    def run(self, workspace: Workspace) -> Result:
        from experiments.conversion.source_model import new_source, train_model
        from tokenformer.data.standard_library import standard_library

        start = time.perf_counter()
        model = new_source(self.kind, self.width, self.layers, self.length)
        train_model(
            model,
            standard_library(),
            length=self.length,
            steps=self.steps,
            rate=self.rate,
            batch_size=self.batch,
        )
        model.save_pretrained(workspace.model(self))
        seconds = round(time.perf_counter() - start, 1)
        return {"parameters": model.num_parameters(), "seconds": seconds}


@dataclass(frozen=True)
class Conversion(Job):
    """Converts a source model; a row of figures for every model that comes of it."""

    source: SourceModel
    more: int = 60
    """Training steps after conversion."""
    rate: float = 1e-4
    """Of continued training."""
    fresh_rate: float = 2e-3
    """Of random weights."""
    distillation_rate: float = 3e-5

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.source,)

    @property
    def flops(self) -> float:
        """Six models train for `more` steps of eight sequences, most of them twice as large."""
        one = 6.0 * 2 * self.source.parameters
        return 6 * one * self.more * 8 * self.source.length

    def reduced(self) -> "Conversion":
        return replace(self, source=self.source.reduced(), more=10)

    def run(self, workspace: Workspace) -> Result:
        from experiments.conversion.converted_models import ConvertedModels

        start = time.perf_counter()
        rows = list(ConvertedModels(self, workspace.model(self.source)).rows())
        return {"rows": rows, "seconds": round(time.perf_counter() - start, 1)}


def conversion(kind: str, scale: Scale) -> Conversion:
    job: Conversion = scale.fit(Conversion(SourceModel(kind)))
    return job


def plan(scale: Scale, results: Results) -> list[Job]:
    return [conversion(kind, scale) for kind in KINDS]


Rows = dict[str, dict[str, Any]]
"""Rows of one source by name."""


def rows_of(kind: str, scale: Scale, results: Results) -> Rows:
    return {row["name"]: row for row in results[conversion(kind, scale)]["rows"]}


def bits(row: dict[str, Any]) -> float:
    """Return the held-out bits per byte: a token is a byte, the losses are in nats."""
    return row["loss"] / math.log(2)


def comparison_table(found: dict[str, Rows]) -> Table:
    cells = [["", "parameters", "bits per byte", "divergence", "same top-1 byte"]]
    for kind, rows in found.items():
        source = rows["source"]
        cells.append(
            [f"**{KINDS[kind]}**", f"{source['parameters']:,}", f"{bits(source):.4f}", "", ""]
        )
        for name, title in FORMS.items():
            if row := rows.get(name):
                figures = [f"{row['divergence']:.1e}", f"{row['agreement']:.2%}"]
                cells.append([title, f"{row['parameters']:,}", f"{bits(row):.4f}", *figures])
    tokens = next(iter(found.values()))["source"]["tokens"]
    return Table(
        cells,
        f"Converted models before any training, on {tokens:,} held-out bytes. Divergence is the KL "
        "divergence from the source's next-byte distribution, in nats.",
    )


def error_table(found: dict[str, Rows]) -> Table:
    cells = [["", *MAPS]]
    for kind, rows in found.items():
        for name in ("pair", "pair, without data"):
            if name in rows:
                suffix = ", without data" if name != "pair" else ""
                errors = [f"{map_error(rows[name], maps):.0e}" for maps in MAPS.values()]
                cells.append([f"{KINDS[kind]}{suffix}", *errors])
    return Table(cells, "Relative error of each map, mean over layers (`pair`, fp32).")


def map_error(row: dict[str, Any], maps: tuple[str, ...]) -> float:
    """Return the mean relative error of the maps of these names in all layers."""
    return mean(error for name, error in row["errors"].items() if name.endswith(maps))


def training_table(found: dict[str, Rows]) -> Table:
    cells = [["start", "on the text", "distillation"]]
    titles = {"pair": "`pair`", "shift": "`shift`", "random": "random weights"}
    for kind, rows in found.items():
        for name, title in {"source": "", **titles}.items():
            distilled = rows.get(f"{name}, distilled")
            cells.append(
                [
                    f"**{KINDS[kind]}**" if name == "source" else title,
                    f"{bits(rows[f'{name}, continued']):.4f}",
                    "" if distilled is None else f"{bits(distilled):.4f}",
                ]
            )
    return Table(cells, "Bits per byte after the same few steps of training.")


def report(scale: Scale, results: Results) -> Findings:
    found = {kind: rows_of(kind, scale, results) for kind in KINDS}
    change = {kind: bits(rows["pair"]) - bits(rows["source"]) for kind, rows in found.items()}
    exact = max(abs(change[kind]) for kind in ("gpt_neox", "gpt2"))
    neox = {name: bits(row) for name, row in found["gpt_neox"].items()}
    argument = (
        f"Converted in `pair` form, GPT-NeoX and GPT-2 keep their loss to {exact:.1e} bits per "
        f"byte and the Llama changes by {change['llama']:+.4f}; random weights are at "
        f"{neox['random']:.2f}. After the same few steps on the text the converted GPT-NeoX is at "
        f"{neox['pair, continued']:.4f}, its source at {neox['source, continued']:.4f} and random "
        f"weights at {neox['random, continued']:.4f}."
    )
    return Findings(
        verdict="beyond the paper",
        argument=argument,
        headline=f"loss kept to {exact:.0e} bits per byte (Llama: {change['llama']:+.4f})",
        tables=[comparison_table(found), error_table(found), training_table(found)],
    )


EXHIBIT = Exhibit(
    title="Converting Transformers",
    source="not in the paper",
    claim="A pretrained Transformer with layer norms converts to a TokenFormer without losing "
    "anything, a Llama with little loss, and both can be trained further.",
    setting="transformers' own GPT-NeoX, GPT-2 and Llama (four layers, width 128) train on the "
    "bytes of Python's standard library for 1,000 steps of 2,048 bytes and are converted. One "
    "seed; every twentieth file is held out. Continued training and distillation: 60 steps of "
    "1,024 bytes.",
    plan=plan,
    report=report,
    page="conversion.md",
)
