"""The data of the page, in pieces that a page opened from disk can load.

A browser lets a page from disk load scripts but not read files, so every piece is a script that
calls `TF.take(name, value)`. Numbers have three digits, weights in text are levels from 0 to 9.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer.interpret.clear_tokens import clearest_tokens
from tokenformer.interpret.growth_view import growth_view
from tokenformer.interpret.index_tokens import small_pictures
from tokenformer.interpret.score_map import ScoreMaps
from tokenformer.interpret.token_index import BEFORE, LayerIndex, TokenIndex
from tokenformer.interpret.token_name import Token
from tokenformer.interpret.vocabulary import REPLACEMENT, Vocabulary

CHUNK = 128
"""Tokens per piece of details, and images per piece."""
LEVELS = 9
CURVE = [n / 32 for n in range(33)]
"""Points of the curve of how work is spread over the tokens of a layer."""
SNIPPET_BEFORE, SNIPPET_AFTER = 22, 12
CLEAREST, SHOWN, TABLE_WORDS = 12, 3, 4
EXAMPLE_TOKENS, POSITION_TOKENS = 12, 8
PREDICTIONS, EFFECTS = 3, 6

Runs = list[tuple[str, int]]
"""A text in parts of one level each; of the part that fired, the level is 10 higher."""


class SiteData:
    """Makes the pieces from an index, its context weights and a vocabulary."""

    def __init__(
        self,
        index: TokenIndex,
        weights: dict[str, Tensor],
        vocabulary: Vocabulary,
        name: str = "",
        source: str = "",
        parameters: int = 0,
    ) -> None:
        """`name` is that of the model, `source` that of the data."""
        self.index, self.weights, self.vocabulary = index, weights, vocabulary
        self.name, self.source, self.parameters = name, source, parameters

    @property
    def is_text(self) -> bool:
        return self.index.summary.grid is None

    def overview(self, examples: int) -> dict[str, Any]:
        """The piece that the page starts with."""
        summary = self.index.summary
        view = growth_view(self.index)
        layers = []
        for name, layer in self.index.layers.items():
            rows = [row for row in view if row.layer == name]
            layers.append(
                {
                    "name": name,
                    "tokens": len(layer),
                    "dead": int(layer.dead.sum()),
                    "curve": [short(each) for each in busiest(layer, CURVE)],
                    "tenth": short(busiest(layer, [0.1])[0]),
                    "ages": [
                        [row.age, row.tokens, *map(short, (row.work, row.selectivity)), row.dead]
                        for row in rows
                    ],
                }
            )
        shape = self.index.samples.shape
        return {
            "model": self.name,
            "source": self.source,
            "parameters": self.parameters,
            "positions": summary.positions,
            "samples": summary.samples,
            "threshold": summary.threshold,
            "ages": view.ages,
            "chunk": CHUNK,
            "layers": layers,
            "clearest": self.clearest(),
            "examples": examples,
            "image": None if self.is_text else [*shape[1:], *(summary.grid or ())],
            "classTokens": summary.class_tokens,
        }

    def table(self, name: str) -> dict[str, Any]:
        """The columns of the list of tokens, for one layer."""
        layer = self.index.layers[name]
        columns = {
            "frequency": layer.frequency,
            "work": layer.work * len(layer),  # 1 is the average
            "selectivity": layer.selectivity,
            "largest": layer.largest,
        }
        tops = [first(self.tops(name, n, 1), None) for n in range(len(layer))]
        return {
            **{key: [short(value) for value in column.tolist()] for key, column in columns.items()},
            "age": layer.ages.tolist(),
            "dead": layer.dead.int().tolist(),
            "words": [self.table_words(name, n) for n in range(len(layer))],
            "snippets": [first(self.snippets(name, n, 1), []) for n in range(len(layer))],
            **({} if self.is_text else {"tops": tops}),
        }

    def words(self, ids: list[int]) -> list[str]:
        return [self.index.word(each, self.vocabulary) for each in ids]

    def tops(self, name: str, number: int, count: int) -> list[list[Any]]:
        """Return where a token fires most in images: the sample, the patch, and all levels."""
        return [] if self.is_text else [each[1:] for each in self.contexts(name, number)[:count]]

    def snippets(self, name: str, number: int, count: int) -> list[list[str]]:
        """Return the strongest contexts of a token, short: before, fired and after."""
        if not self.is_text:
            return []
        found = self.index.contexts(
            Token(name, number),
            self.vocabulary,
            count=count,
            before=SNIPPET_BEFORE,
            after=SNIPPET_AFTER,
        )
        return [[each.before, each.fired, each.after] for each in found]

    def clearest(self) -> list[list[Any]]:
        """Return the tokens that are easiest to name, with their strongest contexts."""
        found = []
        for each in clearest_tokens(self.index, self.vocabulary, CLEAREST):
            name, number = each.token
            places = self.snippets(name, number, SHOWN), self.tops(name, number, SHOWN)
            found.append([name, number, *places, self.table_words(name, number)])
        return found

    def table_words(self, name: str, number: int) -> list[str]:
        """Return the first words that a token promotes."""
        layer = self.index.layers[name]
        rises = layer.promoted_by[number] > 0
        return self.words(layer.promoted[number][rises][:TABLE_WORDS].tolist())

    def details(self, name: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the details of the tokens of a layer, `CHUNK` at a time."""
        count = len(self.index.layers[name])
        for start in range(0, count, CHUNK):
            yield [self.detail(name, n) for n in range(start, min(count, start + CHUNK))]

    def detail(self, name: str, number: int) -> dict[str, Any]:
        layer = self.index.layers[name]

        def pairs(ids: Tensor, scores: Tensor) -> list[list[Any]]:
            rows = zip(ids[number].tolist(), scores[number].tolist(), strict=True)
            return [[each, short(score)] for each, score in rows]

        def named(found: list[list[Any]]) -> list[list[Any]]:
            return [[self.index.word(each, self.vocabulary), score] for each, score in found]

        return {
            "mean": short(layer.mean_weight[number].item()),
            "norm": short(layer.norm_share[number].item() * len(layer)),
            "key": short(layer.key_lengths[number].item()),
            "value": short(layer.value_lengths[number].item()),
            "histogram": layer.histogram[number].tolist(),
            "promoted": named(pairs(layer.promoted, layer.promoted_by)),
            "suppressed": named(pairs(layer.suppressed, layer.suppressed_by)),
            "likeKey": pairs(layer.like_key, layer.like_key_by),
            "likeValue": pairs(layer.like_value, layer.like_value_by),
            "contexts": self.contexts(name, number),
        }

    def contexts(self, name: str, number: int) -> list[list[Any]]:
        """Return the top contexts: weight, sample, position, and text in runs or patch levels."""
        found = []
        highest = max(self.index.layers[name].largest[number].item(), 1e-9)
        for rank, each in enumerate(self.index.contexts(Token(name, number), self.vocabulary)):
            weights = self.weights[name][number, rank].float() / highest
            if self.is_text:
                first = BEFORE - min(BEFORE, each.position)
                around = levels(weights[first : first + len(each.ids)])
                body: Any = text_runs(each.ids, around, BEFORE - first, self.vocabulary)
                row = each.sample
            else:
                body, row = digits(levels(weights)), self.index.rows[each.sample]
            found.append([short(each.weight), row, each.position, body])
        return found

    def images(self) -> Iterator[list[str]]:
        """Yield the samples of an image classifier as base64 of [C, H, W] bytes."""
        for part in self.index.samples.split(CHUNK):
            yield [base64.b64encode(each.numpy().tobytes()).decode() for each in part]

    def example(
        self,
        maps: ScoreMaps,
        sample: int,
        logits: Tensor,
        effects: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Any]:
        """The score maps of one input: the strongest tokens of each layer, and at each position.
        `effects` are the direct effects on the most likely logit of each position of a text."""
        if self.is_text:
            ids = maps.inputs[sample].tolist()
            groups, texts = grouped(ids, self.vocabulary)
        else:
            length = maps.final.shape[1]
            groups, texts = [[n] for n in range(length)], [""] * length
        layers, fired = [], list[tuple[str, Tensor, Tensor]]()
        for name, each in maps.items():
            weights = each.weights[sample].float()  # [T, n]
            shares = each.contributions[sample].float()
            shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-12)
            best = shares.amax(0).topk(min(EXAMPLE_TOKENS, shares.shape[1])).indices
            rows = []
            for number in best.tolist():
                column = torch.stack([weights[group, number].amax() for group in groups])
                top = column.amax().item()
                rows.append([number, short(top), digits(levels(column / max(top, 1e-9)))])
            layers.append([name, rows])
            fired.append((name, weights, shares))
        found = {
            "texts": texts,
            "layers": layers,
            "positions": [self.at_position(fired, group[-1]) for group in groups],
        }
        if self.is_text:
            chances = logits[sample].float().softmax(-1)  # [T, V]
            ends = [group[-1] for group in groups]
            found["next"] = [predictions(chances[end], self.vocabulary) for end in ends]
            found["then"] = [
                [self.vocabulary.label(ids[end + 1]), short(chances[end, ids[end + 1]].item())]
                for end in ends
                if end + 1 < len(ids)
            ]
        if effects is not None:
            found["effects"] = [largest_effects(effects, sample, group[-1]) for group in groups]
        if not self.is_text:
            found["image"] = image_bytes(maps.inputs[sample])
            best_classes = logits[sample].float().softmax(-1).topk(min(3, logits.shape[-1]))
            pairs = zip(*(each.tolist() for each in reversed(best_classes)), strict=True)
            found["classes"] = [
                [self.index.word(each, self.vocabulary), short(p)] for each, p in pairs
            ]
        return found

    def at_position(
        self, fired: list[tuple[str, Tensor, Tensor]], position: int
    ) -> list[list[Any]]:
        """Return the tokens with the largest share of their layer's work at a position."""
        rows = []
        for name, weights, shares in fired:
            best = shares[position].topk(min(3, shares.shape[1]))
            for share, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                rows.append([name, number, short(weights[position, number].item()), short(share)])
        return sorted(rows, key=lambda row: -row[3])[:POSITION_TOKENS]


