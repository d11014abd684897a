"""The job that evaluates a trained language model on the paper's six zero-shot tasks.

    job = ZeroShot(LanguageRun(Model(tokens=96)))
    results[job]["tasks"]["piqa"]["accuracy"]

Tasks, requests and accuracies are those of lm-evaluation-harness. A small model is at chance in
most of them, so the job also records a score without a threshold: the bits that the model needs for
each right answer after its context.
"""

import json
import math
import shutil
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.job import Job, Result
from experiments.language import LanguageRun
from experiments.workspace import Workspace, source
from experiments.zero_shot.made_up_items import MADE_UP

ANSWERS = 1 + 4 + 2 + 4 + 4 + 2
"""Requests for one item of every task: its answers to choose from."""


@dataclass(frozen=True)
class Items(Job):
    """Copies the first items of every task to its folder among the models. lm-eval would process
    all 10,042 items of HellaSwag, four times per model, before it takes the first few. As a job of
    its own it also names the data before the first model is trained."""

    limit: int = 200

    @property
    def data(self) -> tuple[str, ...]:
        return ("zero-shot",)

    def reduced(self) -> "Items":
        return Items(3)

    def run(self, workspace: Workspace) -> Result:
        folder = workspace.model(self)
        folder.mkdir(parents=True, exist_ok=True)
        if workspace.small:
            for name, rows in MADE_UP.items():
                (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            copy_lines(source("zero-shot"), folder, self.limit)
        return {"items": self.limit}


def copy_lines(source: Path, folder: Path, count: int) -> None:
    """Copy the first lines of every file."""
    for path in source.iterdir():
        with path.open(encoding="utf-8") as lines:
            (folder / path.name).write_text("".join(islice(lines, count)), encoding="utf-8")


@dataclass(frozen=True)
class ZeroShot(Job):
    trained: LanguageRun
    items: Items = Items()

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.trained, self.items)

    @property
    def flops(self) -> float:
        """Forward passes, as if every request filled the context."""
        length = self.trained.length
        return self.items.limit * ANSWERS * self.trained.models[-1].training_flops(length) / 3

    def reduced(self) -> "ZeroShot":
        return replace(self, trained=self.trained.reduced(), items=self.items.reduced())

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.cli.model import load_model
        from tokenformer.evaluate.benchmarks import BENCHMARKS
        from tokenformer.evaluate.harness_model import HarnessModel
        from tokenformer.evaluate.scores import Score, Scores
        from tokenformer.evaluate.tasks import load_tasks, score_task

        start, folder = time.perf_counter(), workspace.work(self)
        tasks = load_tasks(list(BENCHMARKS), workspace.model(self.items))
        model, tokenizer = load_model(str(workspace.model(self.trained)))
        # The configuration allows for more positions than the run has trained.
        model.config.max_position_embeddings = self.trained.length
        harness_model = HarnessModel(model, tokenizer, folder)
        scores: list[Score] = []
        rows = {}
        for name, task in tasks.items():
            scores += score_task(task, harness_model)
            rows[name] = task_row(name, scores, task)
        (perplexity,) = [score for score in scores if score.metric == "perplexity"]
        average = Scores(model.num_parameters(), scores).average
        assert average is not None
        harness_model.cache.delete()
        shutil.rmtree(folder)
        return {
            "accuracy": round(average.value, 3),
            "error": rounded(average.stderr),
            "lambada_perplexity": [float(f"{perplexity.value:.4g}"), rounded(perplexity.stderr)],
            "tasks": rows,
            "truncated": harness_model.truncated,
            "seconds": round(time.perf_counter() - start, 1),
        }


def rounded(error: float | None) -> float:
    """Return a standard error with four digits; lm-eval has none for a single item."""
    return float(f"{error or 0.0:.4g}")


def task_row(name: str, scores: list[Any], task: dict[str, Any]) -> dict[str, Any]:
    """Return the paper's accuracy of a task, in percent, and the bits of the right answers."""
    from tokenformer.evaluate.benchmarks import BENCHMARKS

    metric = BENCHMARKS[name].metric
    (score,) = [score for score in scores if (score.task, score.metric) == (name, metric)]
    (scored,) = task["tasks"].values()
    bits, size = right_answers(scored)
    return {
        "items": score.items,
        "accuracy": round(score.value, 3),
        "error": rounded(score.stderr),
        "bytes": size,
        "bits": [round(value, 1) for value in bits],
    }


def right_answers(task: Any) -> tuple[list[float], int]:
    """Return the bits that the model needs for each right answer after its context, and the bytes
    of all of them. `task` is a task of lm-eval with the responses of an evaluation."""
    bits, size = [], 0
    for request in task.instances:
        if request.idx == right_choice(task, request.doc):
            (log_likelihood, _), (context, answer) = request.resps[-1], request.args
            bits.append(-log_likelihood / math.log(2))
            # lm-eval scores spaces at the end of a context with the answer.
            size += len((context + answer).encode()) - len(context.rstrip().encode())
    return bits, size


def right_choice(task: Any, doc: dict[str, Any]) -> int:
    """Return the index of the right answer. WinoGrande's choices are contexts of one answer, and
    its `doc_to_text` is the index of the right one."""
    if task.OUTPUT_TYPE == "loglikelihood":
        return 0
    return int(task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc))
