"""Score maps to look at: a plot, a page of HTML, and the patches of an image a token fires on.

plot_scores(maps, "3.ffn", "scores.png", vocabulary)         # the strongest tokens by position
write_scores(maps, "scores.html", vocabulary)                # all layers, opens in any browser
plot_patches(maps, [Token("3.ffn", 17)], "patches.png")      # of images, as an overlay
"""

import base64
from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenformer.files import write_atomic
from tokenformer.interpret.score_map import ScoreMap, ScoreMaps
from tokenformer.interpret.token_name import Token
from tokenformer.interpret.vocabulary import Vocabulary

SHOWN_TOKENS = 24
STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1a1d26, #e8eaf0); --mark: 91, 91, 214;
  background: light-dark(#fff, #12141a); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } th { text-align: right; font-weight: 500; padding-right: .8rem;
  white-space: nowrap; vertical-align: top } td { font-family: ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.7 }
mark { color: inherit; background: rgba(var(--mark), var(--w)); border-radius: 2px }
.patches { position: relative; display: inline-grid; width: 8rem; aspect-ratio: 1;
  background-size: 100% 100%; image-rendering: pixelated } .patches mark { border-radius: 0 }
"""


def strongest(scores: ScoreMap, sample: int, count: int) -> Tensor:
    """Return the tokens of a layer with the largest contribution to one sample, in that order."""
    largest = scores.contributions[sample].amax(0)  # [n]
    return largest.topk(min(count, len(largest))).indices


def plot_scores(
    maps: ScoreMaps,
    layer: str,
    path: Path | str,
    vocabulary: Vocabulary | None = None,
    *,
    sample: int = 0,
    tokens: int = SHOWN_TOKENS,
) -> None:
    """Save a heat map of one layer's weights: positions by its strongest tokens."""
    from matplotlib.figure import Figure

    scores = maps[layer]
    rows = strongest(scores, sample, tokens)
    weights = scores.weights[sample][:, rows].T.float().cpu().numpy()  # [rows, T]
    labels = position_labels(maps, sample, vocabulary or Vocabulary())
    figure = Figure(figsize=(2 + 0.16 * len(labels), 1.5 + 0.2 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights, cmap="magma_r", vmin=0, aspect="auto")
    figure.colorbar(image, label="weight", shrink=0.8)
    # "$" would begin mathematics.
    axes.set_xticks(range(len(labels)), [label.replace("$", r"\$") for label in labels], fontsize=7)
    axes.set_yticks(range(len(rows)), [str(row) for row in rows.tolist()], fontsize=7)
    axes.set(xlabel="position", ylabel="token", title=f"weights of {layer}")
    figure.savefig(path, dpi=150)


def position_labels(maps: ScoreMaps, sample: int, vocabulary: Vocabulary) -> list[str]:
    if maps.inputs.ndim == 2:
        return [vocabulary.label(each) for each in maps.inputs[sample].tolist()]
    return [str(position) for position in range(maps.final.shape[1])]


def write_scores(
    maps: ScoreMaps,
    path: Path | str,
    vocabulary: Vocabulary | None = None,
    *,
    sample: int = 0,
    tokens: int = 8,
    title: str = "Score maps",
) -> None:
    """Write a page of HTML with the strongest tokens of every layer over the input."""
    vocabulary = vocabulary or Vocabulary()
    parts = []
    for name, scores in maps.items():
        rows = []
        for index in strongest(scores, sample, tokens).tolist():
            weights = scores.weights[sample, :, index].float()
            shown = (weights / weights.max().clamp_min(1e-9)).clamp(0, 1).tolist()
            label = f"{index}<br><small>up to {weights.max().item():.2f}</small>"
            rows.append(f"<tr><th>{label}<td>{marked(maps, sample, shown, vocabulary)}")
        parts.append(f"<h2>{escape(name)}</h2><table>{''.join(rows)}</table>")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>{''.join(parts)}</html>\n"
    )
    write_atomic(Path(path), page)


def marked(maps: ScoreMaps, sample: int, weights: Sequence[float], vocabulary: Vocabulary) -> str:
    """Return the input as HTML; weights from 0 to 1 by position color the background."""
    if maps.inputs.ndim == 2:
        pieces, waiting, html = vocabulary.pieces(maps.inputs[sample].tolist()), 0.0, []
        for piece, weight in zip(pieces, weights, strict=True):
            waiting = max(waiting, weight)  # a character of several ids takes their largest
            if piece:
                html.append(mark(escape(piece), waiting))
                waiting = 0.0
        return "".join(html)
    image = maps.inputs[sample]
    grid = patch_grid(maps, torch.tensor(weights))
    cells = "".join(mark("", weight, 0.8) for weight in grid.flatten().tolist())
    columns = f"grid-template-columns: repeat({grid.shape[1]}, 1fr)"
    background = f"background-image: url({png_url(to_picture(image))})"
    return f'<span class="patches" style="{columns}; {background}">{cells}</span>'


def mark(html: str, weight: float, strongest: float = 0.75) -> str:
    return f'<mark style="--w:{strongest * weight:.2f}">{html}</mark>'


def patch_grid(maps: ScoreMaps, weights: Tensor) -> Tensor:
    """Return the weights [T] of the patches of an image as a grid [rows, columns]."""
    rows, columns = maps.grid or (1, len(weights))
    return weights[-rows * columns :].view(rows, columns)  # without the class token


def to_picture(image: Tensor) -> npt.NDArray[np.uint8]:
    """Return normalized pixels [C, H, W] as a picture [H, W, 3], stretched to its whole range."""
    pixels = image.float().cpu()
    low, high = pixels.min(), pixels.max()
    scaled = ((pixels - low) / (high - low).clamp_min(1e-9) * 255).round().to(torch.uint8)
    picture: npt.NDArray[np.uint8] = scaled.permute(1, 2, 0).numpy()
    return np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture


def png_url(picture: npt.NDArray[np.uint8]) -> str:
    from matplotlib.image import imsave

    buffer = BytesIO()
    imsave(buffer, picture, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def plot_patches(
    maps: ScoreMaps,
    tokens: Sequence[Token],
    path: Path | str,
    *,
    samples: int = 8,
) -> None:
    """Save the images of a batch with the patches that tokens fire on: a row per token."""
    from matplotlib.figure import Figure

    if maps.inputs.ndim != 4:
        raise ValueError("the input is text; patches are of images")
    count = min(samples, len(maps.inputs))
    figure = Figure(figsize=(1 + 1.2 * count, 1.4 * len(tokens)), layout="constrained")
    grid: Any = figure.subplots(len(tokens), count, squeeze=False)
    for row, token in zip(grid, tokens, strict=True):
        weights = maps[token.layer].weights[:count, :, token.number].float().cpu()
        strongest_weight = weights.max().clamp_min(1e-9).item()
        for sample, axes in enumerate(row):
            picture = to_picture(maps.inputs[sample])
            fired = patch_grid(maps, weights[sample]).clamp_min(0)
            height, width = picture.shape[:2]
            axes.imshow(picture, extent=(0, width, height, 0))
            axes.imshow(
                np.ones((*fired.shape, 3)) * (0.93, 0.22, 0.38),
                alpha=(fired / strongest_weight * 0.7).clamp(0, 1).numpy(),
                extent=(0, width, height, 0),
                interpolation="nearest",
            )
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(str(token), fontsize=8)
    figure.savefig(path, dpi=150)
