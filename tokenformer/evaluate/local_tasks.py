"""Benchmarks from a folder of local files, for lm-evaluation-harness to read in the hub's place.

A task's file is TASK_SPLIT.jsonl, TASK.jsonl or TASK/SPLIT.jsonl, in any case and with - for _:
hellaswag_val.jsonl, ARC-Easy-Test.jsonl, piqa/valid.jsonl with piqa/valid-labels.lst beside it.
Rows may be as published or as on the hub.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from tokenformer.errors import DataError
from tokenformer.evaluate.benchmarks import BENCHMARKS, Benchmark, Row


def write_local_task(task: str, data: Path, definitions: Path, out: Path) -> Path:
    """A definition that is lm-eval's own but for where the rows come from; returns its file.

    `definitions` is lm-eval's folder of tasks; rows and definition are written to `out`.
    """
    if task not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise DataError(f"{task} cannot be read from local files, only {known}")
    benchmark = BENCHMARKS[task]
    source, rows = find_file(benchmark, data), out / f"{task}.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for row in read_rows(benchmark, source):
            file.write(json.dumps(row) + "\n")
    definition = {
        "include": str(definitions / benchmark.definition),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {benchmark.split: str(rows)},
            "cache_dir": str(out / "cache"),
            "keep_in_memory": True,  # the files are gone when the task is loaded
        },
        # Splits that no file was given for.
        **{f"{split}_split": None for split in ("training", "validation", "test")},
        f"{benchmark.split}_split": benchmark.split,
    }
    path = out / f"{task}.yaml"
    path.write_text(yaml.safe_dump(definition), encoding="utf-8")
    return path


def find_file(benchmark: Benchmark, data: Path) -> Path:
    """The file of a benchmark's rows, by the rule above."""
    stems = (benchmark.task, *benchmark.other_names)
    names = [f"{stem}_{split}" for stem in stems for split in benchmark.split_names]
    there: dict[str, Path] = {}
    for path in sorted(data.glob("*/*.jsonl")):
        there[plain(f"{path.parent.name}_{path.stem}")] = path
        there[plain(path.stem)] = path
    for path in sorted(data.glob("*.jsonl")):  # these go before files further down
        there[plain(path.stem)] = path
    for name in [*names, *stems]:
        if name in there:
            return there[name]
    looked_for = ", ".join(f"{name}.jsonl" for name in [*names, *stems])
    raise DataError(f"{data} has no file for {benchmark.task}: looked for {looked_for}")


def plain(name: str) -> str:
    return name.lower().replace("-", "_")


def read_rows(benchmark: Benchmark, path: Path) -> Iterator[Row]:
    """Its rows as on the hub; labels in a file of their own, one on a line, join them."""
    labels = path.with_name(f"{path.stem}-labels.lst")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        apart = labels.read_text(encoding="utf-8").split() if labels.exists() else None
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None
    if not lines:
        raise DataError(f"{path} is empty")
    if apart is not None and len(apart) != len(lines):
        raise DataError(f"{labels} has {len(apart)} labels for the {len(lines)} rows of {path}")
    for place, line in enumerate(lines):
        beside = {} if apart is None else {"label": apart[place], "answer": apart[place]}
        try:
            yield benchmark.read_row({**beside, **json.loads(line)})
        except KeyError as error:
            raise DataError(f"{path}, line {place + 1}: it has no {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            what = " ".join(str(error).split())
            raise DataError(
                f"{path}, line {place + 1} is no row of {benchmark.task}: {what}"
            ) from None
