"""What the tokens of trained models do: clear tokens, sparsity, control, growth from inside.

Byte-level models of enwik8 and of Python sources, measured with `tokenformer.interpret`. Nothing
is chosen by hand: tokens by a rule, sets of tokens by a search whose outcome is checked on
held-out text against two baselines.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean

from experiments.adapters.adapt_run import BASE
from experiments.exhibit import Exhibit, Findings, Plot, Scale
from experiments.growth import grown
from experiments.interpretability.behaviors import BEHAVIORS
from experiments.interpretability.figures import (
    SPECIFIC,
    TENTH,
    Controls,
    Sparse,
    ages,
    clear_table,
    control_table,
    draw_control,
    draw_growth,
    draw_sparsity,
    found_in,
    growth_table,
    is_controlled,
    layer_table,
    page_table,
    rise_of,
    sparsity_table,
)
from experiments.interpretability.measurement import (
    MOST,
    ClearTokens,
    Control,
    OldAndNew,
    Sparsity,
)
from experiments.interpretability.page_cost import PageCost
from experiments.job import Job, Result, Results, summarize
from experiments.language import LanguageRun, Model, steps_for

LENGTH, BATCH = 256, 8
COMPUTE, GROWTH_COMPUTE = 8e12, 4e12
SMALL = Model(tokens=64)
CORPORA = ("enwik8", "python")
RISES = (1.0, 3.0)
SIZES = (16, 64)
SHARE = 0.2
"""Of the compute, before growth."""
INITS = ("zero", "shrink", "random")
PAGE_SEQUENCES = (1000, 4000)


def model_of(corpus: str, seed: int = 0) -> LanguageRun:
    """Return the small model of a corpus; rates are those of the study of growth."""
    steps = steps_for(COMPUTE, SMALL, length=LENGTH, batch=BATCH)
    return LanguageRun(SMALL, (steps,), length=LENGTH, batch=BATCH, corpus=corpus, seed=seed)


SHOWN = {
    "enwik8, 4 layers": BASE,
    "enwik8, 2 layers": model_of("enwik8"),
    "Python, 2 layers": model_of("python"),
}
"""The models of single measurements."""
CLEAR = ("enwik8, 4 layers", "Python, 2 layers")


def sparsity(title: str, trained: bool, scale: Scale) -> Sparsity:
    job: Sparsity = scale.fit(Sparsity(SHOWN[title], trained=trained))
    return job


def clear(title: str, scale: Scale) -> ClearTokens:
    job: ClearTokens = scale.fit(ClearTokens(SHOWN[title]))
    return job


def control(corpus: str, behavior: str, rise: float, scale: Scale) -> list[Control]:
    """Return the search in the small model of every seed."""
    job: Control = scale.fit(Control(model_of(corpus), behavior=behavior, rise=rise))
    return [job.with_seed(seed) for seed in scale.seeds]


def control_base(behavior: str, scale: Scale) -> Control:
    job: Control = scale.fit(Control(BASE, behavior=behavior, rise=RISES[0]))
    return job


def growth(init: str, scale: Scale) -> list[OldAndNew]:
    run = grown(SIZES, (SHARE, 1 - SHARE), GROWTH_COMPUTE, init)
    job: OldAndNew = scale.fit(OldAndNew(run))
    return [job.with_seed(seed) for seed in scale.seeds]


def page(sequences: int, scale: Scale) -> PageCost:
    job: PageCost = scale.fit(PageCost(BASE, sequences=sequences))
    return job


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    jobs: list[Job] = []
    for title in SHOWN:
        jobs += [sparsity(title, trained, scale) for trained in (True, False)]
    jobs += [clear(title, scale) for title in CLEAR]
    for corpus in CORPORA:
        for behavior in BEHAVIORS[corpus]:
            for rise in RISES:
                jobs += control(corpus, behavior, rise, scale)
    jobs += [control_base(behavior, scale) for behavior in BEHAVIORS["enwik8"]]
    for init in INITS:
        jobs += growth(init, scale)
    return [*jobs, *(page(sequences, scale) for sequences in PAGE_SEQUENCES)]


def find_sparse(scale: Scale, results: Results) -> Sparse:
    return {
        title: (
            results[sparsity(title, True, scale)]["layers"],
            results[sparsity(title, False, scale)]["layers"],
        )
        for title in SHOWN
    }


def find_controls(corpus: str, scale: Scale, results: Results) -> Controls:
    return {
        (behavior, rise): [results[job] for job in control(corpus, behavior, rise, scale)]
        for behavior in BEHAVIORS[corpus]
        for rise in RISES
    }


def find_growth(scale: Scale, results: Results) -> dict[str, list[Result]]:
    """Return what the tokens do by init, with the loss of the models."""
    return {
        init: [{**results[job.start], **results[job]} for job in growth(init, scale)]
        for init in INITS
    }


def control_argument(found: Sequence[tuple[tuple[str, float], Sequence[Result]]]) -> str:
    """Say how many behaviors are controlled by how few tokens."""
    rows = [(row, asked) for (_, asked), each in found for row in found_in(each)]
    hits = [row for row, asked in rows if is_controlled(row, asked)]
    text = f"In {len(hits)} of {len(rows)} searches at most {MOST} tokens control the behavior"
    if not hits:
        return f"{text}."
    sizes = sorted(len(row["tokens"]) for row in hits)
    rise, elsewhere, busiest, random = (
        mean(rise_of(row, *each) for row in hits)
        for each in (("after",), ("after", "elsewhere"), ("busiest",), ("random",))
    )
    return (
        f"{text}, between {sizes[0]} and {sizes[-1]} of them: without these its held-out loss "
        f"rises by {rise:.2f} nats on average, and that of all other predictions by "
        f"{elsewhere:.2f}; without as many of the busiest tokens of the same layers it rises by "
        f"{busiest:.2f}, without random ones by {random:.2f}."
    )


def sparsity_argument(sparse: Sparse) -> str:
    title = next(iter(SHOWN))
    trained, untrained = (
        mean(each["work"][TENTH] for each in layers.values()) for layers in sparse[title]
    )
    return (
        f"At a position a tenth of a layer's tokens do {100 * trained:.0f} % of its work on "
        f"average ({title}; untrained {100 * untrained:.0f} %)."
    )


def growth_argument(growth: Mapping[str, Sequence[Result]]) -> str:
    parts = []
    for init, rows in growth.items():
        old, new = (mean(row["rise"][age] for row in rows) for age in ("0", "1"))
        work = mean(each["work"] for each in ages(rows, 1))
        parts.append(f"{100 * work:.0f} % ({new:+.2f} nats, {old:+.2f}) by `{init}`")
    return (
        f"After growth and training on, the new tokens, {100 * (1 - SIZES[0] / SIZES[1]):.0f} % of "
        "all, do this share of the work (and raise the loss by so much if an eighth of every "
        f"layer is switched off, new or old ones): {', '.join(parts)}."
    )


def page_argument(pages: Sequence[Result]) -> str:
    small, large = pages
    return (
        f"The page of the model with 4 layers takes {small['core_seconds']:.0f} core-seconds and "
        f"{small['peak_bytes'] / 1e6:.0f} MB for {small['positions']:,} bytes of text, "
        f"{large['core_seconds']:.0f} and {large['peak_bytes'] / 1e6:.0f} MB for "
        f"{large['positions']:,}."
    )


def notes(scale: Scale, results: Results) -> list[str]:
    losses = [
        f"{title} {summarize([run.with_seed(s) for s in seeds], results).format()}"
        for title, run, seeds in (
            ("enwik8, 4 layers", scale.fit(BASE), (0,)),
            *((f"{c}, 2 layers", scale.fit(model_of(c)), scale.seeds) for c in CORPORA),
        )
    ]
    return [
        f"Held-out bits per byte of the models: {'; '.join(losses)}. A mean over seeds has ±.",
        "**How to read the tables.** *Clear tokens*: the rule is that of "
        "[`interpret.clearest_tokens`](../api.md), selectivity times the share of the eight "
        "strongest contexts that fire at the same text; layers q, k and v are left out because "
        "their values have no name. On held-out text a token fires strongly where its weight is at "
        "least half of its largest one: the precision is the share of these positions at which the "
        "shared text ends, the recall the share of its ends at which the token fires strongly.",
        "*Sparsity*: the work of a token at a position is |weight| x length of its value. What the "
        "top tokens explain is 1 - |rest|²/|output|²; below zero if the others cancel it. The last "
        "columns are of one fixed tenth of the tokens, the busiest over all positions.",
        "*Control*: sets are searched on sequences of the training text that have the behavior and "
        "measured on held-out ones. A behavior counts as controlled if at most "
        f"{MOST} tokens reach the rise that was asked for, the held-out loss rises by at least "
        f"half of it, at least {SPECIFIC} times as much as that of all other predictions, and "
        "twice as much as without the tokens of any baseline. The baselines have as many tokens "
        "of the same layers: those with the largest mean square contribution (some may be in the "
        "set), and random ones, three draws.",
        "*Growth*: an eighth of the tokens of every layer is switched off, old or new ones, three "
        "draws. Dead tokens do less than a hundredth of an average token's work.",
        "*The page*: one process of `tokenformer explore`, one thread; the index keeps up to eight "
        "contexts of every token, so it grows until all tokens have eight good ones.",
    ]


def report(scale: Scale, results: Results) -> Findings:
    sparse = find_sparse(scale, results)
    controls = {corpus: find_controls(corpus, scale, results) for corpus in CORPORA}
    base = {(b, RISES[0]): [results[control_base(b, scale)]] for b in BEHAVIORS["enwik8"]}
    grown_models = find_growth(scale, results)
    pages = [results[page(sequences, scale)] for sequences in PAGE_SEQUENCES]
    everything = [each for found in (*controls.values(), base) for each in found.items()]
    return Findings(
        verdict="beyond the paper",
        argument=" ".join(
            [
                control_argument(everything),
                sparsity_argument(sparse),
                growth_argument(grown_models),
                page_argument(pages),
            ]
        ),
        headline=control_argument(everything),
        tables=[
            *(clear_table(title, results[clear(title, scale)]["tokens"]) for title in CLEAR),
            sparsity_table(sparse),
            *(control_table(f"{c}, 2 layers, three models", controls[c]) for c in CORPORA),
            control_table("enwik8, 4 layers, one model", base),
            growth_table(grown_models),
            layer_table(grown_models),
            page_table(pages),
        ],
        plots=[
            Plot(
                "token-sparsity.png",
                "Share of a layer's work that the hardest-working tokens of a position do, by "
                "layer, in trained and untrained models",
                partial(draw_sparsity, sparse),
            ),
            Plot(
                "token-control.png",
                "Rise of the loss of every behavior without the tokens found, without the busiest "
                "ones and without random ones",
                partial(draw_control, controls),
            ),
            Plot(
                "old-and-new-tokens.png",
                "Old and new tokens after growth: work and selectivity by layer, and the loss "
                "without some of them",
                partial(draw_growth, grown_models),
            ),
        ],
        notes=notes(scale, results),
    )


EXHIBIT = Exhibit(
    title="What the tokens do",
    source="argued in the paper",
    claim="Single tokens fire at patterns that can be named, and few tokens control a behavior.",
    setting=f"""Byte-level models. With 4 layers: recipes/laptop/enwik8.yaml, {BASE.steps[0]:,}
steps, {BASE.model.tokens} attention tokens, seed 0. With 2 layers: width {SMALL.width},
{SMALL.tokens} attention tokens, {COMPUTE:.1e} FLOPs, on enwik8 and on Python's standard library,
three seeds. Grown: {SIZES[0]} to {SIZES[1]} attention tokens after {100 * SHARE:.0f} % of
{GROWTH_COMPUTE:.1e} FLOPs on enwik8, then trained on, three seeds. Feed-forward layers have four
times as many tokens. Learning rates are those of the [study of growth](growth.md); nothing was
tuned here.""",
    plan=plan,
    report=report,
    page="interpretability.md",
)
