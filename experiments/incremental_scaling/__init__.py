"""Incremental scaling: grow a TokenFormer by tokens, and a Transformer by eight published methods.

Both sides start from a tuned model and grow twice to the same parameters, with the same tokens per
stage and a fresh optimizer, as in the paper's comparison with Net2Net and HyperCloning. Widths
double, so that the methods that need whole factors are exact.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.exhibit import Arms, Exhibit, Findings, Plot, Scale, Table, Verdict
from experiments.job import Job, Results, Summary, summarize
from experiments.language import Growth, LanguageRun, Model
from experiments.plots import draw_dots
from experiments.sweep import Arm, tune

SOURCE, STAGE, BATCH = 2400, 600, 4
"""Steps, the paper's 60B and 15B tokens, and sequences of 128 bytes per step."""
LIGO_STEPS = 100
"""Of a stage; the rest trains the grown model."""
NOISE = 0.1
"""Relative noise on replicas, which would stay equal without it: fresh AdamW gives them the same
updates."""
TOKENS = (48, 200, 792)
"""Tokens of the TokenFormers, of width 64: parameters within 0.1 % of the Transformers'."""
TOKENFORMERS = [Model(tokens=n, width=64) for n in TOKENS]
TRANSFORMERS = [
    Model("transformer", None, width=64 * 2**n, heads=4 * 2**n) for n in range(len(TOKENS))
]
DEEPER = [replace(TRANSFORMERS[0], layers=2 * 4**n) for n in range(len(TOKENS))]
"""What stacking grows to: four times the layers have as many parameters as twice the width."""
METHODS = {
    "net2net": "Net2Net",
    "block_padding": "block padding (the paper's Net2Net)",
    "hypercloning": "HyperCloning",
    "lemon": "LEMON",
    "bert2bert_fpi": "bert2BERT, FPI",
    "bert2bert_aki": "bert2BERT, AKI",
    "ligo": "LiGO",
    "stacking": "stacking",
}
INITS = {name: f"TokenFormer, `{name}`" for name in ("shrink", "random", "zero")}
NAMES = INITS | METHODS
RATES = {"tokenformer": (2e-3, 4e-3, 8e-3), "transformer": (1e-3, 2e-3, 4e-3)}
PAPER = {
    "net2net": (16.4, 14.3, 12.1),
    "hypercloning": (16.4, 14.1, 12.0),
    "random": (16.1, 13.7, 11.5),
}
"""Perplexities at 124M, 354M and 757M, from the paper's Table 8. Its TokenFormer grows as in its
progressive scaling, by random tokens."""
TOKEN_TOKEN = {"TokenFormer": (3.6, 3.6, 3.6), "Transformer": (3.6, 6.8, 10.1)}
"""The paper's FLOPs of token-token interaction, in units of 1e4 T^2."""


def sizes(name: str) -> list[Model]:
    """The three models that a way of growing goes through."""
    if name in INITS:
        return TOKENFORMERS
    return DEEPER if name == "stacking" else TRANSFORMERS


def trained(steps: int, rate: float, family: str, **options: object) -> LanguageRun:
    return LanguageRun(  # type: ignore[arg-type]
        steps=(steps,),
        batch=BATCH,
        rate=rate,
        rate_law=Model(family).rate_law,
        schedule="cosine",
        floor=0.01,
        validations=4,
        **options,
    )


def tune_source(family: str, scale: Scale, results: Results) -> Arm:
    model = TOKENFORMERS[0] if family == "tokenformer" else TRANSFORMERS[0]
    return tune(
        lambda rate: scale.fit(trained(SOURCE, rate, family, model=model)),
        RATES[family],
        scale,
        results,
    )


def stage(name: str, size: int, rate: float, start: LanguageRun, scale: Scale) -> LanguageRun:
    """Return the run that grows the model of `start` to a size and trains it."""
    to = sizes(name)[size]
    if name in INITS:
        growth = Growth(to, init=name)
    else:
        noise = NOISE if name in ("net2net", "hypercloning") else None
        growth = Growth(to, method=name, noise=noise)
    steps = STAGE
    if name == "ligo":
        growth, steps = replace(growth, learning_steps=LIGO_STEPS), STAGE - LIGO_STEPS
    run = trained(steps, rate, to.family, growth=(growth,), start=start)
    return replace(scale.fit(run), start=start)


