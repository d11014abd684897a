"""What happens to the loss when a TokenFormer grows, and which way of growing it ends lowest.

    python experiments/seam/study.py data/enwik8 --out runs/seam --workers 2

A small byte-level model is trained for a while and grows to four or eight times its tokens
(`--regime`); one factor of the growth is changed at a time. Every run is an ordinary `tokenformer
train` in stages and goes on after an interruption; the trained small model is shared. The result is
a table, a row of JSON per run (results.jsonl) and curves.png. `--seeds 0 1 2 --only ...` repeats
the runs that matter.
"""

import argparse
import json
import os
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
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


REGIMES = {
    "short": Regime(tokens(64, 256), tokens(256, 1024), 600, 300, 20),  # 0.56M to 2.13M parameters
    "long": Regime(tokens(16, 64), tokens(128, 512), 1500, 500, 25),  # 0.16M to 1.08M parameters
}
STABLE = {"kind": "constant", "warmup_steps": 50}
DECAYED = {"kind": "cosine", "warmup_steps": 50, "floor": 0.05}
DECAY = {"kind": "wsd", "decay": 1.0, "warmup_steps": 0, "floor": 0.05}
REWARMED = {"kind": "cosine", "warmup_steps": 30, "floor": 0.05}

# What each run changes of the base: zero keys, moments kept, grown before the decay.
VARIANTS: dict[str, dict[str, Any]] = {
    "zero": {},
    "clone": {"init": "clone"},
    "zero_value": {"init": "zero_value"},
    "random": {"init": "random"},
    "zero, mean": {"optimizer_state": "mean"},
    "zero, reset": {"optimizer_state": "reset"},
    "zero, current scale": {"scale": "current"},
    "zero, annealed scale": {"scale": "anneal", "anneal_steps": 150},
    "zero, learned scale": {"scale": "learned"},
    "zero, rate / 2": {"rate": 0.5},
    "zero, rate / 4": {"rate": 0.25},
    "zero, old frozen": {"old_rate": 0.0},
    "zero, old at 1/4": {"old_rate": 0.25},
    "zero, warm-up 50": {"warmup_steps": 50},
    "zero, mean, rate / 2": {"optimizer_state": "mean", "rate": 0.5},
    "clone, mean": {"init": "clone", "optimizer_state": "mean"},
    "zero_value, mean": {"init": "zero_value", "optimizer_state": "mean"},
    "zero_value, reset": {"init": "zero_value", "optimizer_state": "reset"},
    "random, mean": {"init": "random", "optimizer_state": "mean"},
    "zero, after the decay": {"after_decay": True},
    "zero, reset, after the decay": {"after_decay": True, "optimizer_state": "reset"},
    "random, after the decay": {"after_decay": True, "init": "random"},
    "not grown": {"not_grown": True},
    "from scratch": {"from_scratch": True},
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
    options = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "variant": "paper",
        "positions": "rotary",
        "rotary_fraction": 0.5,
    }
    from_scratch = variant.pop("from_scratch", False)
    recipe.model.options = {**options, **(regime.large if from_scratch else regime.small)}
    recipe.data.corpus, recipe.data.length = str(corpus), 128
    run = recipe.run
    run.batch_size, run.seed, run.checkpoint_every, run.keep_last = 8, seed, 10_000, 1
    run.validate_every, run.validation_sequences = regime.validate_every, 256
    run.log_to = []
    if from_scratch or variant.pop("not_grown", False):
        run.steps = regime.first + regime.second
        recipe.schedule = ScheduleOptions(
            kind="wsd", decay=regime.second / run.steps, warmup_steps=50, floor=0.05
        )
        return recipe
    after_decay = variant.pop("after_decay", False)
    second = ScheduleOptions(**(REWARMED if after_decay else DECAY))
    second.warmup_steps = variant.pop("warmup_steps", second.warmup_steps)
    stage = StageOptions(steps=regime.second, schedule=second)
    stage.learning_rate = rate * variant.pop("rate", 1.0)
    stage.grow = GrowthOptions(sizes=regime.large, seed=seed, **variant)
    first = ScheduleOptions(**(DECAYED if after_decay else STABLE))
    recipe.stages = [StageOptions(steps=regime.first, schedule=first), stage]
    return recipe


