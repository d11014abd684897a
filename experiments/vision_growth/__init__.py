"""Growth of an image classifier: half of the tokens for half of the compute, then all of them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.exhibit import Exhibit, Findings, Plot, Scale, Table
from experiments.job import Job, Results
from experiments.plots import COLOURS, label, mean_curve, new_figure, save
from experiments.sweep import Arm
from experiments.vision import ImageModel, ImageRun, TokenGrowth, percentages, tune_images

FULL = ImageRun()
SMALL = ImageModel(tokens=24)
INITS = ("zero", "zero_value", "shrink")
SCRATCH, NEVER = "full size from scratch", "half size, never grown"


def small_steps(steps: int) -> int:
    """Return the steps of the small model for the compute of so many of the full one."""
    costs = [model.training_flops(FULL.images) for model in (FULL.model, SMALL)]
    return round(steps * costs[0] / costs[1])


def grown(init: str) -> ImageRun:
    """A run that grows at half of the compute. Its learning rate falls over as many steps of the
    full size as that of the model from scratch."""
    after = FULL.steps[0] // 2
    growth = TokenGrowth(FULL.model.tokens, init)
    decay = FULL.decay * (FULL.steps[0] - FULL.warmup) / after
    return ImageRun(SMALL, (small_steps(FULL.steps[0] - after), after), (growth,), decay=decay)


RUNS = {
    **{f"grown, `{init}`": grown(init) for init in INITS},
    SCRATCH: FULL,
    NEVER: replace(FULL, model=SMALL, steps=(small_steps(FULL.steps[0]),)),
}


def arms(scale: Scale, results: Results) -> dict[str, Arm]:
    return {name: tune_images(run, scale, results) for name, run in RUNS.items()}


def plan(scale: Scale, results: Results) -> list[Job]:
    if scale.name == "paper":
        return []
    return [job for arm in arms(scale, results).values() for job in arm.jobs]


def result_table(found: dict[str, Arm], results: Results) -> Table:
    header = ["", "parameters", "training FLOPs", "learning rate", "top-1, %", "test loss"]
    header += ["validation top-1 at growth, %", "largest change of a layer at growth"]
    rows = []
    for name, arm in found.items():
        run, rows_of_seeds = arm.runs[0], [results[run] for run in arm.runs]
        cells = [name, f"{rows_of_seeds[0]['parameters']:,}", f"{run.flops:.2e}", f"{run.rate:g}"]
        cells += [percentages(arm, results).format(2), arm.summary(results, "loss").format()]
        if run.growth:
            before = sum(row["stage_ends"][0] for row in rows_of_seeds) / len(rows_of_seeds)
            change = max(row["layer_changes"][0] for row in rows_of_seeds)
            cells += [f"{100 * before:.2f}", f"{change:.0e}"]
        rows.append([*cells, *[""] * (len(header) - len(cells))])
    return Table([header, *rows])


def report(scale: Scale, results: Results) -> Findings:
    found = arms(scale, results)
    scores = {name: percentages(arm, results) for name, arm in found.items()}
    ways = [name for name in scores if RUNS[name].growth]
    best = max(ways, key=lambda name: scores[name].mean)
    reached = ", ".join(f"{name.split(', ')[1]} {scores[name].format(2)} %" for name in ways)
    argument = (
        f"At equal compute the grown models reach {reached} top-1, the full size from scratch "
        f"{scores[SCRATCH].format(2)} % and half the size, never grown, "
        f"{scores[NEVER].format(2)} %. The best way to grow is "
        f"{scores[best].mean - scores[SCRATCH].mean:+.2f} points from the full size and "
        f"{scores[best].mean - scores[NEVER].mean:+.2f} from the half size."
    )
    return Findings(
        verdict="beyond the paper",
        argument=argument,
        headline=f"{best}: {scores[best].mean:.1f} % (from scratch {scores[SCRATCH].mean:.1f} %, "
        f"half size {scores[NEVER].mean:.1f} %)",
        tables=[result_table(found, results)],
        plots=[
            Plot(
                "vision-growth.png",
                "Validation accuracy over compute: grown, from scratch, and half size",
                partial(draw, found, results),
            )
        ],
        notes=[
            "TokenFormer against a Vision Transformer, and the ablations of theta and norms, are "
            "on the page of [the paper's tables](paper.md#image-classification)."
        ],
    )


def draw(found: dict[str, Arm], results: Results, path: Path) -> None:
    figure, (axes,) = new_figure()
    for (name, arm), colour in zip(found.items(), COLOURS, strict=False):
        curve = mean_curve([results[run]["curve"] for run in arm.runs])
        compute, accuracy = zip(*((f / 1e12, 100 * a) for _, f, a in curve), strict=True)
        style = "o-" if arm.runs[0].growth else "o--"
        text = name.replace("`", "")
        axes.plot(compute, accuracy, style, color=colour, markersize=3, label=text)
    axes.axvline(FULL.flops / 2e12, color="0.7", linewidth=0.8, label="growth")
    label(axes, "training compute, 1e12 FLOPs", "top-1 on validation images, %")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, path)


EXHIBIT = Exhibit(
    title="Growing an image classifier",
    source="not in the paper",
    claim="An image classifier can grow in the middle of its training, at the compute of a model "
    "that has the full size from the start.",
    setting="Fashion-MNIST in 7 x 7 patches, four layers of width 64. Half of the 48 attention and "
    "192 feed-forward tokens train for half of the compute at a constant learning rate, then all "
    "of them for the other half while the rate falls; the baselines have the same compute and "
    "decay. Every row has a sweep of three learning rates under the rate law, extended if the "
    "lowest or highest is best; they are chosen on a twentieth of the training images.",
    plan=plan,
    report=report,
    page="vision.md",
)