def tuned_runs(scale: Scale, results: Results) -> tuple[list[Job], dict[str, list[LanguageRun]]]:
    """Return all jobs that can be named yet, and for every way of growing the runs of its two
    stages, at the best rates, if these are known. The second stage has the rate of the first."""
    jobs: list[Job] = []
    tuned: dict[str, list[LanguageRun]] = {}
    for family in RATES:
        source = tune_source(family, scale, results)
        jobs += source.jobs
        for name in NAMES if source.runs else ():
            if sizes(name)[0].family == family:
                arm = tune(
                    lambda rate, n=name, start=source.runs[0]: stage(n, 1, rate, start, scale),
                    RATES[family],
                    scale,
                    results,
                )
                jobs += arm.jobs
                if arm.runs:
                    first = arm.runs[0]
                    tuned[name] = [first, stage(name, 2, first.rate, first, scale)]
    return jobs, tuned


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return paper_plan()
    jobs, tuned = tuned_runs(scale, results)
    for runs in tuned.values():
        jobs += [run.with_seed(seed) for run in runs for seed in scale.seeds]
    return jobs


def costs(scale: Scale, results: Results) -> Arms:
    _, tuned = tuned_runs(scale, results)
    return {title: [tuned[name][0].start, *tuned[name]] for name, title in NAMES.items()}


PAPER_GROWTH = {
    "hypercloning": ("sizes: {hidden_size: 1536}", "sizes: {hidden_size: 3072}"),
    "bert2bert_fpi": ("sizes: {hidden_size: 1536}", "sizes: {hidden_size: 3072}"),
    "stacking": ("sizes: {num_hidden_layers: 48}", "sizes: {num_hidden_layers: 96}"),
}
"""What methods that need whole factors grow to at the paper's scale, instead of 354m and 757m."""


def paper_plan() -> list[Job]:
    """The paper's 60B and 15B tokens, 114,441 and 28,610 steps."""
    from experiments.cluster import RecipeRun

    jobs: list[Job] = []
    for name in (*METHODS, "random"):
        way = "init: random" if name in INITS else f"method: {name}"
        stages = ["{steps: 114441}"]
        for to in PAPER_GROWTH.get(name, ("to: 354m", "to: 757m")):
            stages.append(f"{{steps: 28610, grow: {{{to}, {way}, optimizer_state: reset}}}}")
        overrides = (("run.steps", 114441), ("stages", f"[{', '.join(stages)}]"))
        family = "tokenformer" if name in INITS else "transformer"
        jobs.append(RecipeRun(f"openwebtext/{family}-124m", overrides, name))
    return jobs


def seeds_of(runs: list[LanguageRun], size: int, scale: Scale) -> list[LanguageRun]:
    """The runs of every seed that end with a size: the source, or a stage."""
    run = runs[0].start if size == 0 else runs[size - 1]
    assert run is not None
    return [run.with_seed(seed) for seed in scale.seeds]


def loss_table(tuned: dict[str, list[LanguageRun]], scale: Scale, results: Results) -> Table:
    millions = [f"{model.parameters / 1e6:.2f}M" for model in TOKENFORMERS]
    header = ["held-out bits per byte", *millions, "right after the first growth"]
    header += ["token-token FLOPs, 1e3 T²", "paper: perplexity at 124M, 354M, 757M"]
    rows = []
    for name, title in NAMES.items():
        runs = tuned[name]
        ends = [summarize(seeds_of(runs, n, scale), results).format() for n in range(3)]
        starts = summarize(seeds_of(runs, 1, scale), results, "start_bits_per_byte")
        flops = ", ".join(map(token_token, sizes(name)))
        paper = ", ".join(map(str, PAPER.get(name, ())))
        rows.append([title, *ends, f"{starts.mean:.3f}", flops, paper])
    return Table([header, *rows])


def token_token(model: Model) -> str:
    """The forward FLOPs of token-token interaction, in units of 1e3 T²."""
    return f"{4 * model.layers * model.width / 1e3:.1f}"


def verdict_of(final: dict[str, Summary], ours: str) -> Verdict:
    baselines = [final[name] for name in ("net2net", "hypercloning")]
    if all(baseline.above(final[ours]) for baseline in baselines):
        return "holds"
    lower = all(final[ours].mean < baseline.mean for baseline in baselines)
    return "not at this scale" if lower else "does not hold"


