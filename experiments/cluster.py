"""The scale `paper`: published sizes and budgets, from the recipes, by torchrun on one machine.

    job = RecipeRun("openwebtext/transformer-354m", (("run.steps", 57220),), "tenth")
    shlex.join(job.command(workspace, processes=8))
    larger = GrowthRun(job, (("to", "757m"), ("method", "net2net")))
    RecipeRun("openwebtext/enwik8", start=larger)               # trains what `larger` ended with
    launch(exhibits, scale, results, folder, dry_run=True)      # check all recipes, run nothing

A run is `tokenformer train` in a folder of its own, so it resumes by itself. For several machines
take the commands of the dry run to `recipes/cluster/slurm.sh`.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.exhibit import Exhibit, Scale
from experiments.job import Job, Result, Results, with_needs
from experiments.workspace import ROOT, Workspace


@dataclass(frozen=True)
class RecipeRun(Job):
    """A recipe, with options that differ from it."""

    recipe: str
    """Its name under recipes/, without .yaml."""
    overrides: tuple[tuple[str, Any], ...] = ()
    """Dotted names of options and their values."""
    label: str = ""
    """What the overrides are for."""
    start: Job | None = None
    """The job whose model this run starts from, instead of fresh weights."""

    @property
    def needs(self) -> tuple[Job, ...]:
        return () if self.start is None else (self.start,)

    @property
    def file(self) -> Path:
        return Path("recipes") / f"{self.recipe}.yaml"

    @property
    def flops(self) -> float:
        from tokenformer.train.run_estimate import estimate_stages, first_config

        recipe = self.options()
        return float(sum(s.flops for s in estimate_stages(recipe, first_config(recipe))))

    def options(self) -> Any:
        """Return the recipe with the overrides applied."""
        from dataclasses import fields

        from tokenformer.cli.parser import parse
        from tokenformer.cli.train import train
        from tokenformer.train.options import Recipe

        found = parse("train", train, [str(ROOT / self.file), *self.override_words], "")
        return Recipe(**{field.name: found[field.name] for field in fields(Recipe)})

    @property
    def override_words(self) -> list[str]:
        words = []
        for name, value in self.overrides:
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
        return words

    def arguments(self, workspace: Workspace) -> list[str]:
        """Return the arguments of the command `tokenformer`."""
        words = ["train", str(self.file), "--out", str(self.folder(workspace))]
        if self.start is not None:
            words += ["--model.start_from", str(workspace.model(self.start))]
        return [*words, *self.override_words]

    def command(self, workspace: Workspace, processes: int) -> list[str]:
        """Return the command that trains, to be run at the root of this repository."""
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(processes)]
        return [*launcher, "-m", "tokenformer", *self.arguments(workspace)]

    def folder(self, workspace: Workspace) -> Path:
        """Return the run folder."""
        words = [*self.recipe.split("/"), self.label, self.digest]
        return workspace.folder / "runs" / "-".join(word for word in words if word)

    def check(self, workspace: Workspace) -> None:
        """Do a dry run; exits if the recipe is not valid. The model of `start` may not exist yet:
        that of the recipe has its sizes."""
        from tokenformer.cli import main

        fresh = replace(self, start=None)
        main([*fresh.arguments(absolute(workspace)), "--dry_run"])

    def run(self, workspace: Workspace, processes: int | None = None) -> Result:
        workspace = absolute(workspace)
        folder, model = self.folder(workspace), workspace.model(self)
        _, *arguments = self.command(workspace, processes or default_processes())
        # The module, because torchrun is on the PATH only in an activated environment.
        execute([sys.executable, "-m", "torch.distributed.run", *arguments])
        model.parent.mkdir(parents=True, exist_ok=True)
        if not model.exists():
            model.symlink_to(folder / "model")
        return read_result(folder)


@dataclass(frozen=True)
class GrowthRun(Job):
    """`tokenformer grow` on the model of a run."""

    start: RecipeRun
    growth: tuple[tuple[str, str], ...]
    """Options of the command."""

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.start,)

    def command(self, workspace: Workspace, processes: int = 1) -> list[str]:
        words = ["tokenformer", "grow", str(workspace.model(self.start))]
        words += ["--out", str(workspace.model(self))]
        return words + [word for name, value in self.growth for word in (f"--{name}", value)]

    def check(self, workspace: Workspace) -> None:
        from tokenformer.cli.grow import check_family, grow_model, growth_options
        from tokenformer.cli.parser import parse
        from tokenformer.errors import TokenformerError
        from tokenformer.train.model_growth import grown_config, stage_configs
        from tokenformer.train.run_estimate import first_config
        from tokenformer.train.stages import plan

        _, command, *words = self.command(workspace)
        try:
            found = parse(command, grow_model, words, "")
            given = {name: value for name, value in found.items() if value is not None}
            recipe = self.start.options()
            config = stage_configs(first_config(recipe), plan(recipe))[-1]
            check_family(given, config.to_dict())
            grown_config(config, growth_options(given))
        except (ValueError, TokenformerError) as error:
            sys.exit(f"error: {error}")

    def run(self, workspace: Workspace, processes: int | None = None) -> Result:
        workspace = absolute(workspace)
        if not workspace.model(self).exists():
            execute([sys.executable, "-m", *self.command(workspace)])
        return {}


def absolute(workspace: Workspace) -> Workspace:
    """Commands run at the root of the repository, wherever this one was started."""
    return replace(workspace, folder=workspace.folder.resolve())


def execute(command: list[str]) -> None:
    """Run a command at the root, its output on ours. An interrupt reaches it too: wait for it to
    save a checkpoint."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
    if code:
        raise RuntimeError(f"exit code {code}: {shlex.join(command)}")


