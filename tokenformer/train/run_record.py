"""The recorded options of a run, and the history of their changes.

    runs/NAME/config.yaml            the current recipe of the run
    runs/NAME/config-history.yaml    if options were changed: from which step, old and new values

Options that affect the result cannot change once a run has begun, unless the user overrides them;
then the step of the change is recorded. The record of a finished run is never rewritten. Does not
import torch.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tokenformer.files import write_atomic
from tokenformer.train.options import GrowthOptions, Recipe, ScheduleOptions, StageOptions
from tokenformer.train.recipe import CONFIG, RecipeError, read_mapping
from tokenformer.train.stages import plan

HISTORY = "config-history.yaml"
SECTIONS = ("model", "data", "optimizer", "schedule", "run")
"""Sections of every record, including those of older versions."""
FREE = {
    "run.log_to",
    "run.checkpoint_every",
    "run.keep_last",
    "run.validate_every",
    "run.micro_batch_size",
    "run.compile",
    "run.threads",
    "run.activation_checkpointing",
    "run.parallel",
    "run.tensor_parallel",
    "run.on_spike",
    "run.spike_factor",
    "data.workers",
    "stages[].micro_batch_size",
}
"""Options that can change at any time: they do not affect the result."""
FIXED = re.compile(r"model\..*|adapter\..*|data\.(length|held_out_share|tokenizer)")
"""Options that cannot change once a run has begun, even with --override."""
LENGTH = re.compile(
    r"run\.steps|schedule\.warmup_steps|stages|stages\[\]\.(schedule\.warmup_)?steps"
)
"""Options that only set the length of a run; `max_steps` changes them together."""
DATA_PATHS = ("data.corpus", "data.images", "data.image_text", "adapter.keep")
START = "model.start_from"
ADAPTER = "adapter"
MODEL, CHECKPOINTS, LOSS_PLOT, METRICS = "model", "checkpoints", "loss.png", "metrics.jsonl"


@dataclass(frozen=True)
class Change:
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if isinstance(self.before, dict) and isinstance(self.after, dict):
            return ", ".join(
                str(Change(f"{self.name}.{key}", self.before.get(key), self.after.get(key)))
                for key in dict.fromkeys([*self.before, *self.after])
                if self.before.get(key) != self.after.get(key)
            )
        return f"{self.name} {format_value(self.before)} -> {format_value(self.after)}"

    @property
    def kind(self) -> str:
        """The option's name without the stage number."""
        return re.sub(r"\[\d+\]", "[]", self.name)

    @property
    def stage(self) -> int | None:
        found = re.search(r"\[(\d+)\]", self.name)
        return int(found[1]) if found else None

    @property
    def is_none(self) -> bool:
        """Whether both values mean the same."""
        if self.name == START:
            return same_path(source(self.before), source(self.after))
        same = self.before == self.after
        return same or (self.name in DATA_PATHS and same_path(self.before, self.after))

    @property
    def is_free(self) -> bool:
        moved = self.name in DATA_PATHS and is_moved(self.before, self.after)
        return moved or self.kind in FREE


class Record:
    """The record in a run folder; `values` is None if there is none yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, Any] | None = None
        if (folder / CONFIG).exists():
            self.values = read_record(folder / CONFIG)

    @property
    def steps(self) -> int | None:
        """Steps of the whole run."""
        if self.values is None:
            return None
        parts = self.values.get("stages") or [self.values["run"]]
        return sum(int(part["steps"]) for part in parts)

    def changes(self, recipe: Recipe) -> list[Change]:
        """Return the options that differ from the record; stages that only one has are ignored."""
        if self.values is None:
            return []
        before, after = flat(self.values), flat(plain(asdict(recipe)))
        both = [Change(name, before[name], after[name]) for name in after if name in before]
        return [change for change in both if not change.is_none]

    def check(self, recipe: Recipe, step: int, override: bool = False) -> list[Change]:
        """Return the changes to apply to a run at `step`. Raises for changes that need `override`,
        and for those that cannot be made at all."""
        changes = self.changes(recipe)
        if step == 0:
            return changes
        restricted = [change for change in changes if not change.is_free]
        if step >= plan(recipe)[-1].last_step:
            restricted = [change for change in restricted if not LENGTH.fullmatch(change.kind)]
            if restricted and not override:
                raise RecipeError(
                    f"{self.folder} is at step {step} with nothing left to train, and was not "
                    f"trained with these options: {join_changes(restricted)}; name another --out"
                )
            return []
        if fixed := [c for c in restricted if FIXED.fullmatch(c.name) or self.is_over(c, step)]:
            raise RecipeError(
                f"{self.folder} holds a run at step {step} that cannot change "
                f"{join_changes(fixed)}; name another --out"
            )
        if restricted and not override:
            raise RecipeError(
                f"{self.folder} holds a run at step {step} with other options: "
                f"{join_changes(restricted)}; --override changes them from step {step} on, another "
                "--out begins a new run"
            )
        return changes

    def is_over(self, change: Change, step: int) -> bool:
        """Whether a change concerns a stage that is over, or the growth of the current one. The
        last stage of a finished run can be extended."""
        if change.stage is None or self.values is None:
            return False
        steps = [int(stage["steps"]) for stage in self.values["stages"]]
        begin, end = sum(steps[: change.stage]), sum(steps[: change.stage + 1])
        left = end <= step and change.stage < len(steps) - 1
        return left or (begin < step and ".grow" in change.name)

    def write(self, recipe: Recipe, step: int) -> None:
        """Record the recipe from `step` on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        changes = self.changes(recipe)
        if step == 0:
            (self.folder / HISTORY).unlink(missing_ok=True)
        elif changes or (self.folder / HISTORY).exists():
            self.write_history(changes, step)
        if self.values is None or changes:
            values = recorded(recipe)
            write_atomic(self.folder / CONFIG, yaml.safe_dump(values, sort_keys=False))
            self.values = values

    def write_history(self, changes: list[Change], step: int) -> None:
        """Append changes. Called before the record is written: a kill in between loses nothing."""
        path = self.folder / HISTORY
        rows = read_mapping(path).get("changes", []) if path.exists() else []
        # Repeated steps use the current values.
        rows = [{**row, "from_step": min(step, row["from_step"])} for row in rows]
        options = {c.name: {"before": c.before, "after": c.after} for c in changes}
        row = {"from_step": step, "options": options}
        if options and row not in rows[-1:]:
            rows.append(row)
        write_atomic(path, yaml.safe_dump({"changes": rows}, sort_keys=False))