def source_lead(tuned: dict[str, list[LanguageRun]], scale: Scale, results: Results) -> float:
    """How much lower or higher the TokenFormers start than the Transformers."""
    sources = (seeds_of(tuned[name], 0, scale) for name in ("zero", "net2net"))
    ours, theirs = (summarize(runs, results).mean for runs in sources)
    return ours - theirs


def report(scale: Scale, results: Results) -> Findings:
    _, tuned = tuned_runs(scale, results)
    final = {name: summarize(seeds_of(runs, 2, scale), results) for name, runs in tuned.items()}
    gains = {
        name: summarize(seeds_of(runs, 0, scale), results).mean - final[name].mean
        for name, runs in tuned.items()
    }
    ours = min(INITS, key=lambda name: final[name].mean)
    other = min(METHODS, key=lambda name: final[name].mean)
    argument = (
        f"After two growth steps the best TokenFormer (`{ours}`) is at {final[ours].format()} "
        f"bits per byte, Net2Net at {final['net2net'].format()}, HyperCloning at "
        f"{final['hypercloning'].format()} and the best Transformer method, "
        f"{METHODS[other]}, at {final[other].format()}. The TokenFormer's token-token FLOPs stay "
        f"at {token_token(TOKENFORMERS[2])}e3 T² while those of the widened Transformer grow to "
        f"{token_token(TRANSFORMERS[2])}e3 T² (paper: {TOKEN_TOKEN['TokenFormer'][2]}e4 and "
        f"{TOKEN_TOKEN['Transformer'][2]}e4)."
    )
    dots = {
        NAMES[name].replace("`", ""): list(summary.values)
        for name, summary in sorted(final.items(), key=lambda item: item[1].mean)
    }
    ours_names = [title.replace("`", "") for title in INITS.values()]
    return Findings(
        verdict=verdict_of(final, ours),
        argument=argument,
        headline=f"{final[ours].mean:.3f} against {final[other].mean:.3f} of {METHODS[other]} and "
        f"{final['net2net'].mean:.3f} of Net2Net",
        tables=[loss_table(tuned, scale, results)],
        notes=[
            f"Net2Net and HyperCloning get noise of {NOISE:.0%} on their replicas, which keeps the "
            "function and breaks the symmetry; bert2BERT's FPI has none, so its replicas stay "
            f"equal. LiGO's own {LIGO_STEPS} steps count as steps of its stage, not in its cost. "
            "The claim holds if all seeds of the best TokenFormer end below all seeds of Net2Net "
            "and of HyperCloning.",
            "The sources differ: at equal parameters the small TokenFormer is "
            f"{source_lead(tuned, scale, results):+.3f} bits per byte from the small Transformer. "
            "From its source to the end the loss falls by "
            + ", ".join(f"{gains[name]:.3f} ({NAMES[name]})" for name in (ours, "net2net", other))
            + ". Stacking adds layers, each with attention of its own, for four times the "
            "token-token FLOPs of widening.",
        ],
        plots=[
            Plot(
                "incremental-scaling.png",
                "Final loss of every way to grow, one dot per seed",
                partial(draw, dots, ours_names),
            )
        ],
    )


def draw(dots: dict[str, list[float]], ours: list[str], path: Path) -> None:
    draw_dots(dots, path, "held-out bits per byte after two growth steps; a dot is a seed", ours)


EXHIBIT = Exhibit(
    title="Incremental scaling against growing Transformers",
    source="Figure 7, Table 8",
    claim="At equal parameters and tokens, growing by tokens ends lower than growing a Transformer "
    "by Net2Net or HyperCloning, and its token-token cost does not grow.",
    setting=f"Byte-level models on enwik8, two layers. Sources train for {SOURCE:,} steps of "
    f"{128 * BATCH} bytes; each of two stages grows the model and trains it for {STAGE} steps with "
    "a fresh optimizer and a cosine schedule. TokenFormers have width 64 and "
    f"{', '.join(map(str, TOKENS))} tokens; Transformers have equal parameters at widths 64, 128 "
    "and 256, and with stacking 2, 8 and 32 layers, up to 4 % fewer. Learning rates: the best of "
    "at least three for each source and, at the first growth step, for each way to grow; the "
    "second stage has the rate of the first.",
    plan=plan,
    report=report,
    arms=costs,
)
