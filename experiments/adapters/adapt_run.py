"""The job that adapts a trained model to another corpus, with one of the methods of `adapt`.

    run = AdaptRun(Method("tokens", tokens=20), corpus="python", rate=4e-3)
    later = AdaptRun(run.method, corpus="captions", rate=4e-3, after=run)     # train it further

Each run is an ordinary `tokenformer adapt`. It watches the held-out loss of the new corpus and of
the one that the base was trained on.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.job import Job, Result
from experiments.language import LanguageRun, Model, keep_model
from experiments.workspace import Workspace

BASE = LanguageRun(
    Model(tokens=128, width=128, layers=4),
    (5600,),
    length=256,
    batch=8,
    rate=2e-3,
    embedding_rate=1.0,
    rate_law="none",
    schedule="cosine",
    warmup=100,
    validations=7,
    validation_sequences=200,
)
"""recipes/laptop/enwik8.yaml."""


@dataclass(frozen=True)
class Method:
    name: str
    """tokens, lora, full or sparse."""
    size: int = 0
    """Tokens per layer, or the rank of LoRA."""
    layers: tuple[str, ...] = ("ffn",)
    norm: str = "shared"

    def options(self, keep: Path | None = None) -> Any:
        """Return the section `adapter` of a recipe; `keep` is the corpus of the base."""
        from tokenformer.train.options import AdapterOptions

        options: dict[str, Any] = {"method": self.name, "keep": None if keep is None else str(keep)}
        if self.name != "full":
            options["layers"] = list(self.layers)
            options["rank" if self.name == "lora" else "tokens"] = self.size
        return AdapterOptions(**options, norm=self.norm)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AdaptRun(Job):
    method: Method = Method("tokens", 20)
    corpus: str = "python"
    rate: float = 1e-3
    start: LanguageRun = BASE
    after: "AdaptRun | None" = None
    """The run whose adapter this one trains further, instead of a new one."""
    steps: int = 120
    batch: int = 8
    warmup: int = 12
    validations: int = 8
    validation_sequences: int = 64
    seed: int = 0

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.start,) if self.after is None else (self.start, self.after)

    @property
    def data(self) -> tuple[str, ...]:
        return (self.corpus, self.start.corpus)

    @property
    def flops(self) -> float:
        """Those of training every parameter; frozen ones save less than a third of them."""
        return self.steps * self.batch * self.start.model.training_flops(self.start.length)

    def reduced(self) -> "AdaptRun":
        after = None if self.after is None else self.after.reduced()
        return replace(
            self,
            start=self.start.reduced(),
            after=after,
            steps=4,
            batch=2,
            warmup=1,
            validations=2,
            validation_sequences=4,
        )

    def with_seed(self, seed: int) -> "AdaptRun":
        """Return the run of another seed, on the same base."""
        after = None if self.after is None else self.after.with_seed(seed)
        return replace(self, seed=seed, after=after)

    def recipe(self, workspace: Workspace) -> Any:
        from tokenformer.train.options import OptimizerOptions, Recipe, ScheduleOptions

        recipe = Recipe(
            optimizer=OptimizerOptions(self.rate, weight_decay=0.0),
            schedule=ScheduleOptions("cosine", self.warmup, floor=0.1),
            adapter=self.method.options(workspace.corpus(self.start.corpus)),
        )
        recipe.model.start_from = str(workspace.model(self.start))
        recipe.data.corpus = str(workspace.corpus(self.corpus))
        recipe.data.length = self.start.length
        run = recipe.run
        run.steps, run.batch_size, run.seed, run.threads = self.steps, self.batch, self.seed, 1
        run.validate_every = max(1, self.steps // self.validations)
        run.validation_sequences = self.validation_sequences
        run.log_to, run.on_spike = [], "skip"
        run.checkpoint_every, run.keep_last = self.steps, 1
        return recipe

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.train.metrics import read_metrics
        from tokenformer.train.run import Run
        from tokenformer.train.workload import make_workload

        folder = workspace.work(self)
        recipe = self.recipe(workspace)
        workload = make_workload(recipe)
        run = Run(folder, recipe, workload, lambda line: None)
        model = run.loop.task.model
        if self.after is not None and run.loop.progress.step == 0:
            load_adapter(model, workspace.model(self.after))
        run.train(lambda row: None)
        rows = read_metrics(folder / "metrics.jsonl")
        curve = [[r["step"], r["val_bpb"], r["keep_bpb"]] for r in rows if "val_bpb" in r]
        first, last = curve[0], curve[-1]
        result = {
            "bits_per_byte": round(last[1], 5),
            "loss": round(last[1], 5),
            "kept_bits_per_byte": round(last[2], 5),
            "start_bits_per_byte": round(first[1], 5),
            "kept_at_start": round(first[2], 5),
            "trained_parameters": workload.trained_parameters(model),  # type: ignore[attr-defined]
            "bytes": sum(file.stat().st_size for file in run.exported.glob("*.safetensors")),
            "seconds": round(rows[-1]["seconds"], 1),
            "skipped": sum("problem" in row for row in rows),
            "curve": [[step, round(new, 5), round(kept, 5)] for step, new, kept in curve],
        }
        keep_model(run.exported, workspace.model(self))
        shutil.rmtree(folder)
        return result


def load_adapter(model: Any, folder: Path) -> None:
    """Continue with the weights of a saved adapter."""
    from safetensors.torch import load_file

    saved = load_file(folder / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # peft leaves the adapter's name out
            parameter.data.copy_(saved.pop(f"base_model.model.{name.replace('.default', '')}"))
    if saved:
        raise ValueError(f"{folder} has {', '.join(saved)}, which the model lacks")
