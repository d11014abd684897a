"""Sparse tokens: more parameter tokens at the same cost per row.

Byte-level models whose feed-forward layers route each row to a few groups of tokens, against dense
models and PEER at equal active FLOPs; a dense model that grows without becoming slower; and trained
dense models made sparse.
"""

from functools import partial
from itertools import pairwise
from typing import Any

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale
from experiments.job import Job, Results, Summary, summarize
from experiments.sparse_tokens import figures
from experiments.sparse_tokens.arms import (
    ACTIVE,
    CONTINUED,
    DENSE,
    DENSE_4,
    DISTILL_STEPS,
    EQUAL,
    FROM_SCRATCH,
    GROUP,
    GROWN_DENSE,
    MORE_STEPS,
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
    STEPS,
    THRESHOLDS,
    UPCYCLED,
    WIDE_SPARSE,
    Sparsified,
    ablations,
    growth_arms,
    model_arms,
    sparsified,
)
from experiments.sweep import Arm

TARGET = 0.05
"""By how many bits per byte sparse 4n was to end below dense n."""
QUARTER = 0.25


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    jobs: list[Job] = [job for arm in model_arms(scale, results).values() for job in arm.jobs]
    swept, single = ablations(scale, results)
    jobs += [job for arm in swept.values() for job in arm.jobs]
    jobs += single.values()
    jobs += [job for arm in growth_arms(scale, results).values() for job in arm.jobs]
    sweeps, found = sparsified(scale, results)
    jobs += sweeps
    jobs += [run for by_share in found.values() for runs in by_share.values() for run in runs]
    return jobs


def costs(scale: Scale, results: Results) -> Arms:
    """The arms from scratch and those that train further; PEER is not evaluated sparsely."""
    arms: dict[str, Any] = {
        name: arm.runs[:1]
        for name, arm in model_arms(scale, results).items()
        if name not in (PEER_4, PEER_16)
    }
    for name, arm in growth_arms(scale, results).items():
        run = arm.runs[0]
        arms[name] = [run] if run.start is None else [run.start, run]
    return arms


def at_equal_flops(found: dict[str, Arm], results: Results) -> str:
    """What more tokens buy at equal active FLOPs, where that ends, and against PEER."""
    bits = {name: arm.summary(results) for name, arm in found.items()}
    gains = {name: bits[DENSE].mean - bits[name].mean for name in bits}
    steps = (SPARSE_4, SPARSE_16, SPARSE_64)
    reached = "reaches" if gains[SPARSE_4] >= TARGET else "misses"
    curve = ", ".join(f"{name} {bits[name].format()} ({-gains[name]:+.3f})" for name in steps)
    ends = end_of_returns([DENSE, *steps], bits)
    wide = bits[WIDE_SPARSE].mean - bits[DENSE_4].mean
    return (
        f"**Equal active FLOPs.** Dense n ends at {bits[DENSE].format()} bits per byte; with as "
        f"many active tokens {curve}, which {reached} the target of {-TARGET:+.2f} for 4n; {ends}. "
        f"At the FLOPs of sparse 16n a dense layer ends at {bits[EQUAL].format()}, PEER at "
        f"{bits[PEER_16].format()} with 16n experts and at {bits[PEER_4].format()} with 4n; dense "
        f"4n, with more FLOPs, at {bits[DENSE_4].format()}, and with as many active tokens sparse "
        f"16n is {wide:+.3f} from it."
    )


def end_of_returns(names: list[str], bits: dict[str, Summary]) -> str:
    """Say up to which size every seed is below every seed of the size before."""
    last = names[0]
    for before, after in pairwise(names):
        if not bits[before].above(bits[after]):
            return f"{after} is not below {before} in every seed, so the returns end at {last}"
        last = after
    return f"each is below the one before in every seed, so the returns last to {last} at least"


