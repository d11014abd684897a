"""TokenFormer on Fashion-MNIST: against a ViT of equal size, the paper's ablations, and growth.

    python experiments/vision/study.py data/fashion-mnist --out runs/vision
    python experiments/vision/study.py data/fashion-mnist --out runs/vision --parts theta --seeds 0

7 x 7 patches, 0.2M parameters, the same recipe for every run:

    baselines  TokenFormer, a Vision Transformer of equal size, and a linear classifier
    theta      exp + L1 (softmax), GELU + L1, GELU + L2 (the base run), an ablation of the paper
    norms      norms with weight and bias, with bias, with neither (the base run), another ablation
    growth     half the tokens for half of the base run's compute, then grown to all tokens

Every run is an ordinary `tokenformer train` and resumes after an interruption; runs that several
parts share are trained once. Output: a table of means over the seeds, a row of JSON per run
(results.jsonl) and two plots. Accuracy is that of the last step on the test images. Results:
docs/results/vision.md.
"""

import argparse
import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any

WIDTH, LAYERS, HEADS, PATCH = 64, 4, 4, 7
STEPS, BATCH, WARMUP = 3_752, 64, 200
RATE, DECAY = 2e-3, 0.05
HELD_OUT = 10_000
SMALL = {"qkv_tokens": 24, "output_tokens": 24, "ffn_tokens": 96}
BASE = {"qkv_tokens": 48, "output_tokens": 48, "ffn_tokens": 192}

# Changes to the base run: a TokenFormer with GELU + L2 and norms without parameters.
RUNS: dict[str, dict[str, Any]] = {
    "linear": {"family": "linear"},
    "ViT": {"family": "transformer"},
    "TokenFormer": {},
    "exp + L1": {"options": {"theta": "softmax"}},
    "GELU + L1": {"options": {"theta": "l1_gelu"}},
    "norm weight and bias": {"options": {"norm_parameters": "weight_bias"}},
    "norm bias": {"options": {"norm_parameters": "bias"}},
    "grown, zero": {"grow": {"init": "zero"}},
    "grown, zero_value": {"grow": {"init": "zero_value"}},
    "small": {"small": True},
}
PARTS = {
    "baselines": ("linear", "ViT", "TokenFormer"),
    "theta": ("exp + L1", "GELU + L1", "TokenFormer"),
    "norms": ("norm weight and bias", "norm bias", "TokenFormer"),
    "growth": ("TokenFormer", "grown, zero", "grown, zero_value", "small"),
}
PAPER = {
    "theta": {"exp + L1": 79.6, "GELU + L1": 81.7, "TokenFormer": 82.5},
    "norms": {"norm weight and bias": 82.6, "norm bias": 82.5, "TokenFormer": 82.5},
}
"""Top-1 of the base model on ImageNet-1K, from the paper's two ablations."""

LABELS = {"TokenFormer": "full size from scratch", "small": "small, not grown"}
"""Labels in the growth plot."""

Job = tuple[str, Path, str, int, int]
Result = dict[str, Any]


