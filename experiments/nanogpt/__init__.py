"""nanoGPT: a TokenFormer against nanoGPT's own configuration for CPUs, at equal tokens and time.

nanoGPT's README trains a character-level model with 4 layers, 4 heads and width 128 on sequences of
64 in batches of 12 for 2,000 iterations. Here it reads enwik8 by bytes. A TokenFormer of the same
width and depth with 96 tokens per attention projection has exactly as many weights in its layers.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from experiments.exhibit import Exhibit, Findings, Plot, Scale, Table
from experiments.job import Job, Results, summarize
from experiments.language import LanguageRun, Model
from experiments.nanogpt.loop_run import LoopRun
from experiments.plots import BASELINE, GREEN, ORANGE, OURS, label, mean_curve, new_figure, save
from experiments.step_times import StepTimes
from experiments.sweep import Arm, tune

ITERATIONS, SWEEP_ITERATIONS = 2000, 500
LENGTH, BATCH = 64, 12
CONFIGURED_RATE = 1e-3
TRANSFORMER = Model("transformer", None, layers=4)
TOKENFORMER = Model(tokens=96, layers=4)
RATES = (1e-3, 2e-3, 4e-3)
CONFIGURED, TUNED, OUR_TRANSFORMER, WHOLE = ARMS = (
    "nanoGPT as configured",
    "nanoGPT at its best rate",
    "our Transformer",
    "TokenFormer",
)
COLOURS = dict(zip(ARMS, (BASELINE, GREEN, ORANGE, OURS), strict=True))
README = "https://github.com/karpathy/nanoGPT#quick-start"


def run_at(name: str, rate: float, steps: int, scale: Scale) -> LoopRun:
    model = TOKENFORMER if name == WHOLE else TRANSFORMER
    base = LanguageRun(
        model,
        (steps,),
        length=LENGTH,
        batch=BATCH,
        rate=rate,
        rate_law=model.rate_law,
        schedule="cosine",
        floor=0.1,
        warmup=100,
        validations=20,
        validation_sequences=512,
    )
    run: LoopRun = scale.fit(LoopRun(base, nanogpt=name in (CONFIGURED, TUNED)))
    return run


def full_length(best: LoopRun, scale: Scale) -> LoopRun:
    """Return a run of the sweep with all iterations."""
    steps = 4 if scale.name == "smoke" else ITERATIONS
    return replace(best, base=replace(best.base, steps=(steps,)))


def arms(scale: Scale, results: Results) -> dict[str, Arm]:
    """The sweeps, of a quarter of the iterations, and the runs at the best rates, of all."""
    configured = run_at(CONFIGURED, CONFIGURED_RATE, ITERATIONS, scale)
    found = {CONFIGURED: Arm([], [configured.with_seed(seed) for seed in scale.seeds])}
    for name in ARMS[1:]:
        rates = RATES if name != WHOLE else tuple(2 * rate for rate in RATES)
        short = partial(run_at, name, steps=SWEEP_ITERATIONS, scale=scale)
        arm = tune(short, rates, scale, results)
        found[name] = Arm(arm.sweep, [full_length(run, scale) for run in arm.runs])
    return found


def step_times(scale: Scale) -> StepTimes:
    """Steps of nanoGPT's model, our Transformer and the TokenFormer in turns."""
    names = (CONFIGURED, OUR_TRANSFORMER, WHOLE)
    runs = tuple(run_at(name, CONFIGURED_RATE, ITERATIONS, scale) for name in names)
    job: StepTimes = scale.fit(StepTimes(runs))
    return job


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    jobs = [job for arm in arms(scale, results).values() for job in arm.jobs]
    return [step_times(scale), *jobs]


@dataclass(frozen=True)
class Found:
    """The results of all arms."""

    arms: dict[str, Arm]
    results: Results
    times: dict[str, float]
    """Time of a step over that of nanoGPT's model, by arm."""
    spreads: dict[str, float]
    step_seconds: float
    """Of nanoGPT's model."""

    @classmethod
    def load(cls, scale: Scale, results: Results) -> "Found":
        measured = results[step_times(scale)]
        nano, transformer, whole = measured["times_first"]
        ratios = dict(zip(ARMS, (nano, nano, transformer, whole), strict=True))
        return cls(
            arms(scale, results),
            results,
            {name: ratio for name, (ratio, _) in ratios.items()},
            {name: spread for name, (_, spread) in ratios.items()},
            measured["step_seconds"][0],
        )

    def loss(self, name: str) -> float:
        return summarize(self.arms[name].runs, self.results, "loss").mean

    def curve(self, name: str) -> list[list[float]]:
        """Mean nats per character by step."""
        return mean_curve([self.results[run]["nats"] for run in self.arms[name].runs])

    def loss_in_time(self, name: str) -> float:
        """The loss when nanoGPT has finished its iterations. A slower model has then not finished
        its schedule; a faster one gets no more steps."""
        curve = self.curve(name)
        return interpolate(curve, min(curve[-1][0], curve[-1][0] / self.times[name]))

    def time_to_nanogpt(self, name: str) -> float | None:
        """The time to reach the loss of nanoGPT as configured, over the time of nanoGPT's run; None
        if it does not."""
        curve = self.curve(name)
        step = step_at(curve, self.curve(CONFIGURED)[-1][-1])
        return None if step is None else step / curve[-1][0] * self.times[name]


def interpolate(curve: list[list[float]], step: float) -> float:
    """Return the loss at a step between the points of a curve."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= step <= x1:
            return y0 + (y1 - y0) * (step - x0) / (x1 - x0)
    raise ValueError(f"step {step} is outside of the curve, {curve[0][0]} to {curve[-1][0]}")


def step_at(curve: list[list[float]], target: float) -> float | None:
    """Return the first step at which a curve is at or below `target`."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= target:
            return x0 + (x1 - x0) * max(0.0, y0 - target) / (y0 - y1) if y0 > y1 else x1
    return None


