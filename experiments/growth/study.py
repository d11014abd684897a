"""Learning rates for any number of tokens, and ways to grow: byte-level models on enwik8.

    python experiments/growth/study.py data/enwik8 --out runs/growth-study
    python experiments/growth/study.py data/enwik8 --out runs/growth-study --only rates

Every run is a `tokenformer train`. Compared runs have the same compute, whatever their models; most
take one to two minutes on one core. A finished run is a row of OUT/results.jsonl:
interrupt the study and start it again to resume. `figures.py` makes the tables and plots of
docs/results/growth.md from the rows; those of the published runs are in results.jsonl beside this
file.
"""

import argparse
import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

VOCAB = 257
WARMUP = 50
LENGTH, BATCH = 128, 16
RATE = 8e-3
"""The best learning rate under the rate law, of those in `RATES`."""
TRANSFORMER_RATE = 4e-3
"""The best one of a Transformer."""
RATES = {"none": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), "tokens": (2e-3, 4e-3, 8e-3, 1.6e-2)}
VALIDATIONS = 16
"""Validations in the last stage of a run, on 256 sequences."""


@dataclass(frozen=True)
class Training:
    """One run: a model from scratch, or one that grows from stage to stage."""

    tokens: tuple[int, ...] = (32,)
    """Tokens of each attention projection in every stage; feed-forward layers have four times as
    many."""
    shares: tuple[float, ...] = (1.0,)
    """Shares of the compute that the stages get."""
    rate: float = RATE
    embedding_rate: float = 4.0
    """Factor on the learning rate of the embedding, which is also the output head."""
    rate_law: str = "tokens"
    init: str = "random"
    scale: str | None = None
    optimizer_state: str = "keep"
    warmup_after_growth: int = 0
    decay: float = 0.3
    """Share of the compute over which the learning rate decays, at the end."""
    family: str = "tokenformer"
    """A `transformer` has as many parameters as the TokenFormer of these tokens."""
    width: int = 128
    layers: int = 2
    compute: float = 1.5e12
    """Training FLOPs."""
    seed: int = 0

    @property
    def key(self) -> str:
        """What differs from the default, as JSON."""
        default = asdict(Training())
        return json.dumps({k: v for k, v in asdict(self).items() if v != default[k]})

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Training":
        options = json.loads(row["key"])
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})

    def config(self, tokens: int) -> Any:
        from tokenformer.models.accounting import matching_transformer
        from tokenformer.models.configuration import TokenformerConfig

        config = TokenformerConfig(
            vocab_size=VOCAB,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            variant="paper",
            positions="rotary",
            rotary_fraction=0.5,
            **sizes(tokens),
        )
        return (
            config if self.family == "tokenformer" else matching_transformer(config, match_ffn=True)
        )

    def steps(self) -> list[int]:
        """Return the steps of every stage."""
        from tokenformer.models.accounting import training_flops

        costs = [sum(training_flops(self.config(n), LENGTH).values()) for n in self.tokens]
        return [
            max(1, round(self.compute * share / (BATCH * cost)))
            for share, cost in zip(self.shares, costs, strict=True)
        ]

    def recipe(self, corpus: Path) -> Any:
        from tokenformer.train.options import (
            GrowthOptions,
            OptimizerOptions,
            Recipe,
            ScheduleOptions,
            StageOptions,
        )

        rates = {"*.embed_tokens.*": self.embedding_rate}
        recipe = Recipe(optimizer=OptimizerOptions(self.rate, rates=rates, rate_law=self.rate_law))
        recipe.model.family = self.family
        recipe.model.options = model_options(self.config(self.tokens[0]))
        recipe.data.corpus, recipe.data.length = str(corpus), LENGTH
        *_, last = steps = self.steps()
        run = recipe.run
        run.batch_size, run.seed, run.validation_sequences = BATCH, self.seed, 256
        run.validate_every, run.log_to, run.on_spike = max(1, last // VALIDATIONS), [], "skip"
        run.checkpoint_every, run.keep_last = 10**6, 1  # at the end of a stage, where it grows
        warmup = min(WARMUP, steps[0] // 4)
        decay = min(1.0, self.decay / self.shares[-1])
        for stage, (count, tokens) in enumerate(zip(steps, self.tokens, strict=True)):
            schedule = ScheduleOptions("constant", warmup if stage == 0 else 0)
            if stage == len(steps) - 1:
                schedule = replace(schedule, kind="wsd", decay=decay, floor=0.05)
            options = StageOptions(count, schedule=schedule)
            if stage:
                schedule.warmup_steps = self.warmup_after_growth
                options.grow = GrowthOptions(
                    sizes=sizes(tokens),
                    init=self.init,
                    scale=self.scale,
                    optimizer_state=self.optimizer_state,
                    seed=self.seed,
                )
            recipe.stages.append(options)
        return recipe


def sizes(tokens: int) -> dict[str, int]:
    return {"qkv_tokens": tokens, "output_tokens": tokens, "ffn_tokens": 4 * tokens}


def model_options(config: Any) -> dict[str, Any]:
    """Return what differs from the defaults; the data sets the vocabulary."""
    options = config.to_diff_dict()
    unknown = ("vocab_size", "model_type", "transformers_version")
    return {name: value for name, value in options.items() if name not in unknown}


def restart_tokens(before: Any, size: int, new: Any) -> Any:
    """A control: an init that forgets the old tokens, so that only the embedding has been trained
    before growth."""
    import torch

    from tokenformer.growth.parameter_mapping import NEW
    from tokenformer.growth.tokens.token_set import Replacement, TokenSet

    keys, values = new.extend(before.keys, size), new.extend(before.values, size)
    new.fill_normal(keys, new.key_std)
    new.fill_normal(values, new.value_std)
    return Replacement(TokenSet(keys, values, float(size)), torch.full((size,), NEW))


def train(corpus: Path, out: Path, training: Training) -> dict[str, Any]:
    """Train or resume a run on one core; return its row of the results. Runs in a worker."""
    import torch

    from tokenformer.growth.tokens.token_growth import INITIALIZERS

    torch.set_num_threads(1)
    INITIALIZERS["restart"] = restart_tokens
    from tokenformer.train.metrics import read_metrics
    from tokenformer.train.run import run_recipe

    folder = out / sha256(training.key.encode()).hexdigest()[:12]
    run_recipe(training.recipe(corpus), folder)
    rows = read_metrics(folder / "metrics.jsonl")
    curve = [
        [row["step"], row["flops"], round(row["val_bpb"], 5)] for row in rows if "val_bpb" in row
    ]
    shutil.rmtree(folder)
    return {
        "key": training.key,
        "steps": training.steps(),
        "bits_per_byte": curve[-1][-1],
        "seconds": round(rows[-1]["seconds"], 1),
        "skipped": sum("problem" in row for row in rows),
        "curve": curve,
    }


def rates_plan(width: int, layers: int, counts: tuple[int, ...], *laws: str) -> list[Training]:
    """Learning rates for several numbers of tokens."""
    return [
        Training((n,), rate=rate, rate_law=law, width=width, layers=layers)
        for n in counts
        for law in laws
        for rate in RATES[law]
    ]


def embedding_plan() -> list[Training]:
    return [
        Training((n,), embedding_rate=factor) for n in (8, 32) for factor in (1.0, 2.0, 4.0, 8.0)
    ]


def transformer_plan() -> list[Training]:
    base = Training(family="transformer", rate_law="none")
    return [
        replace(base, tokens=(n,), compute=compute, rate=rate, embedding_rate=factor)
        for n, compute, factors in ((32, 1.5e12, (1.0, 4.0)), (64, 2e12, (4.0,)))
        for factor in factors
        for rate in (2e-3, 4e-3, 8e-3)
    ]


INITS = ("shrink", "random", "zero", "zero_value", "clone")


def arms(small: int, large: int, compute: float, share: float) -> dict[str, Training]:
    """Return the compared runs: models that grow after `share` of the compute, and baselines."""
    base = Training(compute=compute)
    transformer = replace(base, family="transformer", rate_law="none", rate=TRANSFORMER_RATE)
    grown = replace(base, tokens=(small, large), shares=(share, round(1 - share, 2)))
    return {
        "from scratch": replace(base, tokens=(large,)),
        "Transformer": replace(transformer, tokens=(large,)),
        "small, never grown": replace(base, tokens=(small,)),
        **{f"grown, {init}": replace(grown, init=init) for init in INITS},
    }


def decay_like_grown(training: Training) -> Training:
    """Make the rate of a baseline fall over the same share of all steps as in a run that grows. A
    schedule counts its share without the warm-up, which the last stage of such a run does not have.
    It changes the loss by 0.002 at most."""
    if len(training.tokens) > 1:
        return training
    (steps,) = training.steps()
    return replace(training, decay=round(training.decay * steps / (steps - WARMUP), 3))


COMPARISONS = {
    "16 to 64 tokens, 2e12 FLOPs": {
        **{name: decay_like_grown(arm) for name, arm in arms(16, 64, 2e12, 0.3).items()},
        "32 tokens, from scratch": decay_like_grown(Training((32,), compute=2e12)),
    },
    "16 to 32 tokens, 1.5e12 FLOPs": arms(16, 32, 1.5e12, 0.2),
}
ARMS = [arm for comparison in COMPARISONS.values() for arm in comparison.values()]
GROWN = COMPARISONS["16 to 64 tokens, 2e12 FLOPs"]["grown, shrink"]
FACTORS = {
    "grown at 15 % of the compute": replace(GROWN, shares=(0.15, 0.85)),
    "grown at 45 %": replace(GROWN, shares=(0.45, 0.55)),
    "all tokens start again, only the embedding is kept": replace(
        GROWN, init="restart", scale="current"
    ),
    "new rows with the mean second moment": replace(GROWN, optimizer_state="mean"),
    "moments reset": replace(GROWN, optimizer_state="reset"),
    "warm-up of 50 steps after growth": replace(GROWN, warmup_after_growth=50),
    "16 to 32 to 64 at 10 and 25 %": replace(GROWN, tokens=(16, 32, 64), shares=(0.1, 0.15, 0.75)),
    "16 to 32 to 64 at 15 and 40 %": replace(GROWN, tokens=(16, 32, 64), shares=(0.15, 0.25, 0.6)),
    "16 to 32 to 64 at 10 and 25 %, random": replace(
        GROWN, tokens=(16, 32, 64), shares=(0.1, 0.15, 0.75), init="random"
    ),
    "16 to 32 to 64 at 15 and 40 %, random": replace(
        GROWN, tokens=(16, 32, 64), shares=(0.15, 0.25, 0.6), init="random"
    ),
    "32 to 64, random": replace(GROWN, tokens=(32, 64), init="random"),
}
"""One change at a time to the growth from 16 to 64 tokens."""
PLANS = {
    "rates": rates_plan(128, 2, (8, 32, 64, 128), "tokens", "none"),
    "shapes": [
        *rates_plan(64, 2, (32, 128), "tokens"),
        Training((128,), rate=3.2e-2, width=64),
        *rates_plan(128, 4, (32, 128), "tokens"),
    ],
    "embedding": embedding_plan(),
    "transformer": transformer_plan(),
    "growth": [*ARMS, *FACTORS.values()],
    "seeds": [replace(arm, seed=seed) for seed in (0, 1, 2) for arm in ARMS],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder written by `tokenformer prepare`")
    parser.add_argument("--out", type=Path, default=Path("runs/growth-study"))
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    finished = (
        {row["key"] for row in map(json.loads, results.read_text().splitlines())}
        if results.exists()
        else set()
    )
    trainings = dict.fromkeys(t for name in options.only for t in PLANS[name])
    missing = [training for training in trainings if training.key not in finished]
    print(f"{len(trainings)} runs, {len(missing)} of them to do", flush=True)
    with ProcessPoolExecutor(options.workers) as pool:
        for row in pool.map(partial(train, options.corpus, options.out), missing):
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['bits_per_byte']:.4f}  {row['key']}", flush=True)


if __name__ == "__main__":
    main()
