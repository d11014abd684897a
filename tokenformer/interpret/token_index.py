"""An index of all parameter tokens of a model: what each one does on a corpus.

    index = TokenIndex.load("index")
    layer = index.layers["3.ffn"]
    layer.frequency[17], layer.work[17]              # how often it fires, its share of the work
    index.contexts(Token("3.ffn", 17), vocabulary)   # where it fires most, with the text

On disk an index is a folder: `index.safetensors` with everything, `tokens.parquet` with one row per
token for pandas, DuckDB or a spreadsheet, and `index.json` with the options and the counts.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenformer.errors import DataError
from tokenformer.files import new_folder
from tokenformer.interpret.token_name import Token
from tokenformer.interpret.vocabulary import REPLACEMENT, Vocabulary

FORMAT = "tokenformer-index-1"
TENSORS, TABLE, SUMMARY = "index.safetensors", "tokens.parquet", "index.json"
SAMPLES, NUMBERS = "samples", "sample_numbers"
DEAD = 0.01
BEFORE, AFTER = 40, 16
"""Token ids of a context around the position that fired."""


@dataclass(frozen=True)
class IndexSummary:
    """What an index is of."""

    model: str
    """A hash of the weights."""
    model_type: str
    positions: int
    samples: int
    batches: int
    threshold: float
    """A token fires where its weight is at least this."""
    grid: tuple[int, int] | None = None
    """Rows and columns of patches of an image; None for text."""
    labels: tuple[str, ...] = ()
    """The classes of an image classifier."""
    inputs: str = ""
    """A hash of the batches."""

    @property
    def class_tokens(self) -> int:
        """Positions before the patches of an image: 1 if the model has a class token."""
        if self.grid is None:
            return 0
        return self.positions // self.samples - self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class LayerIndex:
    """The tokens of one layer: n tokens, K contexts, P promoted words, M neighbors."""

    positions: int
    fired: Tensor  # [n]
    weights: Tensor  # [n], sums over the positions, as in `FiringSums`
    magnitudes: Tensor  # [n]
    squares: Tensor  # [n]
    shares: Tensor  # [n]
    largest: Tensor  # [n]
    histogram: Tensor  # [n, BINS]
    top_weights: Tensor  # [n, K], -inf where there are fewer samples
    top_samples: Tensor  # [n, K]
    top_positions: Tensor  # [n, K]
    value_lengths: Tensor  # [n]
    key_lengths: Tensor  # [n]
    ages: Tensor  # [n], the growth that added the token
    promoted: Tensor  # [n, P] ids; [n, 0] for layers that do not write to the residual stream
    promoted_by: Tensor  # [n, P]
    suppressed: Tensor  # [n, P]
    suppressed_by: Tensor  # [n, P]
    like_key: Tensor  # [n, M] tokens of the layer with the most similar keys
    like_key_by: Tensor  # [n, M] cosines
    like_value: Tensor  # [n, M]
    like_value_by: Tensor  # [n, M]

    def __len__(self) -> int:
        return len(self.fired)

    @property
    def frequency(self) -> Tensor:
        """Share of the positions at which the token fires."""
        return self.fired.double() / max(1, self.positions)

    @property
    def mean_weight(self) -> Tensor:
        return self.weights / max(1, self.positions)

    @property
    def norm_share(self) -> Tensor:
        """The token's share of the norm that divides the scores; sums to 1."""
        return self.shares / max(1, self.positions)

    @property
    def work(self) -> Tensor:
        """The token's share of the layer's work, the sum of |weight| * ||value||; sums to 1."""
        added = self.magnitudes * self.value_lengths
        return added / added.sum().clamp_min(torch.finfo(added.dtype).tiny)

    @property
    def selectivity(self) -> Tensor:
        """1 - (mean |weight|)^2 / mean weight^2: 0 for a token with the same weight everywhere,
        close to 1 for one with a large weight at few positions; 0 for one without any weight."""
        spread = (self.magnitudes / max(1, self.positions)).square()
        power = self.squares / max(1, self.positions)
        return torch.where(power > 0, 1 - spread / power, 0.0).clamp_min(0)

    @property
    def dead(self) -> Tensor:
        """Tokens that do less than a hundredth of an average token's work, [n] bool."""
        return self.work < DEAD / len(self)

    def tensors(self) -> dict[str, Tensor]:
        names = [field.name for field in fields(self) if field.name != "positions"]
        return {name: getattr(self, name) for name in names}


class Context(NamedTuple):
    """A place where a token fires."""

    weight: float
    sample: int
    """Number of the sample in the stream of inputs."""
    position: int
    ids: list[int]
    """The token ids around it; empty for an image."""
    before: str
    fired: str
    after: str
    """The text around it, as far as the index keeps it."""