def recorded(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as it is recorded; a run without an adapter has no such section."""
    values: dict[str, Any] = plain(asdict(recipe))
    if recipe.adapter.method is None:
        del values["adapter"]
    return values


def read_record(path: Path) -> dict[str, Any]:
    remedy = "; restore it, or name another --out to begin a new run"
    values = read_mapping(path, remedy)
    for section in SECTIONS:
        if not isinstance(values.get(section), dict):
            raise RecipeError(f"{path} is damaged: it has no section {section}{remedy}")
    for section in ("augmentation", "adapter"):
        if not isinstance(values.get(section, {}), dict):
            raise RecipeError(f"{path} is damaged: {section} holds no options{remedy}")
    stages = values.get("stages", [])
    if not isinstance(stages, list):
        raise RecipeError(f"{path} is damaged: its stages are no list{remedy}")
    if not isinstance(values["run"].get("steps"), int):
        raise RecipeError(f"{path} is damaged: run.steps is no number{remedy}")
    for number, stage in enumerate(stages, 1):
        if not is_stage(stage):
            raise RecipeError(f"{path} is damaged: stage {number} is incomplete{remedy}")
    return with_defaults(values)


def is_stage(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("steps"), int):
        return False
    return all(isinstance(value.get(name), dict | None) for name in ("grow", "schedule", "rates"))


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of options that a record of an older version lacks."""
    parts = {"grow": plain(asdict(GrowthOptions())), "schedule": plain(asdict(ScheduleOptions()))}
    stages = []
    for stage in values.get("stages", []):
        inner = {
            name: {**known, **stage[name]}
            for name, known in parts.items()
            if stage.get(name) is not None
        }
        stages.append({**plain(asdict(StageOptions())), **stage, **inner})
    defaults = plain(asdict(Recipe()))
    sections = {
        name: {**known, **values.get(name, {})}
        for name, known in defaults.items()
        if name != "stages"
    }
    return {**values, **sections, "stages": stages}


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints by their names, complete or not."""
    names = [path.name for path in (folder / CHECKPOINTS).glob("step-*")]
    return [int(name[5:]) for name in names if name[5:].isdecimal()]


def newest_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint by its name; 0 without any."""
    return max(checkpoint_steps(folder), default=0)


def check_folder(folder: Path, exported: str = MODEL) -> None:
    """Raise if a new run would replace files in the folder, except those of a run killed before its
    first checkpoint. Other files, such as a log, are allowed."""
    if not folder.is_dir() or checkpoint_steps(folder):
        return
    names = {path.name for path in folder.iterdir()}
    replaced = names & ({exported, LOSS_PLOT} | (set() if CONFIG in names else {METRICS}))
    if not replaced:
        return
    what = "a run without checkpoints" if CONFIG in names else f"{min(replaced)} and is not a run"
    raise RecipeError(
        f"{folder} holds {what}; training would overwrite it; remove the folder or name another "
        "--out"
    )


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return options by full name. A stage without a schedule gets that of the recipe; values that
    are mappings, such as rates, are not flattened."""
    found: dict[str, Any] = {}
    for section, options in values.items():
        if isinstance(options, dict):
            found |= {f"{section}.{name}": value for name, value in options.items()}
    stages = values.get("stages") or []
    for index, stage in enumerate(stages):
        follows = {**stage, "schedule": stage.get("schedule") or values.get("schedule")}
        for name, value in follows.items():
            whole = not isinstance(value, dict) or name == "rates"
            inner = {"": value} if whole else {f".{n}": v for n, v in value.items()}
            found |= {f"stages[{index}].{name}{rest}": v for rest, v in inner.items()}
    return {**found, "stages": len(stages)}


def same_path(before: str | None, after: str | None) -> bool:
    """Whether two paths mean the same folder. A record of an older version may hold a relative
    path, and a path that was not found stays relative."""
    if before is None or after is None:
        return before == after
    old, new = Path(before), Path(after)
    return old.resolve() == new.resolve() or is_end(old, new) or is_end(new, old)


def is_end(part: Path, whole: Path) -> bool:
    return not part.is_absolute() and whole.parts[-len(part.parts) :] == part.parts


def is_moved(before: str | None, after: str | None) -> bool:
    """Whether the old path is gone and the new one has its name."""
    if before is None or after is None:
        return False
    return not Path(before).exists() and Path(before).name == Path(after).name


def source(start: str | None) -> str | None:
    """Return the folder that a run started from, without the `model` of a run folder."""
    return None if start is None else str(start).removesuffix(f"/{MODEL}")


def format_value(value: Any) -> str:
    return "none" if value is None else str(value)


def join_changes(changes: list[Change]) -> str:
    return ", ".join(map(str, changes))


def plain(value: Any) -> Any:
    """Replace tuples with lists, which YAML writes without tags."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