def recipe_of(images: str, name: str, seed: int, steps: int) -> Any:
    from tokenformer.train.options import (
        GrowthOptions,
        OptimizerOptions,
        Recipe,
        ScheduleOptions,
        StageOptions,
    )

    changes = RUNS[name]
    recipe = Recipe(optimizer=OptimizerOptions(learning_rate=RATE, weight_decay=DECAY))
    recipe.model.family = changes.get("family", "tokenformer")
    first = SMALL if "grow" in changes or "small" in changes else BASE
    recipe.model.options = model_options(recipe.model.family, first, changes.get("options", {}))
    recipe.data.images = images
    recipe.augmentation.flip = True
    run = recipe.run
    run.batch_size, run.seed, run.log_to = BATCH, seed, []
    run.checkpoint_every, run.keep_last, run.validation_sequences = 1000, 1, HELD_OUT
    before, after = grown_steps(steps)
    run.steps = steps
    if "small" in changes:
        run.steps = round(steps * cost(BASE) / cost(SMALL))
    run.validate_every = -(-run.steps // 12)
    warmup = min(WARMUP, run.steps // 10)
    recipe.schedule = ScheduleOptions(kind="cosine", warmup_steps=warmup, floor=0.01)
    if "grow" in changes:
        run.validate_every = -(-before // 8)
        stable = ScheduleOptions(kind="constant", warmup_steps=warmup)
        falling = ScheduleOptions(kind="cosine", warmup_steps=0, floor=0.01)
        grow = GrowthOptions(sizes=BASE, seed=seed, **changes["grow"])
        recipe.stages = [
            StageOptions(steps=before, schedule=stable),
            StageOptions(steps=after, schedule=falling, grow=grow),
        ]
    return recipe


def model_options(family: str, tokens: dict[str, int], others: dict[str, Any]) -> dict[str, Any]:
    shape = {
        "patch_size": PATCH,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "variant": "paper",
    }
    own = {"intermediate_size": 4 * WIDTH} if family == "transformer" else tokens
    return {**shape, **own, **others}


def cost(tokens: dict[str, int]) -> int:
    """Return the training FLOPs of one image."""
    from tokenformer import TokenformerVisionConfig
    from tokenformer.models.accounting import image_training_flops

    options = model_options("tokenformer", tokens, {})
    config = TokenformerVisionConfig(image_size=28, num_channels=1, num_labels=10, **options)
    return sum(image_training_flops(config).values())


def grown_steps(steps: int) -> tuple[int, int]:
    """Return the steps before and after growth; each part costs half of the base run."""
    return round(steps / 2 * cost(BASE) / cost(SMALL)), round(steps / 2)


def run_one(job: Job) -> Result:
    """Train or resume a run on one core and return its result. Runs in a worker process."""
    images, out, name, seed, steps = job
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    folder = out / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{seed}"
    if name == "linear":
        return linear(images, folder, seed, steps)
    from tokenformer.train.run import run_recipe

    recipe = recipe_of(images, name, seed, steps)
    if not (folder / "loss.png").exists():
        run_recipe(recipe, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validated = [row for row in rows if "val_accuracy" in row]
    report = folder / "growth-2.json"
    return {
        "name": name,
        "seed": seed,
        "accuracy": validated[-1]["val_accuracy"],
        "loss": validated[-1]["val_loss"],
        "parameters": parameters(folder / "model" / "model.safetensors"),
        "flops": rows[-1]["flops"],
        "grown_at": next((row["flops"] for row in reversed(rows) if row.get("stage") == 1), None),
        "seconds": rows[-1]["seconds"],
        "layer_change": json.loads(report.read_text())["max_layer_change"]
        if report.exists()
        else None,
        "curve": [(row["flops"], row["val_accuracy"], row["val_loss"]) for row in validated],
    }


def parameters(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def linear(images: str, folder: Path, seed: int, steps: int) -> Result:
    """Train a linear classifier on pixels with the same batches and optimizer."""
    import torch
    import torch.nn.functional as F
    from torch.optim.lr_scheduler import OneCycleLR

    from tokenformer.train.workload import make_workload

    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    workload = make_workload(recipe_of(images, "TokenFormer", seed, steps))
    task = workload.task(workload.first_model())
    torch.manual_seed(seed)
    model = torch.nn.Linear(28 * 28, len(workload.classes))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=DECAY)
    schedule = OneCycleLR(optimizer, RATE, steps, pct_start=0.05, cycle_momentum=False)
    for step in range(steps):
        batch = task.batch(step * BATCH, BATCH)
        F.cross_entropy(model(batch.pixels.flatten(1)), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    correct, loss, count = 0, 0.0, min(HELD_OUT, len(task.held_out.pictures))
    with torch.no_grad():
        for pending in task.validation(1000, count):
            batch = pending.to("cpu")
            logits, labels = model(batch.pixels.flatten(1)), batch.targets.argmax(1)
            correct += int((logits.argmax(1) == labels).sum())
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
    result = {"name": "linear", "seed": seed, "accuracy": correct / count, "loss": loss / count}
    folder.mkdir(parents=True, exist_ok=True)
    saved.write_text(json.dumps(result))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", help="folder with the four files of Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=Path("runs/vision"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help="of the base run")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for part in options.parts for name in PARTS[part]))
    jobs: list[Job] = [
        (options.images, options.out, name, seed, options.steps)
        for seed in options.seeds
        for name in names
    ]
    results: list[Result] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for result in pool.map(run_one, jobs):
            results.append(result)
            run = f"{result['name']}, seed {result['seed']}"
            print(f"{run:<32} {result['accuracy']:.2%}", flush=True)
    text = "".join(json.dumps(result) + "\n" for result in results)
    (options.out / "results.jsonl").write_text(text)
    print(f"\nTop-1 in percent, mean of {len(options.seeds)} seeds ± the largest deviation")
    for part in options.parts:
        print("\n".join(table(part, results)))
    draw_accuracies(results, options.parts, options.out / "accuracies.png")
    if "growth" in options.parts:
        draw_growth(results, options.out / "growth.png")


def table(part: str, results: list[Result]) -> list[str]:
    lines = ["", f"| {part} | top-1 | paper, ImageNet-1K |", "|---|---|---|"]
    for name in PARTS[part]:
        values = accuracies(name, results)
        spread = max(abs(value - mean(values)) for value in values)
        lines.append(f"| {name} | {mean(values):.2f} ± {spread:.2f} | {paper(part, name)} |")
    return lines


def accuracies(name: str, results: list[Result]) -> list[float]:
    return [100 * result["accuracy"] for result in results if result["name"] == name]


def paper(part: str, name: str) -> float | str:
    return PAPER.get(part, {}).get(name, "")


def draw_accuracies(results: list[Result], parts: list[str], path: Path) -> None:
    """Plot a dot per run and a line per mean, without the linear classifier, which is far below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.8 * len(parts), 3.6), layout="constrained")
    for index, part in enumerate(parts):
        axes = figure.add_subplot(1, len(parts), index + 1)
        names = [name for name in PARTS[part] if name != "linear"]
        for column, name in enumerate(names):
            values = accuracies(name, results)
            axes.plot([column] * len(values), values, "o", color="#0072b2", alpha=0.7)
            axes.hlines(mean(values), column - 0.3, column + 0.3, color="#d55e00")
        axes.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=8)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_title(part, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("top-1, percent")
    figure.savefig(path, dpi=150)


def draw_growth(results: list[Result], path: Path) -> None:
    """Plot mean accuracy over compute."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name in PARTS["growth"]:
        curves = [result["curve"] for result in results if result["name"] == name]
        points = list(zip(*curves, strict=True))
        flops = [point[0][0] / 1e12 for point in points]
        accuracy = [100 * mean(seed[1] for seed in point) for point in points]
        axes.plot(flops, accuracy, "o-", markersize=3, label=LABELS.get(name, name))
    grown_at = next(
        result["grown_at"] for result in results if result.get("layer_change") is not None
    )
    axes.axvline(grown_at / 1e12, color="0.7", linewidth=0.8)
    axes.set(xlabel="training compute, 1e12 FLOPs", ylabel="top-1 on test images, percent")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
