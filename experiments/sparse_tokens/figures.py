"""Tables and plots of the study of sparse tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.exhibit import Table
from experiments.job import Results, Summary, summarize
from experiments.language import LanguageRun, Model
from experiments.plots import BASELINE, GREEN, LIGHT, ORANGE, OURS, PINK, label, new_figure, save
from experiments.sparse_tokens.arms import (
    ACTIVE,
    CONTINUED,
    DENSE,
    DENSE_4,
    EQUAL,
    METHODS,
    MODELS,
    PEER_4,
    PEER_16,
    PRUNED,
    PRUNED_DISTILLED,
    ROUTED,
    ROUTED_DISTILLED,
    SHARES,
    SPARSE_4,
    SPARSE_16,
    SPARSE_64,
    THRESHOLDS,
    Peer,
    Sparsified,
)
from experiments.sweep import Arm

CURVES = {
    "sparse": (OURS, (DENSE, SPARSE_4, SPARSE_16, SPARSE_64)),
    "PEER": (ORANGE, (PEER_4, PEER_16)),
    "dense, all tokens active": (BASELINE, (DENSE, EQUAL, DENSE_4)),
}
"""In the plot of the loss over all tokens: colour and arms."""
STYLES = {
    ROUTED: (LIGHT, "o-"),
    ROUTED_DISTILLED: (OURS, "o-"),
    THRESHOLDS: (GREEN, "s-"),
    PRUNED: (PINK, "^--"),
    PRUNED_DISTILLED: (ORANGE, "^--"),
}


def total_tokens(model: Model | Peer) -> int:
    """Feed-forward tokens, or experts, of a layer."""
    if isinstance(model, Peer):
        return model.size.experts
    return int(model.config().ffn_tokens)


def active_tokens(model: Model | Peer) -> int:
    if isinstance(model, Peer):
        return model.size.active
    if model.active_groups is None:
        return total_tokens(model)
    return model.active_groups * model.group_size


def flops_per_byte(run: Any) -> float:
    """Training FLOPs of one byte."""
    base: LanguageRun = getattr(run, "base", run)
    return float(run.flops) / (sum(base.steps) * base.batch * base.length)


def load(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of the peak load and of the dead groups."""
    if "peak_load" not in row:
        return ["", ""]
    return [f"{row['peak_load']:.2f}", f"{row['dead_groups']:.1f}"]


def model_table(found: Mapping[str, Arm], results: Results) -> Table:
    header = ["feed-forward layer", "tokens", "active", "parameters", "MFLOPs per byte", "rate"]
    header += ["held-out bits per byte", "against dense n", "peak load", "dead groups"]
    rows = []
    reference = found[DENSE].summary(results).mean
    for name, arm in found.items():
        model, run = MODELS[name], arm.runs[0]
        score = arm.summary(results)
        cells = [name, f"{total_tokens(model):,}", str(active_tokens(model))]
        cells += [f"{results[run]['parameters']:,}", f"{flops_per_byte(run) / 1e6:.2f}"]
        cells += [f"{run.rate:g}", score.format(), f"{score.mean - reference:+.3f}"]
        rows.append([*cells, *load(results[run])])
    return Table(
        [header, *rows],
        "FLOPs are those of training with router, norm or retrieval, and of all layers. Load: of "
        "the last 100 steps of seed 0; a peak load of 1 is perfect balance.",
    )


def ablation_table(
    base: LanguageRun, swept: Mapping[str, Arm], single: Mapping[str, LanguageRun], results: Results
) -> Table:
    header = [f"{SPARSE_4}, seed 0", "rate", "bits per byte", "difference"]
    header += ["MFLOPs per byte", "peak load", "dead groups"]
    runs = {"as above": base, **{name: arm.runs[0] for name, arm in swept.items()}, **single}
    rows = []
    for name, run in runs.items():
        bits = results[run]["bits_per_byte"]
        change = bits - results[base]["bits_per_byte"]
        cells = [name, f"{run.rate:g}", f"{bits:.3f}", "" if run is base else f"{change:+.3f}"]
        rows.append([*cells, f"{flops_per_byte(run) / 1e6:.2f}", *load(results[run])])
    return Table([header, *rows])