def of_growth(found: dict[str, Arm], results: Results) -> str:
    bits = {name: arm.summary(results) for name, arm in found.items()}
    below = "in every seed" if bits[CONTINUED].above(bits[UPCYCLED]) else "not in every seed"
    jump = [
        results[run]["start_bits_per_byte"] - results[run.start]["bits_per_byte"]
        for run in found[UPCYCLED].runs
    ]
    return (
        f"**Growth without inference cost.** After {MORE_STEPS:,} more steps the dense model ends "
        f"at {bits[CONTINUED].format()} and the one upcycled to 4n tokens at "
        f"{bits[UPCYCLED].format()}, below it {below}; upcycling itself changed the loss by "
        f"{sum(jump) / len(jump):+.3f}. Grown to dense 4n, whose rows cost more, it ends at "
        f"{bits[GROWN_DENSE].format()}, and a model that is sparse from the first step at "
        f"{bits[FROM_SCRATCH].format()}."
    )


def of_sparsified(found: Sparsified, dense: Summary, results: Results) -> str:
    def rise(name: str, share: float) -> str:
        return f"{summarize(found[name][share], results).mean - dense.mean:+.3f}"

    distilled, pruned = ROUTED_DISTILLED, PRUNED_DISTILLED
    wins = [s for s in SHARES if is_below(found[distilled][s], found[pruned][s], results)]
    shares = ", ".join(f"{share:g}" for share in wins)
    places = f"in every seed at shares of {shares}" if wins else "at no share in every seed"
    return (
        f"**A trained dense model made sparse.** Dense 4n ends at {dense.format()}; with a quarter "
        f"of the tokens the loss rises by {rise(ROUTED, QUARTER)} with fitted routers, "
        f"{rise(THRESHOLDS, QUARTER)} with thresholds, which still compute all scores, and "
        f"{rise(PRUNED, QUARTER)} by pruning. After {DISTILL_STEPS} steps of distillation it is "
        f"{rise(distilled, QUARTER)} routed and {rise(pruned, QUARTER)} pruned; routing is below "
        f"pruning, both distilled, {places}."
    )


def is_below(ours: list[Any], theirs: list[Any], results: Results) -> bool:
    return summarize(theirs, results).above(summarize(ours, results))


def report(scale: Scale, results: Results) -> Findings:
    models, grown = model_arms(scale, results), growth_arms(scale, results)
    swept, single = ablations(scale, results)
    _, made_sparse = sparsified(scale, results)
    dense = models[DENSE_4].summary(results)
    gain = models[SPARSE_4].summary(results).mean - models[DENSE].summary(results).mean
    return Findings(
        verdict="beyond the paper",
        argument="\n\n".join(
            [
                at_equal_flops(models, results),
                of_growth(grown, results),
                of_sparsified(made_sparse, dense, results),
            ]
        ),
        headline=f"sparse 4n {gain:+.3f} bits per byte against dense n",
        tables=[
            figures.model_table(models, results),
            figures.ablation_table(models[SPARSE_4].runs[0], swept, single, results),
            figures.growth_table(grown, results),
            figures.share_table(made_sparse, results),
            figures.error_table(made_sparse, results),
        ],
        plots=[
            Plot(
                "sparse-tokens.png",
                "Held-out bits per byte over the feed-forward tokens, at equal active tokens",
                partial(figures.draw_models, models, results),
            ),
            Plot(
                "sparsify.png",
                "Held-out bits per byte over the active share of the tokens of a dense model",
                partial(figures.draw_shares, made_sparse, dense, results),
            ),
        ],
    )


EXHIBIT = Exhibit(
    title="Sparse tokens",
    source="named as future work in the paper",
    claim="With each key-value token as an expert, a model can have more tokens without more "
    f"computation: at equal active FLOPs sparse 4n ends at least {TARGET} bits per byte below "
    "dense n.",
    setting=f"Byte-level models on enwik8, two layers, width 128, 32 tokens per attention "
    f"projection, feed-forward layers of n = {ACTIVE} active tokens in groups of {GROUP} (64 for "
    f"64n); {STEPS:,} steps of 2,048 bytes. Gated routers, norm over the chosen tokens, load "
    f"balancing by bias. Rates: the best of at least three for every arm, under the rate law, by "
    "the held-out loss of seed 0; three seeds, one for ablations, which use the rate of sparse 4n "
    "except for other routers. PEER (arXiv 2407.04153): four heads, half queries of 8 channels, "
    "with as many experts per head as the FLOPs allow. Made sparse: the models of dense 4n, "
    "feed-forward layers only.",
    plan=plan,
    report=report,
    page="sparse-tokens.md",
    arms=costs,
)
