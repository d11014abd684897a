"""Benchmarks from local files, which lm-evaluation-harness reads instead of the hub.

A task's file is TASK_SPLIT.jsonl, TASK.jsonl or TASK/SPLIT.jsonl, in upper or lower case and with
- or _: hellaswag_val.jsonl, ARC-Easy-Test.jsonl, piqa/valid.jsonl (with piqa/valid-labels.lst).
Rows have the format of the original release or of the hub.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from tokenformer.errors import DataError, one_line
from tokenformer.evaluate.benchmarks import BENCHMARKS, Benchmark, Row


def write_local_task(task: str, data: Path, definitions: Path, out: Path) -> Path:
    """Write lm-eval's definition of a task with local rows to `out`; return its file.

    `definitions` is lm-eval's folder of task definitions.
    """
    if task not in BENCHMARKS:
        names = ", ".join(BENCHMARKS)
        raise DataError(f"{task} cannot be read from local files, only {names}")
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
            "keep_in_memory": True,  # the files are deleted once the task is loaded
        },
        # No other split has a file.
        **{f"{split}_split": None for split in ("training", "validation", "test")},
        f"{benchmark.split}_split": benchmark.split,
    }
    path = out / f"{task}.yaml"
    path.write_text(yaml.safe_dump(definition), encoding="utf-8")
    return path


def find_file(benchmark: Benchmark, data: Path) -> Path:
    """Find the file of a benchmark in a folder, by the naming scheme above."""
    stems = (benchmark.task, *benchmark.other_names)
    names = [f"{stem}_{split}" for stem in stems for split in benchmark.split_names]
    files: dict[str, Path] = {}
    for path in sorted(data.glob("*/*.jsonl")):
        files[normalized(f"{path.parent.name}_{path.stem}")] = path
        files[normalized(path.stem)] = path
    for path in sorted(data.glob("*.jsonl")):  # these take precedence over files in subfolders
        files[normalized(path.stem)] = path
    for name in [*names, *stems]:
        if name in files:
            return files[name]
    tried = ", ".join(f"{name}.jsonl" for name in [*names, *stems])
    raise DataError(f"{data} has no file for {benchmark.task}: looked for {tried}")


def normalized(name: str) -> str:
    return name.lower().replace("-", "_")


def read_rows(benchmark: Benchmark, path: Path) -> Iterator[Row]:
    """Yield rows in the hub's format, with the labels of a separate file if there is one."""
    labels_file = path.with_name(f"{path.stem}-labels.lst")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        labels = labels_file.read_text(encoding="utf-8").split() if labels_file.exists() else None
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None
    if not lines:
        raise DataError(f"{path} is empty")
    if labels is not None and len(labels) != len(lines):
        raise DataError(
            f"{labels_file} has {len(labels)} labels for the {len(lines)} rows of {path}"
        )
    for index, line in enumerate(lines):
        label = {} if labels is None else {"label": labels[index], "answer": labels[index]}
        try:
            yield benchmark.read_row({**label, **json.loads(line)})
        except KeyError as error:
            raise DataError(f"{path}, line {index + 1} has no field {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            reason = one_line(error)
            raise DataError(
                f"{path}, line {index + 1} is not a row of {benchmark.task}: {reason}"
            ) from None
