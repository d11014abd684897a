"""Compare ways to grow a TokenFormer, all at one learning rate that was not tuned.

    python experiments/growth/one_rate.py data/enwik8 --out runs/growth-study --workers 2
    python experiments/growth/one_rate.py data/enwik8 --seeds 0 1 2 --only zero random

A small byte-level model trains for a while and grows to four times its tokens; each variant changes
one factor of the growth. The baselines are the small and the large model trained with the compute
of a grown run. Every run is an ordinary `tokenformer train` and resumes after an interruption; the
variants of a seed share the trained small model. Output: a table of all runs, a table of means over
the seeds, a row of JSON per run (results-REGIME.jsonl) and a plot (curves-REGIME.png). Results:
docs/results/growth.md.

`study.py` tunes the learning rates; this is the study before it.
"""

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any


@dataclass(frozen=True)
class Regime:
    """Sizes before and after growth, and the steps of the two stages."""

    small: dict[str, int]
    large: dict[str, int]
    first: int
    second: int
    validate_every: int


def tokens(attention: int, ffn: int) -> dict[str, int]:
    return {"qkv_tokens": attention, "output_tokens": attention, "ffn_tokens": ffn}


# 0.16M to 0.56M parameters; 2.5e12 FLOPs before growth, and 3.4e12 or 7.5e12 after it.
REGIMES = {
    "short": Regime(tokens(32, 128), tokens(128, 512), 900, 450, 30),
    "long": Regime(tokens(32, 128), tokens(128, 512), 900, 980, 70),
}
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 2, 4, 128, 16
STABLE = {"kind": "constant", "warmup_steps": 50}
DECAYED = {"kind": "cosine", "warmup_steps": 50, "floor": 0.05}
DECAY = {"kind": "wsd", "decay": 1.0, "warmup_steps": 0, "floor": 0.05}
REWARMED = {"kind": "cosine", "warmup_steps": 30, "floor": 0.05}
RATES_BY_TOKENS = {"*.key_tokens": 0.5, "*.value_tokens": 0.25}
"""Learning rates at 4x the tokens n: keys scaled by 1/sqrt(n), values by 1/n."""

# Changes to the base run: zero keys, moments kept, growth before the decay.
VARIANTS: dict[str, dict[str, Any]] = {
    "zero": {},
    "zero, mean": {"optimizer_state": "mean"},
    "zero, reset": {"optimizer_state": "reset"},
    "zero, annealed scale": {"scale": "anneal", "anneal_steps": 100},
    "zero, mean, annealed scale": {
        "optimizer_state": "mean",
        "scale": "anneal",
        "anneal_steps": 100,
    },
    "zero, current scale": {"scale": "current"},
    "zero, learned scale": {"scale": "learned"},
    "zero_value": {"init": "zero_value"},
    "zero_value, mean": {"init": "zero_value", "optimizer_state": "mean"},
    "zero_value, reset": {"init": "zero_value", "optimizer_state": "reset"},
    "random": {"init": "random"},
    "random, mean": {"init": "random", "optimizer_state": "mean"},
    "random, reset": {"init": "random", "optimizer_state": "reset"},
    "clone": {"init": "clone"},
    "zero_value, mean, rate / 2": {"init": "zero_value", "optimizer_state": "mean", "rate": 0.5},
    "zero_value, mean, rate x 2": {"init": "zero_value", "optimizer_state": "mean", "rate": 2.0},
    "zero_value, mean, rates by tokens": {
        "init": "zero_value",
        "optimizer_state": "mean",
        "rates": RATES_BY_TOKENS,
    },
    "zero_value, mean, warm-up 50": {
        "init": "zero_value",
        "optimizer_state": "mean",
        "warmup_steps": 50,
    },
    "zero_value, old at 1/4": {"init": "zero_value", "old_rate": 0.25},
    "zero_value, old frozen": {"init": "zero_value", "old_rate": 0.0},
    "zero, after the decay": {"after_decay": True},
    "zero_value, after the decay": {"after_decay": True, "init": "zero_value"},
    "random, after the decay": {"after_decay": True, "init": "random"},
    "small alone": {"alone": "small"},
    "large from scratch": {"alone": "large"},
}


