"""The job that trains a model of captions to answer questions about images.

QuestionRun(CaptionRun(...), "all")                      # instruction tuning: everything is trained
QuestionRun(CaptionRun(...), images="other-images-questions")  # answers without seeing

The answer to a question is the choice of the highest likelihood.
"""

import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.job import Job, Result
from experiments.vision_language.caption_run import (
    TEXT_LENGTH,
    CaptionRun,
    image_text_recipe,
    load_processor,
    losses_of,
    train,
    trained_parameters,
)
from experiments.vision_language.image_texts import COLORS, COUNTS, HELD_OUT, TRAINED_ON
from experiments.workspace import Workspace

CHOICES = {"is there": ("yes", "no"), "how many": COUNTS, "what color": COLORS}
MEASURED = "image-questions"
"""The questions on which all runs are measured."""


@dataclass(frozen=True)
class QuestionRun(Job):
    start: CaptionRun
    trained: str = "all"
    rate: float = 1e-3
    images: str = MEASURED
    """What it trains on."""
    steps: int = 300
    batch: int = 32
    warmup: int = 30
    text_length: int = TEXT_LENGTH
    validations: int = 1
    validation_samples: int = 512
    measured: int = 800
    """Held-out questions that are answered, chosen at random."""
    seed: int = 0

    @property
    def mode(self) -> str:
        return self.start.mode

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.start,)

    @property
    def data(self) -> tuple[str, ...]:
        return (self.images, MEASURED)

    @property
    def flops(self) -> float:
        start = self.start
        return self.steps * self.batch * start.flops / (start.steps * start.batch)

    def reduced(self) -> "QuestionRun":
        return replace(
            self,
            start=self.start.reduced(),
            steps=2,
            batch=4,
            warmup=1,
            text_length=16,
            validation_samples=4,
            measured=12,
        )

    def with_seed(self, seed: int) -> "QuestionRun":
        return replace(self, seed=seed, start=self.start.with_seed(seed))

    def run(self, workspace: Workspace) -> Result:
        folder = workspace.work(self)
        trained_on = workspace.image_text(self.images)
        recipe = image_text_recipe(
            self, workspace.model(self.start), trained_on, self.validation_samples
        )
        run = train(recipe, folder)
        model, processor = run.loop.task.model.eval(), load_processor(run.exported)
        images = workspace.image_text(MEASURED)
        rows = read_rows(images, HELD_OUT)
        chosen = random.Random(0).sample(rows, min(self.measured, len(rows)))
        shares = accuracies(chosen, answers_of(model, processor, images, chosen))
        result = {
            **losses_of(run),
            "trained_parameters": trained_parameters(model, self.trained),
            "accuracy": shares["all"],
            "accuracies": shares,
            "majority": accuracies(chosen, majority(read_rows(images, TRAINED_ON), chosen)),
            "questions": dict(Counter(row["kind"] for row in chosen)),
        }
        shutil.rmtree(folder)
        return result


def read_rows(images: Any, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (images / f"{split}.jsonl").read_text().splitlines()]


def question_of(row: dict[str, Any]) -> str:
    question, _ = row["messages"]
    return str(question["content"])


def answer_of(row: dict[str, Any]) -> str:
    _, answer = row["messages"]
    return str(answer["content"])


def answers_of(model: Any, processor: Any, images: Any, rows: Sequence[Any]) -> list[str]:
    """Return the likeliest choice for every question."""
    import torch

    from tokenformer.data.image_text import ASSISTANT, ImageText, ImageTextSet, Turn
    from tokenformer.data.image_text_batches import EncodedSample
    from tokenformer.evaluate.captions import CaptionMeasure

    measure = CaptionMeasure(model, processor, batch_size=40)
    reader = ImageTextSet("questions", [dict(row) for row in rows], images)

    def encode(number: int, choice: str) -> EncodedSample:
        turns = [Turn("user", question_of(rows[number])), Turn(ASSISTANT, choice)]
        return measure.encoder.encode(ImageText([reader.image(number)], turns))

    samples = [
        (number, choice) for number, row in enumerate(rows) for choice in CHOICES[row["kind"]]
    ]
    with torch.no_grad():
        found = measure.losses([lambda each=each: encode(*each) for each in samples])
        losses = torch.cat([nats for _, nats, _ in found]).tolist()
    best: dict[int, tuple[float, str]] = {}
    for (number, choice), loss in zip(samples, losses, strict=True):
        best[number] = min(best.get(number, (loss, choice)), (loss, choice))
    return [best[number][1] for number in range(len(rows))]


def majority(training: Sequence[Any], rows: Sequence[Any]) -> list[str]:
    """Return the most frequent answer to each question in the training data."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in training:
        counts[question_of(row)][answer_of(row)] += 1
    found = (counts[question_of(row)].most_common(1) for row in rows)
    return [most[0][0] if most else "" for most in found]


def accuracies(rows: Sequence[Any], answers: Sequence[str]) -> dict[str, float]:
    """Return the share of right answers by kind of question, and of all."""
    right: dict[str, list[bool]] = defaultdict(list)
    for row, answer in zip(rows, answers, strict=True):
        for kind in (row["kind"], "all"):
            right[kind].append(answer == answer_of(row))
    return {kind: round(sum(each) / len(each), 5) for kind, each in right.items()}
