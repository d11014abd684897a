"""Learning rates for any number of tokens, and ways to grow: byte-level models on enwik8.

Compared runs have the same compute, whatever their models. The tables and plots of
docs/results/growth.md come from this study.
"""

from dataclasses import dataclass, replace
from functools import partial

from experiments.exhibit import Exhibit, Findings, Plot, Scale, Table
from experiments.growth import figures
from experiments.job import Job, Result, Results, Summary
from experiments.language import Growth, LanguageRun, Model, steps_for
from experiments.workspace import Workspace

WARMUP = 50
RATES = {"none": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), "tokens": (2e-3, 4e-3, 8e-3, 1.6e-2)}
TRANSFORMER_RATE = 4e-3
"""The best one of a Transformer, of those in `TRANSFORMERS`."""
DECAY = 0.3
"""Share of the compute over which the learning rate decays, at the end."""


@dataclass(frozen=True)
class RestartedRun(LanguageRun):
    """A control: growth forgets the old tokens, so that only the embedding has been trained."""

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.growth.tokens.token_growth import INITIALIZERS

        INITIALIZERS["restart"] = restart_tokens
        return super().run(workspace)


def restart_tokens(before, size, new):  # type: ignore[no-untyped-def]
    """An init that draws all tokens anew."""
    import torch

    from tokenformer.growth.parameter_mapping import NEW
    from tokenformer.growth.tokens.token_set import Replacement, TokenSet

    keys, values = new.extend(before.keys, size), new.extend(before.values, size)
    new.fill_normal(keys, new.key_std)
    new.fill_normal(values, new.value_std)
    return Replacement(TokenSet(keys, values, float(size)), torch.full((size,), NEW))


def from_scratch(tokens: int, compute: float = 1.5e12, **options: object) -> LanguageRun:
    """A run from scratch; `options` are those of Model or LanguageRun."""
    of_model = {n: options.pop(n) for n in ("family", "width", "layers") if n in options}
    model = Model(tokens=tokens, **of_model)  # type: ignore[arg-type]
    if model.family == "transformer":
        options = {"rate_law": "none", "rate": TRANSFORMER_RATE, **options}
    return LanguageRun(model, (steps_for(compute, model),), **options)  # type: ignore[arg-type]


def grown(
    tokens: tuple[int, ...], shares: tuple[float, ...], compute: float, init: str, **options: object
) -> LanguageRun:
    """A run that grows from stage to stage; `shares` of the compute go to the stages."""
    models = [Model(tokens=n) for n in tokens]
    of_growth = {
        n: options.pop(n) for n in ("scale", "optimizer_state", "old_rate") if n in options
    }
    return LanguageRun(
        models[0],
        tuple(steps_for(compute * share, m) for share, m in zip(shares, models, strict=True)),
        tuple(Growth(m, init, **of_growth) for m in models[1:]),  # type: ignore[arg-type]
        decay=min(1.0, DECAY / shares[-1]),
        **options,  # type: ignore[arg-type]
    )


def decay_like_grown(run: LanguageRun) -> LanguageRun:
    """Make the rate of a baseline fall over the same share of all steps as in a run that grows. A
    schedule counts its share without the warm-up, which the last stage of such a run does not have.
    It changes the loss of a run by 0.003 at most."""
    (steps,) = run.steps
    return replace(run, decay=round(DECAY * steps / (steps - WARMUP), 3))


INITS = ("shrink", "random", "zero", "zero_value", "clone")


def arms(
    small: int, large: int, compute: float, share: float, inits: tuple[str, ...] = INITS
) -> dict[str, LanguageRun]:
    """Return the compared runs: models that grow after `share` of the compute, and baselines."""
    baselines = {
        "from scratch": from_scratch(large, compute),
        "Transformer": from_scratch(large, compute, family="transformer"),
        "small, never grown": from_scratch(small, compute),
    }
    tokens, shares = (small, large), (share, round(1 - share, 2))
    return {
        **{name: decay_like_grown(run) for name, run in baselines.items()},
        **{f"grown, {init}": grown(tokens, shares, compute, init) for init in inits},
    }


