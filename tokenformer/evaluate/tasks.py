"""Benchmarks through lm-evaluation-harness: tasks from the hub or from local files, then scores.

    tasks = load_tasks(["hellaswag", "piqa"], data=Path("eval"))
    scorer = Scorer(model, tokenizer, answers_folder())
    scores = [score for task in tasks.values() for score in score_task(task, scorer)]
    scorer.answers.finish()

lm-eval is the extra `eval`; it is imported when it is used.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenformer.errors import DataError
from tokenformer.evaluate.benchmarks import BENCHMARKS
from tokenformer.evaluate.local_tasks import write_local_task
from tokenformer.evaluate.quiet import quiet
from tokenformer.evaluate.scorer import Scorer
from tokenformer.evaluate.scores import Score

RESAMPLES = 1000
"""Of the bootstrap by which the standard error of a perplexity is found."""
FEWSHOT_SEED = 1234
"""lm-eval's own, for tasks that show examples."""

Tasks = dict[str, Any]
"""By the name that was asked for, what lm-eval loaded: a task, or a group of them."""


def load_tasks(names: Sequence[str], data: Path | None = None) -> Tasks:
    """Tasks with their rows, from the hub or, where `data` is a folder, from its files."""
    import lm_eval.tasks

    definitions = Path(lm_eval.tasks.__file__).parent
    with TemporaryDirectory(prefix="tokenformer-") as folder, quiet():
        if data is not None:
            files = [write_local_task(name, data, definitions, Path(folder)) for name in names]
            specs = {name: str(file) for name, file in zip(names, files, strict=True)}
        else:
            specs = {name: str(definitions / b.definition) for name, b in BENCHMARKS.items()}
        # Only tasks beyond the six need the index of all 14,000 definitions, which takes seconds.
        every = data is None and not specs.keys() >= set(names)
        manager = lm_eval.tasks.TaskManager(include_defaults=every)
        if every:
            check_names(names, manager.all_tasks)
        return {name: load(name, specs.get(name, name), manager) for name in names}


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; near are {', '.join(near)}" if near else ""
            raise DataError(f"{name} is not a task of lm-eval{hint}")


def load(name: str, spec: str, manager: Any) -> Any:
    """A task or group; `spec` is its file, or its name where the manager knows it."""
    try:
        loaded = manager.load([spec])
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "; --data DIR reads local files" if isinstance(error, ConnectionError) else ""
        raise DataError(f"{name} cannot be loaded: {reason}{hint}") from None
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise DataError(f"{name} would run code from the model, or needs more than text")
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(FEWSHOT_SEED)
    return loaded


def score_task(task: Any, scorer: Scorer, limit: int | None = None) -> list[Score]:
    """Every metric of a loaded task, or of a group and its tasks, on all items or the first."""
    from lm_eval import evaluate

    try:
        with quiet():
            found = evaluate(
                scorer, task, limit=limit, bootstrap_iters=RESAMPLES, log_samples=False
            )
    except OverflowError:  # lm-eval's exp
        raise DataError(
            f"{', '.join(task['tasks'])}: the model finds the answers so unlikely that no number "
            "can hold their perplexity"
        ) from None
    return [
        score
        for name, metrics in found["results"].items()
        for score in read_metrics(name, metrics, found["n-samples"].get(name, {}).get("effective"))
    ]


def read_metrics(task: str, metrics: dict[str, Any], items: int | None) -> Iterator[Score]:
    """From lm-eval's {"acc,none": 0.5, "acc_stderr,none": 0.1, ...}; accuracies become percent."""
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
