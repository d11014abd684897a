"""The job that trains a language model: from scratch, growing in stages, or from another run.

    small = LanguageRun(Model(tokens=16), steps=(1000,))
    grown = LanguageRun(Model(tokens=16), steps=(300, 320), growth=(Growth(Model(tokens=64)),))
    later = LanguageRun(start=small, steps=(100,), growth=(Growth(Model(tokens=64), "random"),))

`grown` grows in the middle of a run and keeps the moments of the optimizer; `later` takes the model
that `small` ended with, grows it and trains it with a fresh optimizer, as the paper does.
"""

import json
import math
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from experiments.job import Job, Result
from experiments.workspace import Workspace

if TYPE_CHECKING:
    from tokenformer.train.loop import Loop

VOCABULARY = 257
"""Bytes and the end of a text."""
TIMED_STEPS = 1000
"""Of a run whose steps are timed; more than will be."""


@dataclass(frozen=True)
class Model:
    family: str = "tokenformer"
    tokens: int | None = 32
    """Tokens of each attention projection; feed-forward layers have four times as many. A
    Transformer has as many parameters as the TokenFormer with these tokens, or with None the usual
    feed-forward layer of its width."""
    width: int = 128
    layers: int = 2
    heads: int = 4
    theta: str = "l2_gelu"
    norm_parameters: str = "none"
    ffn_tokens: int | None = None
    """Tokens of each feed-forward layer, if not four times `tokens`."""
    active_groups: int | None = None
    """Groups of feed-forward tokens that a row visits; None for a dense layer."""
    group_size: int = 32
    router: str = "gated"
    theta_norm: str = "all"
    """Of routed layers: the scores in the norm of theta."""
    balance_rate: float = 0.01

    def config(self) -> Any:
        from tokenformer.models.accounting import matching_transformer
        from tokenformer.models.configuration import TokenformerConfig, TransformerConfig

        shared = {
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "variant": "paper",
            "positions": "rotary",
            "rotary_fraction": 0.5,
            "norm_parameters": self.norm_parameters,
        }
        if self.tokens is None:
            return TransformerConfig(**shared, intermediate_size=4 * self.width)
        if self.active_groups is not None:
            shared |= {
                "active_groups": {"ffn": self.active_groups},
                "group_size": self.group_size,
                "router": self.router,
                "theta_norm": self.theta_norm,
                "balance_rate": self.balance_rate,
            }
        config = TokenformerConfig(**shared, theta=self.theta, **self.token_sizes())
        if self.family == "tokenformer":
            return config
        return matching_transformer(config, match_ffn=True)

    @property
    def rate_law(self) -> str:
        """The rate law under which a model of the family has its learning rates swept."""
        return "tokens" if self.family == "tokenformer" else "none"

    @property
    def parameters(self) -> int:
        return count_model_parameters(self)

    def training_flops(self, length: int) -> int:
        """FLOPs of one sequence, forward and backward."""
        return count_training_flops(self, length)

    def growth_sizes(self) -> dict[str, int]:
        """Return the sizes to give to `grow` when another model grows to this one."""
        if self.family == "tokenformer":
            return self.token_sizes()
        config = self.config()
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return {name: getattr(config, name) for name in names}

    def token_sizes(self) -> dict[str, int]:
        assert self.tokens is not None
        own = {} if self.ffn_tokens is None else {"ffn_tokens": self.ffn_tokens}
        return token_sizes(self.tokens) | own


@cache  # a plan asks for the cost of hundreds of runs after every job
def count_training_flops(model: Model, length: int) -> int:
    from tokenformer.models.accounting import training_flops

    return sum(training_flops(model.config(), length).values())


@cache
def count_model_parameters(model: Model) -> int:
    from tokenformer.models.accounting import count_parameters

    return sum(count_parameters(model.config()).values())


def token_sizes(tokens: int) -> dict[str, int]:
    return {"qkv_tokens": tokens, "output_tokens": tokens, "ffn_tokens": 4 * tokens}