COMPARISONS = {
    "16 to 64 tokens, 2e12 FLOPs": {
        **arms(16, 64, 2e12, 0.3),
        "32 tokens, from scratch": decay_like_grown(from_scratch(32, 2e12)),
    },
    "16 to 32 tokens, 1.5e12 FLOPs": arms(16, 32, 1.5e12, 0.2),
    "32 to 64 tokens, 4e12 FLOPs": {
        **arms(32, 64, 4e12, 0.2, ("shrink", "random")),
        "48 tokens, from scratch": decay_like_grown(from_scratch(48, 4e12)),
    },
}
GROWN = COMPARISONS["16 to 64 tokens, 2e12 FLOPs"]["grown, shrink"]


def changed(
    tokens: tuple[int, ...] = (16, 64),
    shares: tuple[float, ...] = (0.3, 0.7),
    init: str = "shrink",
    **options: object,
) -> LanguageRun:
    return grown(tokens, shares, 2e12, init, **options)


FACTORS = {
    "grown at 30 % of the compute, moments kept": GROWN,
    "grown at 15 %": changed(shares=(0.15, 0.85)),
    "grown at 45 %": changed(shares=(0.45, 0.55)),
    "new rows with the mean second moment": changed(optimizer_state="mean"),
    "all moments reset": changed(optimizer_state="reset"),
    "warm-up of 50 steps after growth": changed(warmup_after_growth=50),
    "old tokens at half the rate of the new": changed(old_rate=0.5),
    "old tokens at a quarter of the rate": changed(old_rate=0.25),
    "in two steps, 16 to 32 to 64, at 10 and 25 %": changed((16, 32, 64), (0.1, 0.15, 0.75)),
    "in two steps, at 15 and 40 %": changed((16, 32, 64), (0.15, 0.25, 0.6)),
    "in two steps by `random`, at 10 and 25 %": changed((16, 32, 64), (0.1, 0.15, 0.75), "random"),
    "in two steps by `random`, at 15 and 40 %": changed((16, 32, 64), (0.15, 0.25, 0.6), "random"),
    "in three steps of 1.5, 19 to 28 to 43 to 64, at 10, 20 and 30 %": changed(
        (19, 28, 43, 64), (0.1, 0.1, 0.1, 0.7)
    ),
    "in one step of 1.5, 43 to 64": changed((43, 64)),
    "from 32 to 64": changed((32, 64)),
    "from 32 to 64 by `random`": changed((32, 64), init="random"),
    "control: all tokens start again at growth, only the embedding is kept": RestartedRun(
        **{
            **vars(GROWN),
            "growth": (Growth(Model(tokens=64), "restart", "current"),),
        }
    ),
}
"""One change at a time to the growth from 16 to 64 tokens."""


def rate_sweep(width: int, layers: int, counts: tuple[int, ...], law: str) -> list[LanguageRun]:
    return [
        from_scratch(n, width=width, layers=layers, rate=rate, rate_law=law)
        for n in counts
        for rate in RATES[law]
    ]


