"""Benchmarks as a measure of an intervention's effect, by lm-evaluation-harness.

effect(model, on_tasks(tokenizer, ["arc_easy"], limit=200), off=["3.ffn.17"])
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from tokenformer.evaluate.harness_model import HarnessModel
from tokenformer.evaluate.tasks import load_tasks, score_task


def on_tasks(
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
) -> Callable[[PreTrainedModel], dict[str, float]]:
    """Return a measure: a function from a model to its scores, by task and metric.

    Args:
        tokenizer: the model's tokenizer.
        tasks: names of tasks of lm-evaluation-harness (the extra `eval`).
        data: a folder of jsonl files to read the paper's six tasks from, instead of the hub.
        limit: use only the first items of each task.
        batch_size: requests per batch; by default as many as fit.
    """
    loaded = load_tasks(tasks, data)

    def measure(model: PreTrainedModel) -> dict[str, float]:
        # A folder of its own: cached responses of another intervention must not be used.
        with TemporaryDirectory() as folder:
            harness = HarnessModel(model, tokenizer, Path(folder), batch_size=batch_size)
            scores = [
                score for task in loaded.values() for score in score_task(task, harness, limit)
            ]
        return {f"{score.task}/{score.metric}": score.value for score in scores}

    return measure
