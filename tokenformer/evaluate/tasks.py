"""Benchmarks through lm-evaluation-harness: load tasks from the hub or local files and score them.

    tasks = load_tasks(["hellaswag", "piqa"], data=Path("eval"))
    model = HarnessModel(model, tokenizer, response_cache_folder())
    scores = [score for task in tasks.values() for score in score_task(task, model)]
    model.cache.delete()

lm-eval is in the extra `eval` and is imported on first use.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenformer.errors import DataError
from tokenformer.evaluate.benchmarks import BENCHMARKS
from tokenformer.evaluate.harness_model import HarnessModel, silence_lm_eval
from tokenformer.evaluate.local_tasks import write_local_task
from tokenformer.evaluate.scores import Score

BOOTSTRAP_SAMPLES = 1000
"""For the standard error of a perplexity."""
FEWSHOT_SEED = 1234
"""lm-eval's default."""

Tasks = dict[str, Any]
"""lm-eval's tasks and groups of tasks by name."""


def load_tasks(names: Sequence[str], data: Path | None = None) -> Tasks:
    """Load tasks and their rows from the hub or, if given, from the files in the folder `data`."""
    import lm_eval.tasks

    definitions = Path(lm_eval.tasks.__file__).parent
    with TemporaryDirectory(prefix="tokenformer-") as folder, silence_lm_eval():
        if data is not None:
            files = [write_local_task(name, data, definitions, Path(folder)) for name in names]
            specs = {name: str(file) for name, file in zip(names, files, strict=True)}
        else:
            specs = {name: str(definitions / b.definition) for name, b in BENCHMARKS.items()}
        # Only other tasks need the index of all 14,000 definitions, which takes seconds to build.
        others = data is None and not specs.keys() >= set(names)
        manager = lm_eval.tasks.TaskManager(include_defaults=others)
        if others:
            check_names(names, manager.all_tasks)
        return {name: load_task(name, specs.get(name, name), manager) for name in names}


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise DataError(f"{name} is not a task of lm-eval{hint}")


def load_task(name: str, spec: str, manager: Any) -> Any:
    """Load a task or group; `spec` is its file, or a name that the task manager knows."""
    try:
        loaded = manager.load([spec])
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "; use --data DIR to read local files" if isinstance(error, ConnectionError) else ""
        raise DataError(f"{name} cannot be loaded: {reason}{hint}") from None
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise DataError(f"{name} runs code from the model or is multimodal; not supported")
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(FEWSHOT_SEED)
    return loaded


def score_task(task: Any, model: HarnessModel, limit: int | None = None) -> list[Score]:
    """Return every metric of a loaded task, or of a group and its tasks, on all items or the first
    `limit`."""
    from lm_eval import evaluate

    try:
        with silence_lm_eval():
            found = evaluate(
                model, task, limit=limit, bootstrap_iters=BOOTSTRAP_SAMPLES, log_samples=False
            )
    except OverflowError:  # lm-eval's exp
        raise DataError(
            f"{', '.join(task['tasks'])}: the perplexity overflows; the model assigns the answers "
            "almost no probability"
        ) from None
    return [
        score
        for name, metrics in found["results"].items()
        for score in read_metrics(name, metrics, found["n-samples"].get(name, {}).get("effective"))
    ]


def read_metrics(task: str, metrics: dict[str, Any], items: int | None) -> Iterator[Score]:
    """Convert lm-eval's {"acc,none": 0.5, "acc_stderr,none": 0.1, ...}; accuracies in percent."""
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = metrics.get(f"{metric}_stderr,{filtered}")
        factor = 100.0 if metric.startswith("acc") else 1.0
        yield Score(
            task=task,
            metric=metric if filtered == "none" else f"{metric},{filtered}",
            value=factor * value,
            stderr=factor * error if isinstance(error, (int, float)) else None,
            items=items,
        )
