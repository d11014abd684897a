"""The paper's figure: FLOPs against sequence length for the four growth sizes and baselines.

with open("flops.png", "wb") as file:
    draw_flops(file, "png", longest=65536)
"""

from typing import BinaryIO

from tokenformer.models.accounting import GROWTH_SIZES, training_flops
from tokenformer.models.configuration import LanguageConfig, TokenformerConfig, TransformerConfig

POINTS = 128
# Readable on white and distinguishable with color blindness.
COLORS = ("#0072b2", "#009e73", "#d55e00", "#7b3294")


def draw_flops(file: BinaryIO, suffix: str, longest: int) -> None:
    """Plot training FLOPs for sequences of up to `longest` tokens; `suffix` is png, pdf or svg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    # Without pyplot, so the caller's backend and open figures are unaffected.
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    total, ratio = figure.subplots(1, 2, width_ratios=(3, 2))
    lengths = [max(1, longest * step // POINTS) for step in range(1, POINTS + 1)]
    for size, color in zip(GROWTH_SIZES, COLORS, strict=True):
        ours = sequence_flops(TokenformerConfig.from_preset(size), lengths)
        theirs = sequence_flops(TransformerConfig.from_preset(size), lengths)
        total.plot(lengths, ours, color=color, linewidth=2)
        total.plot(lengths, theirs, color=color, linewidth=2, linestyle=(0, (4, 2)))
        quotients = [a / b for a, b in zip(theirs, ours, strict=True)]
        ratio.plot(lengths, quotients, color=color, linewidth=2)
        ratio.annotate(
            size.upper(),
            (lengths[-1], quotients[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            verticalalignment="center",
        )
    total.set_title("Training FLOPs per sequence")
    total.set_ylabel("forward and backward")
    total.yaxis.set_major_formatter(EngFormatter(unit="FLOPs"))
    ratio.set_title("Transformer / TokenFormer")
    for axes in (total, ratio):
        axes.set_xlabel("sequence length in tokens")
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    total.set_ylim(bottom=0)
    families = [
        Line2D([], [], color="0.3", linewidth=2, label="TokenFormer"),
        Line2D([], [], color="0.3", linewidth=2, linestyle=(0, (4, 2)), label="Transformer"),
    ]
    # At 124M both have the same width and their lines coincide.
    labels = [f"{GROWTH_SIZES[0].upper()}, both", *(size.upper() for size in GROWTH_SIZES[1:])]
    sizes = [
        Line2D([], [], color=color, linewidth=2, label=label)
        for label, color in zip(labels, COLORS, strict=True)
    ]
    total.legend(handles=families + sizes, loc="upper left", frameon=False)
    figure.savefig(file, format=suffix, dpi=150)


def sequence_flops(config: LanguageConfig, lengths: list[int]) -> list[int]:
    return [sum(training_flops(config, length).values()) for length in lengths]