class TokenIndex:
    def __init__(
        self,
        summary: IndexSummary,
        layers: Mapping[str, LayerIndex],
        samples: Tensor,
        sample_numbers: Tensor,
    ) -> None:
        self.summary = summary
        self.layers = dict(layers)
        self.samples = samples
        """The samples of all top contexts: ids [S, T], or 8-bit pixels [S, C, H, W]."""
        self.sample_numbers = sample_numbers  # [S], ascending

    @cached_property
    def rows(self) -> dict[int, int]:
        """Where `samples` has each sample."""
        return {number: row for row, number in enumerate(self.sample_numbers.tolist())}

    def sample(self, number: int) -> Tensor:
        return self.samples[self.rows[number]]

    def contexts(
        self,
        token: Token,
        vocabulary: Vocabulary | None = None,
        *,
        count: int | None = None,
        before: int = BEFORE,
        after: int = AFTER,
    ) -> list[Context]:
        """Return where a token fires most, strongest first, with the text around it; all contexts
        that the index keeps, or `count`."""
        layer, vocabulary = self.layers[token.layer], vocabulary or Vocabulary()
        places = zip(
            layer.top_weights[token.number, :count].tolist(),
            layer.top_samples[token.number, :count].tolist(),
            layer.top_positions[token.number, :count].tolist(),
            strict=True,
        )
        found = []
        for weight, sample, position in places:
            if sample < 0:
                continue
            ids, start = list[int](), 0
            if self.summary.grid is None:
                start = max(0, position - before)
                ids = self.sample(sample)[start : position + 1 + after].tolist()
            around = cut(ids, position - start, vocabulary)
            found.append(Context(weight, sample, position, ids, *around))
        return found

    def save(self, folder: Path | str, vocabulary: Vocabulary | None = None) -> None:
        """Write the index to a new folder, complete or not at all. `vocabulary` is for the text in
        the table."""
        with new_folder("the index", Path(folder)) as out:
            tensors = {
                f"{name}/{field}": tensor.contiguous()
                for name, layer in self.layers.items()
                for field, tensor in layer.tensors().items()
            }
            tensors |= {SAMPLES: self.samples, NUMBERS: self.sample_numbers}
            save_file(tensors, out / TENSORS, metadata={"format": FORMAT})
            self.write_table(out / TABLE, vocabulary or Vocabulary())
            summary = {"format": FORMAT, "layers": list(self.layers), **asdict(self.summary)}
            (out / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str) -> "TokenIndex":
        folder = Path(folder)
        try:
            found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise DataError(f"{folder} is an index of another version; make it again")
            names = found.pop("layers")
            found["grid"] = None if found["grid"] is None else tuple(found["grid"])
            summary = IndexSummary(**{**found, "labels": tuple(found["labels"])})
            with safe_open(folder / TENSORS, framework="pt") as file:
                stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            wanted = [field.name for field in fields(LayerIndex) if field.name != "positions"]
            layers = {
                name: LayerIndex(
                    summary.positions, *(stored[f"{name}/{field}"] for field in wanted)
                )
                for name in names
            }
            return cls(summary, layers, stored[SAMPLES], stored[NUMBERS])
        except FileNotFoundError:
            raise DataError(f"{folder} is not an index: it has no {SUMMARY} or {TENSORS}") from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"the index {folder} cannot be read: {error}") from None

    def write_table(self, path: Path, vocabulary: Vocabulary) -> None:
        """Write one row per token, one layer at a time."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        writer = None
        try:
            for name in self.layers:
                rows = pa.table(self.columns(name, vocabulary))
                writer = writer or pq.ParquetWriter(path, rows.schema)
                writer.write_table(rows)
        finally:
            if writer is not None:
                writer.close()

    def columns(self, name: str, vocabulary: Vocabulary) -> dict[str, Any]:
        """Return the columns of the table for one layer."""
        layer = self.layers[name]
        block, _, projection = name.partition(".")
        contexts = [
            [f"{c.before}[[{c.fired}]]{c.after}" for c in self.contexts(Token(name, n), vocabulary)]
            if self.summary.grid is None
            else []
            for n in range(len(layer))
        ]
        numbers: dict[str, Any] = {
            "frequency": layer.frequency,
            "mean_weight": layer.mean_weight,
            "largest_weight": layer.largest.double(),
            "work": layer.work,
            "norm_share": layer.norm_share,
            "selectivity": layer.selectivity,
            "key_length": layer.key_lengths.double(),
            "value_length": layer.value_lengths.double(),
        }
        return {
            "token": [str(Token(name, n)) for n in range(len(layer))],
            "block": [int(block)] * len(layer),
            "projection": [projection] * len(layer),
            "number": list(range(len(layer))),
            "age": layer.ages.tolist(),
            **{key: column.numpy() for key, column in numbers.items()},
            "histogram": layer.histogram.tolist(),
            "promoted": self.words(layer.promoted, vocabulary),
            "suppressed": self.words(layer.suppressed, vocabulary),
            "contexts": text_column(contexts),
            "like_key": layer.like_key.tolist(),
            "like_value": layer.like_value.tolist(),
        }

    def words(self, ids: Tensor, vocabulary: Vocabulary) -> Any:
        return text_column([[self.word(n, vocabulary) for n in row] for row in ids.tolist()])

    def word(self, index: int, vocabulary: Vocabulary) -> str:
        """Return the name of a logit: a piece of text, or a class."""
        labels = self.summary.labels
        return labels[index] if labels else vocabulary.label(index)


def text_column(rows: list[list[str]]) -> Any:
    """Return lists of text; also empty ones have a type."""
    import pyarrow as pa

    return pa.array(rows, type=pa.list_(pa.string()))


def cut(ids: list[int], position: int, vocabulary: Vocabulary) -> tuple[str, str, str]:
    """Return the text before, at and after a position; a character of several ids is whole. Of
    characters that begin before the ids or end after them, nothing is left."""
    if not ids:
        return "", "", ""
    pieces = vocabulary.pieces(ids)
    first, last = position, position
    while not pieces[last] and last + 1 < len(pieces):
        last += 1
    while first > 0 and not pieces[first - 1]:
        first -= 1
    parts = pieces[:first], pieces[first : last + 1], pieces[last + 1 :]
    before, fired, after = ("".join(part) for part in parts)
    return before.lstrip(REPLACEMENT), fired, after.rstrip(REPLACEMENT)