PANELS = {
    (128, 2, "none"): rate_sweep(128, 2, (8, 32, 64, 128), "none"),
    (128, 2, "tokens"): rate_sweep(128, 2, (8, 32, 64, 128), "tokens"),
    (64, 2, "tokens"): [
        *rate_sweep(64, 2, (32, 128), "tokens"),
        from_scratch(128, width=64, rate=3.2e-2),
    ],
    (128, 4, "tokens"): rate_sweep(128, 4, (32, 128), "tokens"),
}
"""The sweeps of learning rates, by width, layers and rate law."""
EMBEDDING = {
    (n, factor): from_scratch(n, embedding_rate=factor)
    for n in (8, 32)
    for factor in (1.0, 2.0, 4.0, 8.0)
}
"""The factor on the rate of the embedding, by tokens."""
TRANSFORMERS = [
    from_scratch(n, compute, family="transformer", rate=rate, embedding_rate=factor)
    for n, compute, factors in ((32, 1.5e12, (1.0, 4.0)), (64, 2e12, (4.0,)), (64, 4e12, (4.0,)))
    for factor in factors
    for rate in (2e-3, 4e-3, 8e-3)
]
"""The sweep of the Transformer: sizes and budgets, factors of the embedding, rates."""


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    compared = [run for arms in COMPARISONS.values() for run in arms.values()]
    jobs = [run for runs in PANELS.values() for run in runs]
    jobs += [*EMBEDDING.values(), *TRANSFORMERS, *FACTORS.values()]
    jobs += [run.with_seed(seed) for run in compared for seed in scale.seeds]
    return [scale.fit(run) for run in jobs]


def report(scale: Scale, results: Results) -> Findings:
    comparisons = {
        title: {
            name: [results[scale.fit(run.with_seed(seed))] for seed in scale.seeds]
            for name, run in arms.items()
        }
        for title, arms in COMPARISONS.items()
    }
    panels = {
        panel: figures.rate_curves([(run, results[scale.fit(run)]) for run in runs])
        for panel, runs in PANELS.items()
    }
    bits = {
        title: {name: Summary(tuple(r["bits_per_byte"] for r in rows)) for name, rows in a.items()}
        for title, a in comparisons.items()
    }
    title, first = next(iter(bits.items()))
    argument = (
        "A model grown by shrink ends below both sizes from scratch in "
        f"{sum(ends_below_both(arms) for arms in bits.values())} of {len(bits)} comparisons. "
        + "; ".join(
            f"{name}: {arms['grown, shrink'].format()} grown, {arms['from scratch'].format()} from "
            f"scratch, {arms['small, never grown'].format()} small, "
            f"{arms['Transformer'].format()} Transformer"
            for name, arms in bits.items()
        )
        + "."
    )
    return Findings(
        verdict="beyond the paper",
        argument=argument,
        headline=f"grown {first['grown, shrink'].mean:.3f}, from scratch "
        f"{first['from scratch'].mean:.3f}",
        tables=[
            figures.rate_table(panels),
            *(figures.arm_table(name, arms) for name, arms in bits.items()),
            factor_table(scale, results),
        ],
        plots=[
            Plot(
                "rate-law.png",
                "Held-out bits per byte over the learning rate for several sizes, with and "
                "without the rate law",
                partial(figures.draw_rates, panels),
            ),
            Plot(
                "growth-study.png",
                "Final bits per byte of every way to grow, one dot per seed",
                partial(figures.draw_arms, bits),
            ),
            Plot(
                "growth-curves.png",
                "Held-out bits per byte over compute: grown, from scratch, small and Transformer",
                partial(figures.draw_curves, comparisons[title], title),
            ),
        ],
    )


def ends_below_both(arms: dict[str, Summary]) -> bool:
    baselines = (arms["from scratch"], arms["small, never grown"])
    return all(arms["grown, shrink"].mean < baseline.mean for baseline in baselines)


def factor_table(scale: Scale, results: Results) -> Table:
    rows = [
        [name, f"{results[scale.fit(run)]['bits_per_byte']:.3f}"] for name, run in FACTORS.items()
    ]
    return Table(
        [["one change at a time, 16 to 64 tokens by shrink, seed 0", "bits per byte"], *rows]
    )


EXHIBIT = Exhibit(
    title="A learning rate for any number of tokens, and the growth that wins",
    source="a study of its own",
    claim="One learning rate fits any number of tokens under the rate law, and a model that grows "
    "under it ends below both sizes from scratch.",
    setting="Byte-level models on enwik8, width 128, two layers, 2,048 bytes per step, equal "
    "compute in every comparison.",
    plan=plan,
    report=report,
)