def recipe_of(regime: Regime, corpus: Path, variant: dict[str, Any], seed: int, rate: float) -> Any:
    from tokenformer.train.options import (
        GrowthOptions,
        OptimizerOptions,
        Recipe,
        ScheduleOptions,
        StageOptions,
    )

    variant = dict(variant)
    recipe = Recipe(optimizer=OptimizerOptions(learning_rate=rate))
    alone = variant.pop("alone", None)
    recipe.model.options = model_options(regime.large if alone == "large" else regime.small)
    recipe.data.corpus, recipe.data.length = str(corpus), LENGTH
    run = recipe.run
    run.batch_size, run.seed, run.checkpoint_every, run.keep_last = BATCH, seed, 10_000, 1
    run.validate_every, run.validation_sequences = regime.validate_every, 256
    run.log_to = []
    if alone is not None:
        run.steps, share = baseline_steps(regime, alone, corpus)
        run.validate_every = max(1, run.steps // 30)
        recipe.schedule = ScheduleOptions(kind="wsd", decay=share, warmup_steps=50, floor=0.05)
        return recipe
    after_decay = variant.pop("after_decay", False)
    second = ScheduleOptions(**(REWARMED if after_decay else DECAY))
    second.warmup_steps = variant.pop("warmup_steps", second.warmup_steps)
    stage = StageOptions(steps=regime.second, schedule=second)
    stage.learning_rate = rate * variant.pop("rate", 1.0)
    stage.rates = variant.pop("rates", None)
    stage.grow = GrowthOptions(sizes=regime.large, seed=seed, **variant)
    first = ScheduleOptions(**(DECAYED if after_decay else STABLE))
    recipe.stages = [StageOptions(steps=regime.first, schedule=first), stage]
    return recipe


def model_options(sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "variant": "paper",
        "positions": "rotary",
        "rotary_fraction": 0.5,
        **sizes,
    }


def baseline_steps(regime: Regime, which: str, corpus: Path) -> tuple[int, float]:
    """Return the steps that cost as much as a grown run, and the share of them in the decay."""
    from tokenformer.data.corpus import Corpus
    from tokenformer.models.accounting import training_flops
    from tokenformer.models.configuration import TokenformerConfig

    cost = {}
    for name, sizes in (("small", regime.small), ("large", regime.large)):
        config = TokenformerConfig(vocab_size=Corpus(corpus).vocab_size, **model_options(sizes))
        cost[name] = sum(training_flops(config, LENGTH).values())
    before, after = regime.first * cost["small"], regime.second * cost["large"]
    return round((before + after) / cost[which]), after / (before + after)


def train(recipe: Any, folder: Path) -> None:
    """Train or resume a run on one core. Runs in a worker process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from tokenformer.train.run import run_recipe

    if not (folder / "loss.png").exists():
        run_recipe(recipe, folder)


Job = tuple[Regime, Path, Path, str, int, float]


def small_folder(out: Path, variant: dict[str, Any], seed: int) -> Path:
    return out / f"small-{'decayed' if variant.get('after_decay') else 'stable'}-{seed}"


def train_small(job: Job) -> None:
    """Train the small model that the variants of a seed share."""
    regime, corpus, out, name, seed, rate = job
    recipe = recipe_of(regime, corpus, VARIANTS[name], seed, rate)
    recipe.stages = recipe.stages[:1]
    train(recipe, small_folder(out, VARIANTS[name], seed))


def run_variant(job: Job) -> dict[str, Any]:
    regime, corpus, out, name, seed, rate = job
    variant = VARIANTS[name]
    folder = out / f"{re.sub('[^a-z0-9]+', '-', name)}-{regime.second}-{seed}"
    recipe = recipe_of(regime, corpus, variant, seed, rate)
    if recipe.stages and not folder.exists():
        unfinished = folder.with_name(f".{folder.name}")
        shutil.copytree(small_folder(out, variant, seed), unfinished, dirs_exist_ok=True)
        shutil.rmtree(unfinished / "model")
        (unfinished / "loss.png").unlink()
        (unfinished / "config.yaml").unlink()
        unfinished.rename(folder)
    train(recipe, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["flops"], row["val_bpb"]) for row in rows if "val_bpb" in row]
    after = [bits for step, _, bits in curve if not recipe.stages or step > regime.first]
    at_growth = [bits for step, _, bits in curve if step == regime.first]
    return {
        "name": name,
        "seed": seed,
        "at_growth": at_growth[0] if recipe.stages else None,
        "worst": max(after) if recipe.stages else None,
        "end": after[-1],
        "flops": rows[-1]["flops"],
        "tokens": rows[-1]["tokens"],
        "seconds": rows[-1]["seconds"],
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder written by `tokenformer prepare`")
    parser.add_argument("--out", type=Path, default=Path("runs/growth-study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--regime", choices=REGIMES, default="short")
    options = parser.parse_args()
    regime = REGIMES[options.regime]
    options.out.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = [
        (regime, options.corpus, options.out, name, seed, options.rate)
        for seed in options.seeds
        for name in options.only
    ]
    smalls = {
        small_folder(options.out, VARIANTS[job[3]], job[4]): job
        for job in jobs
        if "alone" not in VARIANTS[job[3]]
    }
    results = []
    with ProcessPoolExecutor(options.workers) as pool:
        list(pool.map(train_small, smalls.values()))
        for result in pool.map(run_variant, jobs):
            results.append(result)
            print(line(f"{result['name']}, seed {result['seed']}", [result]), flush=True)
    text = "".join(json.dumps(result) + "\n" for result in results)
    (options.out / f"results-{options.regime}.jsonl").write_text(text)
    if len(options.seeds) > 1:
        print(f"\nMean of {len(options.seeds)} seeds ± the largest deviation from it")
        for name in options.only:
            print(line(name, [result for result in results if result["name"] == name]))
    draw(results, options.out / f"curves-{options.regime}.png")


def line(name: str, results: list[dict[str, Any]]) -> str:
    """Format a table row: means over the runs, and the largest deviation of the final loss."""
    cells = [
        "" if results[0][key] is None else f"{mean(result[key] for result in results):.3f}"
        for key in ("at_growth", "worst")
    ]
    ends = [result["end"] for result in results]
    spread = max(abs(end - mean(ends)) for end in ends)
    cells.append(f"{mean(ends):.3f}" + (f" ± {spread:.3f}" if len(ends) > 1 else ""))
    return f"| {name} | {' | '.join(cells)} | {results[0]['flops']:.2e} |"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Plot the mean curve of every variant over compute, from shortly before growth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(result["name"] for result in results))
    for name in names:
        curves = [result["curve"] for result in results if result["name"] == name]
        flops = [point[1] / 1e12 for point in curves[0]]
        bits = [mean(curve[index][2] for curve in curves) for index in range(len(flops))]
        baseline = "alone" in VARIANTS[name]
        axes.plot(flops, bits, label=name, color="0.4" if baseline else None,
                  linestyle="--" if name == "large from scratch" else "-")  # fmt: skip
    ends = [result["end"] for result in results]
    at_growth = [r["at_growth"] for r in results if r["at_growth"] is not None]
    axes.set(xlabel="training compute, 1e12 FLOPs", ylabel="held-out bits per byte")
    axes.set_ylim(min(ends) - 0.03, max(at_growth, default=max(ends)) + 0.35)
    axes.set_xlim(left=compute_at_growth(results) * 0.7)
    axes.axvline(compute_at_growth(results), color="0.7", linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def compute_at_growth(results: Iterable[dict[str, Any]]) -> float:
    """Return the compute at which the runs grow, in 1e12 FLOPs."""
    for result in results:
        for _, flops, bits in result["curve"]:
            if bits == result["at_growth"]:
                return float(flops) / 1e12
    return 0.0


if __name__ == "__main__":
    main()