def default_processes() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def read_result(folder: Path) -> Result:
    """Return what a `LanguageRun` or an `ImageRun` records, from the metrics of a run."""
    from tokenformer.models.accounting import count_parameters
    from tokenformer.models.loading import load_config
    from tokenformer.train.metrics import read_metrics

    rows = read_metrics(folder / "metrics.jsonl")
    validated = [row for row in rows if "val_loss" in row]
    if not validated:
        raise ValueError(f"{folder} was not validated; give run.validate_every")
    last = validated[-1]
    metric = "val_bpb" if "val_bpb" in last else "val_accuracy"
    ends = {row.get("stage", 1): row for row in validated}
    result: Result = {
        "loss": round(last["val_loss"], 5),
        "stage_ends": [round(row[metric], 5) for row in ends.values()],
        "parameters": sum(count_parameters(load_config(str(folder / "model"))).values()),
        "flops": last["flops"],
        "tokens": last["tokens"],
        "seconds": round(rows[-1]["seconds"], 1),
        "skipped": sum("problem" in row for row in rows),
        "curve": [[row["step"], row["flops"], round(row[metric], 5)] for row in validated],
    }
    if metric == "val_accuracy":
        return {"accuracy": last[metric], **result}
    result["stage_perplexities"] = [round(math.exp(row["val_loss"]), 3) for row in ends.values()]
    perplexity = result["stage_perplexities"][-1]
    return {"bits_per_byte": round(last[metric], 5), "perplexity": perplexity, **result}


def launch(
    exhibits: dict[str, Exhibit],
    scale: Scale,
    results: Results,
    folder: Path,
    dry_run: bool,
    processes: int | None = None,
) -> int | str:
    """Run the missing jobs one after the other, each on all `processes`, by default one per GPU.
    Return an exit code, or a message that means 1. A dry run prints the commands and checks the
    recipes."""
    workspace, count = Workspace(folder), processes or default_processes()

    def missing() -> Iterator[Job]:
        jobs = with_needs(job for e in exhibits.values() for job in e.plan(scale, results))
        return (job for job in jobs if job not in results)

    if dry_run:
        jobs = list(missing())
        if not jobs:
            print("nothing is left to run at this scale")
        refused = [job for job in jobs if not check(job, workspace, count)]
        return f"{len(refused)} of {len(jobs)} recipes are not valid" if refused else 0
    failed: set[str] = set()
    while job := next((j for j in missing() if can_start(j, failed, results)), None):
        print(f"running {job.key}", flush=True)
        try:
            results.add(job, compute(job, workspace, count))
        except KeyboardInterrupt:
            return "interrupted; start the same command again to resume"
        except Exception:
            traceback.print_exc()
            failed.add(job.key)
    for exhibit in exhibits.values():
        for job in exhibit.plan(scale, results):
            if job in results:
                print(summary_line(job, results[job]))
    return f"{len(failed)} jobs failed" if failed else 0


def can_start(job: Job, failed: set[str], results: Results) -> bool:
    return job.key not in failed and results.has_all(job.needs)


def compute(job: Job, workspace: Workspace, processes: int) -> Result:
    if isinstance(job, RecipeRun | GrowthRun):
        return job.run(workspace, processes)
    workspace.prepare_data(set(job.data))
    return job.run(workspace)


def check(job: Job, workspace: Workspace, processes: int) -> bool:
    """Print what a job would run; return whether its options are valid."""
    if not isinstance(job, RecipeRun | GrowthRun):
        print(f"computed here: {job.key}\n")
        return True
    print(f"$ {shlex.join(job.command(workspace, processes))}", flush=True)
    try:
        workspace = absolute(workspace)
        with at_root(), world_size(processes):
            job.check(workspace)
    except SystemExit as end:  # the reason is on stderr
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return not end.code
    finally:
        print(flush=True)
    return True


@contextmanager
def at_root() -> Iterator[None]:
    """Work at the root of the repository, where the command finds recipes/ and data/."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def world_size(processes: int) -> Iterator[None]:
    """Tell a dry run in this process the number of processes, as torchrun would."""
    told = {"WORLD_SIZE": str(processes), "RANK": "0"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def summary_line(job: Job, result: Result) -> str:
    names = ("perplexity", "stage_perplexities", "accuracy", "flops", "seconds")
    figures = "  ".join(f"{name} {result[name]}" for name in names if name in result)
    return f"{job.key}  {figures}"