def growth_table(found: Mapping[str, Arm], results: Results) -> Table:
    header = ["", "steps", "rate", "before", "held-out bits per byte", "against dense n"]
    header += ["peak load", "dead groups"]
    reference = found[CONTINUED].summary(results).mean
    rows = []
    for name, arm in found.items():
        run = arm.runs[0]
        score = arm.summary(results)
        start = run.start
        steps = [*(start.steps if start else ()), *run.steps]
        before = arm.summary(results, "start_bits_per_byte").format() if start else ""
        cells = [name, " + ".join(f"{count:,}" for count in steps), f"{run.rate:g}", before]
        cells += [score.format(), f"{score.mean - reference:+.3f}"]
        rows.append([*cells, *load(results[run])])
    return Table([header, *rows])


def share_table(found: Sparsified, results: Results) -> Table:
    rows = [["dense 4n made sparse", *(f"{share:g}" for share in SHARES)]]
    for name in METHODS:
        scores = [summarize(runs, results).format() for runs in found[name].values()]
        rows.append([name, *scores])
    return Table(rows, "Held-out bits per byte by the share of the feed-forward tokens.")


def error_table(found: Sparsified, results: Results) -> Table:
    """The errors of the layers before distillation."""
    rows = [["error of a layer", *(f"{share:g}" for share in SHARES)]]
    for name, metric, title in (
        (ROUTED, "error", "router"),
        (ROUTED, "oracle_error", "the best groups of every row"),
        (THRESHOLDS, "error", "thresholds on single tokens"),
    ):
        scores = [summarize(runs, results, metric).format() for runs in found[name].values()]
        rows.append([title, *scores])
    return Table(
        rows,
        "Root mean square of what is skipped, relative to the output, before distillation: mean "
        "over the layers.",
    )


def draw_models(found: Mapping[str, Arm], results: Results, path: Path) -> None:
    """Loss over all tokens. The sparse curve and PEER have about the FLOPs of the dashed line."""
    figure, (axes,) = new_figure(7.5, 4.4)
    for title, (colour, names) in CURVES.items():
        scores = [found[name].summary(results) for name in names]
        tokens = [total_tokens(MODELS[name]) for name in names]
        style = "--" if title.startswith("dense") else "-"
        axes.plot(tokens, [s.mean for s in scores], style, color=colour, label=title)
        for count, score in zip(tokens, scores, strict=True):
            axes.plot([count] * len(score.values), score.values, "o", color=colour, markersize=4)
    equal = found[EQUAL].summary(results).mean
    axes.axhline(equal, color=BASELINE, linestyle=":", linewidth=1)
    axes.annotate(
        "dense, the FLOPs of sparse 16n",
        (total_tokens(MODELS[SPARSE_64]), equal),
        ha="right",
        va="bottom",
        fontsize=8,
        color=BASELINE,
    )
    axes.set_xscale("log", base=2)
    counts = [ACTIVE, 4 * ACTIVE, 16 * ACTIVE, 64 * ACTIVE]
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    label(axes, f"feed-forward tokens, {ACTIVE} of them active", "held-out bits per byte")
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def draw_shares(found: Sparsified, reference: Summary, results: Results, path: Path) -> None:
    figure, (axes,) = new_figure(7.5, 4.4)
    for name, (colour, style) in STYLES.items():
        means = [summarize(runs, results).mean for runs in found[name].values()]
        axes.plot(SHARES, means, style, color=colour, markersize=5, label=name)
    axes.axhline(reference.mean, color=BASELINE, linestyle=":", linewidth=1, label="dense")
    axes.set_xticks(SHARES, [f"{share:g}" for share in SHARES])
    label(axes, "share of the feed-forward tokens", "held-out bits per byte")
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