def table(found: Found) -> Table:
    header = ["model", "parameters", "learning rate", "nats per character", "FLOPs"]
    header += ["time of a step, x nanoGPT", "nats in nanoGPT's time"]
    header += ["time to the loss of nanoGPT as configured"]
    rows = []
    for name, arm in found.arms.items():
        run, result = arm.runs[0], found.results[arm.runs[0]]
        time = found.time_to_nanogpt(name)
        cells = [name, f"{result['parameters']:,}", f"{run.rate:g}"]
        cells += [arm.summary(found.results, "loss").format(), f"{run.flops:.2e}"]
        cells += [f"{found.times[name]:.2f} ± {found.spreads[name]:.2f}"]
        cells += [f"{found.loss_in_time(name):.3f}"]
        rows.append([*cells, "not reached" if time is None else f"{time:.0%}"])
    return Table([header, *rows])


def report(scale: Scale, results: Results) -> Findings:
    found = Found.load(scale, results)
    loss = {name: found.loss(name) for name in ARMS}
    time = found.time_to_nanogpt(WHOLE)
    needed = "more than its own run" if time is None else f"{time:.0%} of that time"
    argument = (
        f"After the same {ITERATIONS:,} batches the TokenFormer is at {loss[WHOLE]:.3f} nats per "
        f"character, nanoGPT as configured at {loss[CONFIGURED]:.3f} and at its best learning rate "
        f"at {loss[TUNED]:.3f}, our Transformer at {loss[OUR_TRANSFORMER]:.3f}. A step of the "
        f"TokenFormer takes {found.times[WHOLE]:.2f} times as long as nanoGPT's: in the time of "
        f"nanoGPT's run it gets to {found.loss_in_time(WHOLE):.3f}, and it needs {needed} for the "
        "loss of nanoGPT as configured."
    )
    return Findings(
        verdict="beyond the paper",
        argument=argument,
        headline=f"{loss[WHOLE]:.3f} nats per character; nanoGPT {loss[CONFIGURED]:.3f}, tuned "
        f"{loss[TUNED]:.3f}; our Transformer {loss[OUR_TRANSFORMER]:.3f}",
        tables=[table(found)],
        plots=[
            Plot(
                "nanogpt.png",
                "Held-out nats per character over iterations and over seconds",
                partial(draw, found),
            )
        ],
        notes=notes(loss),
    )


def notes(loss: dict[str, float]) -> list[str]:
    """Where the difference comes from, and how times are measured."""
    return [
        "From nanoGPT as configured to the TokenFormer in three steps, in nats per character:",
        "- **Learning rate**, nanoGPT's model at its best one: "
        f"{loss[TUNED] - loss[CONFIGURED]:+.3f}.\n"
        "- **The rest of our recipe**, our Transformer: rotary positions, norms without "
        "parameters, a larger initialization, four times the learning rate for the embedding: "
        f"{loss[OUR_TRANSFORMER] - loss[TUNED]:+.3f}.\n"
        "- **Tokens instead of matrices**, with the rate law: "
        f"{loss[WHOLE] - loss[OUR_TRANSFORMER]:+.3f}.",
        "Steps of the three models are timed in turns on one thread, as the ratio to nanoGPT's "
        "step of the same round: median ± interquartile range. Seconds in the plot are steps times "
        "these ratios times nanoGPT's median, without validation. In nanoGPT's time a slower model "
        "has not finished its schedule, which counts against it.",
    ]


def draw(found: Found, path: Path) -> None:
    figure, panels = new_figure(10, 4.2, columns=2)
    for name in ARMS:
        curve = found.curve(name)[1:]
        steps, losses = zip(*curve, strict=True)
        seconds = [step * found.times[name] * found.step_seconds for step in steps]
        for axes, x in zip(panels, (steps, seconds), strict=True):
            axes.plot(x, losses, "o-", color=COLOURS[name], label=name, markersize=3)
    early = found.curve(CONFIGURED)[-1][0] / 10  # most of the fall is before it
    top = max(interpolate(found.curve(name), early) for name in ARMS)
    for axes in panels:
        axes.axhline(found.loss(CONFIGURED), color=BASELINE, linestyle=":", linewidth=1)
        axes.set_ylim(top=top)
    label(panels[0], f"iterations of {BATCH * LENGTH} characters", "held-out nats per character")
    label(panels[1], "seconds of training, one core", "")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


EXHIBIT = Exhibit(
    title="Against nanoGPT on a CPU",
    source="asked by users",
    claim="nanoGPT is what many people would train instead. Its README has a "
    f"[configuration for CPUs]({README}) that takes about three minutes; the paper has no "
    "model of this size.",
    setting=f"nanoGPT's model (in plain torch) and options: 4 layers, 4 heads, width 128, "
    f"{BATCH} sequences of {LENGTH} per iteration, {ITERATIONS:,} iterations, AdamW with betas 0.9 "
    f"and 0.99, weight decay 0.1, learning rate {CONFIGURED_RATE:g} with 100 iterations of warm-up "
    "and a cosine to a tenth. The text is enwik8 by bytes, not Shakespeare, so its README's 1.88 "
    "does not compare. Our Transformer and a TokenFormer with 96 and 384 tokens have the same "
    "weights per layer. All train on the same batches in one loop. Learning rates: the best of "
    f"three after {SWEEP_ITERATIONS} iterations, the TokenFormer's under the rate law; a sweep "
    "whose best is at its end goes on. Held-out loss on 512 sequences.",
    plan=plan,
    report=report,
)