def largest_effects(effects: Mapping[str, Tensor], sample: int, position: int) -> list[list[Any]]:
    """Return the tokens that raise the logit most at a position: layer, number and effect."""
    rows = []
    for name, effect in effects.items():
        best = effect[sample, position].topk(min(EFFECTS, effect.shape[-1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows += [[name, number, short(value)] for number, value in pairs if value > 0]
    return sorted(rows, key=lambda row: -row[2])[:EFFECTS]


def first(found: list[Any], default: Any) -> Any:
    return found[0] if found else default


def short(value: float) -> float:
    """Return a number with three digits; None would be the only JSON for inf and NaN."""
    if not math.isfinite(value):
        return 0.0
    return float(f"{value:.3g}")


def busiest(layer: LayerIndex, shares: Sequence[float]) -> list[float]:
    """Return the share of the work that the busiest of these shares of the tokens do. Of a token
    that is only partly among them, that part counts."""
    work = layer.work.sort(descending=True).values
    total = torch.cat([work.new_zeros(1), work.cumsum(0)])  # [n + 1]
    at = torch.tensor(shares, dtype=work.dtype) * len(layer)
    whole = at.long().clamp(max=len(layer) - 1)
    found: list[float] = (total[whole] + (at - whole) * work[whole]).tolist()
    return found


def levels(weights: Tensor) -> list[int]:
    """Return levels from 0 to 9 of weights relative to the largest."""
    found: list[int] = (weights.clamp(0, 1) * LEVELS).round().int().tolist()
    return found


def digits(found: list[int]) -> str:
    return "".join(map(str, found))


def grouped(ids: list[int], vocabulary: Vocabulary) -> tuple[list[list[int]], list[str]]:
    """Group positions whose ids make one character; return the groups and their texts."""
    groups, texts, waiting = list[list[int]](), list[str](), list[int]()
    for position, piece in enumerate(vocabulary.pieces(ids)):
        waiting.append(position)
        if piece:
            groups.append(waiting)
            texts.append(piece)
            waiting = []
    return groups, texts


def text_runs(ids: list[int], found: list[int], position: int, vocabulary: Vocabulary) -> Runs:
    """Return a text in runs of equal level; the part that fired is a run of its own."""
    runs: Runs = []
    parts = list(zip(*grouped(ids, vocabulary), strict=True))
    # As in `token_index.cut`, without the characters that the text begins or ends within.
    for end, strip in ((0, str.lstrip), (-1, str.rstrip)):
        while position not in parts[end][0]:
            group, text = parts.pop(end)
            if text := strip(text, REPLACEMENT):
                parts.insert(end if end == 0 else len(parts), (group, text))
                break
    for group, text in parts:
        level = max(found[n] for n in group) + (10 if position in group else 0)
        if runs and runs[-1][1] == level and level < 10:
            runs[-1] = (runs[-1][0] + text, level)
        else:
            runs.append((text, level))
    return runs


def predictions(chances: Tensor, vocabulary: Vocabulary) -> list[list[Any]]:
    best = chances.topk(min(PREDICTIONS, len(chances)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[vocabulary.label(each), short(p)] for each, p in pairs]


def image_bytes(image: Tensor) -> str:
    return base64.b64encode(small_pictures(image[None])[0].numpy().tobytes()).decode()


def script(name: str, value: Any) -> str:
    """Return the JavaScript that hands a piece to the page."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII, so any encoding does
    return f'TF.take("{name}",{data})\n'