@dataclass(frozen=True)
class Growth:
    to: Model
    init: str = "zero"
    scale: str | None = None
    method: str | None = None
    """For a Transformer: net2net, hypercloning, ...; for a TokenFormer at the start of a run
    `upcycle`: copies of its feed-forward tokens, routed."""
    optimizer_state: str = "keep"
    old_rate: float | None = None
    """Factor on the learning rate of the old tokens."""
    noise: float | None = None
    """Relative noise that breaks the symmetry of replicas (net2net, hypercloning)."""
    learning_steps: int | None = None
    """Steps for which LiGO learns."""

    def options(self, seed: int) -> Any:
        from tokenformer.train.options import GrowthOptions

        return GrowthOptions(
            sizes=self.to.growth_sizes() | self.method_options,
            method=self.method,
            init=self.init,
            scale=self.scale,
            optimizer_state=self.optimizer_state,
            old_rate=self.old_rate,
            seed=seed,
        )

    @property
    def method_options(self) -> dict[str, float]:
        options = {"noise": self.noise, "steps": self.learning_steps}
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class LanguageRun(Job):
    model: Model = Model()
    steps: tuple[int, ...] = (500,)
    """Steps of every stage."""
    growth: tuple[Growth, ...] = ()
    """How the model grows at the start of the second and each later stage. A run with a `start` may
    grow at the start of the first stage too: then there is one growth per stage."""
    start: "LanguageRun | None" = None
    """The run whose final model this one starts from, instead of fresh weights."""
    corpus: str = "enwik8"
    length: int = 128
    batch: int = 16
    rate: float = 8e-3
    embedding_rate: float = 4.0
    """Factor on the learning rate of the embedding, which is also the output head."""
    rate_law: str = "tokens"
    router_rate: float = 1.0
    """Factor on the learning rate of routers."""
    ffn_rate: float = 1.0
    """Factor on the learning rate of feed-forward tokens."""
    schedule: str = "wsd"
    """Schedule of the last stage."""
    every_stage: bool = False
    """Whether all stages have that schedule; by default the learning rate is constant before the
    last one."""
    warmup: int = 50
    """Of the first stage, and with `every_stage` of all."""
    warmup_after_growth: int = 0
    decay: float = 0.3
    """Share of the last stage, after its warm-up, over which `wsd` decays."""
    floor: float = 0.05
    remember: str | None = None
    """Another corpus whose held-out loss is measured at the start and at the end."""
    validations: int = 16
    """Validations in the last stage, on 256 sequences."""
    validation_sequences: int = 256
    seed: int = 0

    @property
    def needs(self) -> tuple[Job, ...]:
        return () if self.start is None else (self.start,)

    @property
    def data(self) -> tuple[str, ...]:
        return (self.corpus,) if self.remember is None else (self.corpus, self.remember)

    @property
    def models(self) -> list[Model]:
        """The model of every stage."""
        if self.start is None:
            return [self.model, *(growth.to for growth in self.growth)]
        grown = [growth.to for growth in self.growth]
        missing = len(self.steps) - len(grown)
        return [*[self.start.models[-1]] * missing, *grown]

    def stages(self) -> "list[tuple[int, LanguageRun]]":
        """Return the steps of every stage, with a run from scratch whose steps take as long."""
        return [
            (count, LanguageRun(model, (TIMED_STEPS,), length=self.length, batch=self.batch))
            for count, model in zip(self.steps, self.models, strict=True)
        ]

    @property
    def start_growth(self) -> Growth | None:
        """How the model of `start` grows before the first step."""
        grows = self.start is not None and len(self.growth) == len(self.steps)
        return self.growth[0] if grows else None

    @property
    def flops(self) -> float:
        costs = [model.training_flops(self.length) for model in self.models]
        return sum(n * self.batch * cost for n, cost in zip(self.steps, costs, strict=True))

    def reduced(self) -> "LanguageRun":
        return replace(
            self,
            steps=tuple(2 if count < 1000 else 4 for count in self.steps),
            start=None if self.start is None else self.start.reduced(),
            batch=2,
            length=32,
            warmup=min(1, self.warmup),
            warmup_after_growth=min(1, self.warmup_after_growth),
            validations=2,
            validation_sequences=4,
        )

    def with_seed(self, seed: int) -> "LanguageRun":
        """Return the same run with another seed, from its start on."""
        start = None if self.start is None else self.start.with_seed(seed)
        return replace(self, seed=seed, start=start)

    def recipe(self, workspace: Workspace, start_from: str | None = None) -> Any:
        from tokenformer.train.options import OptimizerOptions, Recipe, StageOptions

        rates = {"*.embed_tokens.*": self.embedding_rate}
        if self.router_rate != 1:
            rates["*.router.weight"] = self.router_rate
        if self.ffn_rate != 1:
            rates["*.ffn.*_tokens"] = self.ffn_rate
        recipe = Recipe(optimizer=OptimizerOptions(self.rate, rates=rates, rate_law=self.rate_law))
        first, last = self.models[0], len(self.steps) - 1
        recipe.model.family = first.family
        recipe.model.start_from = start_from
        if start_from is None:
            recipe.model.options = model_options(first.config())
        recipe.data.corpus, recipe.data.length = str(workspace.corpus(self.corpus)), self.length
        run = recipe.run
        run.batch_size, run.seed, run.threads = self.batch, self.seed, 1
        run.validation_sequences = self.validation_sequences
        run.validate_every = max(1, self.steps[-1] // self.validations)
        run.log_to, run.on_spike = [], "skip"
        run.checkpoint_every, run.keep_last = 1000, 1  # and at the end of a stage
        inside = self.growth[1:] if self.start_growth else self.growth
        for stage, count in enumerate(self.steps):
            options = StageOptions(count, schedule=self.stage_schedule(stage, last))
            if stage:
                options.grow = inside[stage - 1].options(self.seed)
            recipe.stages.append(options)
        return recipe

    def stage_schedule(self, stage: int, last: int) -> Any:
        from tokenformer.train.options import ScheduleOptions

        warm = stage == 0 or self.every_stage
        warmup = min(self.warmup, self.steps[stage] // 4) if warm else self.warmup_after_growth
        if stage < last and not self.every_stage:
            return ScheduleOptions("constant", warmup)
        return ScheduleOptions(self.schedule, warmup, self.floor, self.decay)  # type: ignore[arg-type]

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.train.metrics import read_metrics
        from tokenformer.train.run import run_recipe

        folder = workspace.work(self)
        recipe = self.recipe(workspace, self.start_folder(workspace, folder))
        trained = folder / "run"
        first = initial_losses(self, recipe, workspace, folder)
        run_recipe(recipe, trained)
        rows = read_metrics(trained / "metrics.jsonl")
        validated = [row for row in rows if "val_bpb" in row]
        last = validated[-1]
        curve = [[0, 0, round(first["bits_per_byte"], 5)]]
        curve += [[row["step"], row["flops"], round(row["val_bpb"], 5)] for row in validated]
        ends, end = [], 0
        for count in self.steps:
            end += count
            ends.append(next((r["val_bpb"] for r in validated if r["step"] == end), None))
        result = {
            "bits_per_byte": round(last["val_bpb"], 5),
            "loss": round(last["val_loss"], 5),
            "start_bits_per_byte": round(first["bits_per_byte"], 5),
            "stage_ends": ends,
            "parameters": self.models[-1].parameters,
            "flops": last["flops"],
            "tokens": last["tokens"],
            "seconds": round(rows[-1]["seconds"], 1),
            "skipped": sum("problem" in row for row in rows),
            "curve": curve,
            **router_load(rows),
        }
        if self.remember is not None:
            after = held_out_loss(self, recipe, workspace, str(trained / "model"), self.remember)
            result["remembered"] = [round(first["remembered"], 5), round(after, 5)]
        keep_model(trained / "model", workspace.model(self))
        shutil.rmtree(folder)
        return result

    def loop(self, workspace: Workspace) -> "Loop":
        """Return the training loop of the first stage, for a run from scratch."""
        return first_loop(self.recipe(workspace))

    def start_folder(self, workspace: Workspace, folder: Path) -> str | None:
        """Return the model to start from, grown if it grows at the start."""
        if self.start is None:
            return None
        source = workspace.model(self.start)
        if self.start_growth is None:
            return str(source)
        from tokenformer.train.model_growth import grow_model_folder
        from tokenformer.train.text_workload import TextWorkload

        grown, partial = folder / "start", folder / "start-partial"
        if not grown.exists():
            shutil.rmtree(partial, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            if self.start_growth.method == "upcycle":
                upcycle_folder(source, partial, self.start_growth.to, self.seed)
            else:
                workload = TextWorkload(self.recipe(workspace, str(source)))
                options = self.start_growth.options(self.seed)
                grow_model_folder(source, partial, options, workload.token_batches())
            partial.rename(grown)  # a kill leaves no half of a model there
        return str(grown)


def upcycle_folder(source: Path, out: Path, to: Model, seed: int) -> None:
    """Write the model in folder `source`, upcycled to the routed model `to`."""
    from tokenformer.growth.model_folder import save_model_folder
    from tokenformer.growth.tokens.upcycle import upcycle
    from tokenformer.models.loading import load_tokenformer

    model = load_tokenformer(source)
    larger, report = upcycle(
        model,
        to.config().tokens("ffn", 0) // model.config.tokens("ffn", 0),
        to.group_size,
        theta_norm=to.theta_norm,
        balance_rate=to.balance_rate,
        seed=seed,
    )
    save_model_folder(larger, report, source, out)


def model_options(config: Any) -> dict[str, Any]:
    """Return what differs from the defaults, without what the run takes from its data."""
    own = ("vocab_size", "max_position_embeddings", "model_type", "transformers_version")
    options = config.to_diff_dict()
    return {n: v for n, v in options.items() if n not in own and not n.endswith("_token_id")}


def initial_losses(
    job: LanguageRun, recipe: Any, workspace: Workspace, folder: Path
) -> dict[str, float]:
    """Return the losses before the first step. They are saved, for a run that is resumed."""
    from tokenformer.files import write_atomic

    file = folder / "initial.json"
    if file.exists():
        return json.loads(file.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    start = recipe.model.start_from
    losses = {"bits_per_byte": held_out_loss(job, recipe, workspace, start, job.corpus)}
    if job.remember is not None:
        losses["remembered"] = held_out_loss(job, recipe, workspace, start, job.remember)
    write_atomic(file, json.dumps(losses))
    return losses


def held_out_loss(
    job: LanguageRun, recipe: Any, workspace: Workspace, model: str | None, corpus: str
) -> float:
    """Return the bits per byte of a model, or of fresh weights, on held-out text of a corpus."""
    data = replace(recipe.data, corpus=str(workspace.corpus(corpus)))
    loop = first_loop(replace(recipe, data=data, model=replace(recipe.model, start_from=model)))
    return loop.task.describe(loop.validate())["val_bpb"]


def first_loop(recipe: Any) -> "Loop":
    """Return the loop of the first stage of a recipe, at its first step."""
    from tokenformer.train.loop import Loop
    from tokenformer.train.stages import plan
    from tokenformer.train.workload import make_workload

    workload = make_workload(recipe)
    return Loop.from_stage(workload.task(workload.first_model()), plan(recipe)[0])


LOAD_STEPS = 100


def router_load(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the load of the routers, mean over the last steps; nothing for a dense model."""
    last = [row for row in rows if "peak_load" in row][-LOAD_STEPS:]
    if not last:
        return {}
    return {
        name: round(mean(row[name] for row in last), 3) for name in ("dead_groups", "peak_load")
    }


def keep_model(trained: Path, kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    trained.rename(kept)


def steps_for(compute: float, model: Model, *, length: int = 128, batch: int = 16) -> int:
    """Return the steps that a model can train for with so many FLOPs."""
    return max(1, round(compute / (batch * model.training_flops(length))))


def reached(curve: list[list[float]], target: float) -> float | None:
    """Return the FLOPs at which a curve of (step, FLOPs, bits per byte) reaches `target`,
    interpolated in the logarithm of the compute; None if it does not."""
    before = None
    for _, flops, bits in curve:
        if bits <= target:
            if before is None or before[0] <= 0 or before[1] == bits:
                return flops
            share = (before[1] - target) / (before[1] - bits)
            return math.exp(math.log(before[0]) * (1 - share) + math.log(flops) * share)
        before = (flops, bits)
    return None