def train(recipe: Any, folder: Path) -> None:
    """Train in a process of its own, on one core; goes on where it was."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from tokenformer.train.recipe import Materials, record
    from tokenformer.train.run import Run

    if not (folder / "loss.png").exists():
        record(recipe, folder)
        Run(folder, recipe, Materials(recipe), lambda line: None).go(lambda row: None)


def prepare_small(job: tuple[Regime, Path, Path, bool, int, float]) -> None:
    """The small model that the runs of a seed share, up to the end of its stage."""
    regime, corpus, folder, after_decay, seed, rate = job
    recipe = recipe_of(regime, corpus, {"after_decay": after_decay}, seed, rate)
    recipe.stages = recipe.stages[:1]
    train(recipe, folder)


def run_variant(job: tuple[Regime, Path, Path, str, int, float]) -> dict[str, Any]:
    regime, corpus, out, name, seed, rate = job
    variant = VARIANTS[name]
    folder = out / f"{re.sub('[^a-z0-9]+', '-', name)}-{seed}"
    recipe = recipe_of(regime, corpus, variant, seed, rate)
    if recipe.stages and not folder.exists():
        kind = "decayed" if variant.get("after_decay") else "stable"
        unfinished = folder.with_name(f".{folder.name}")
        shutil.copytree(out / f"small-{kind}-{seed}", unfinished, dirs_exist_ok=True)
        shutil.rmtree(unfinished / "model")
        (unfinished / "loss.png").unlink()
        (unfinished / "config.yaml").unlink()
        unfinished.rename(folder)
    train(recipe, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["val_bpb"]) for row in rows if "val_bpb" in row]
    after = [bits for step, bits in curve if step > regime.first]
    seam = dict(curve)[regime.first]
    return {
        "name": name,
        "seed": seed,
        "seam": seam,
        "worst": max(after),
        "end": after[-1],
        "flops": rows[-1]["flops"],
        "tokens": rows[-1]["tokens"],
        "seconds": rows[-1]["seconds"],
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="a folder made by `tokenformer prepare`")
    parser.add_argument("--out", type=Path, default=Path("runs/seam"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--regime", choices=REGIMES, default="short")
    options = parser.parse_args()
    regime = REGIMES[options.regime]
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    with ProcessPoolExecutor(options.workers) as pool:
        smalls = [
            (
                regime,
                options.corpus,
                options.out / f"small-{kind}-{seed}",
                kind == "decayed",
                seed,
                options.rate,
            )
            for seed in options.seeds
            for kind in ("stable", "decayed")
            if any(
                VARIANTS[n].get("after_decay", False) == (kind == "decayed") for n in options.only
            )
        ]
        list(pool.map(prepare_small, smalls))
        jobs = [
            (regime, options.corpus, options.out, name, seed, options.rate)
            for name in options.only
            for seed in options.seeds
        ]
        for result in pool.map(run_variant, jobs):
            results.append(result)
            print(
                f"{result['name']:32} seed {result['seed']}  seam {result['seam']:.3f}  "
                f"worst {result['worst']:.3f}  end {result['end']:.3f}  "
                f"{result['flops']:.2e} FLOPs",
                flush=True,
            )
    text = "".join(json.dumps(result) + "\n" for result in results)
    (options.out / "results.jsonl").write_text(text)
    draw(results, regime.first, options.out / "curves.png")


def draw(results: list[dict[str, Any]], seam: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        steps, bits = zip(*result["curve"], strict=True)
        axes.plot(steps, bits, label=f"{result['name']}, seed {result['seed']}")
    ends = [result["end"] for result in results]
    axes.set(xlabel="step", ylabel="held-out bits per byte", xlim=(0.8 * seam, None))
    axes.set_ylim(min(ends) - 0.05, max(result["seam"] for result in results) + 0.35)
    axes.axvline(seam, color="grey", linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
