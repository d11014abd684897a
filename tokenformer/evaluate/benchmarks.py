"""The six benchmarks of the paper's zero-shot table: their tasks in lm-evaluation-harness, the
reported metrics and the formats of their rows.

The paper calls every accuracy "acc". Most of its figures of other models come from the Mamba paper,
which divides each answer's log-likelihood by its length (acc_norm) for HellaSwag and ARC-Challenge,
and not for the others (acc).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
PERPLEXITY = "perplexity"
VALIDATION_NAMES = ("val", "valid", "validation", "dev")


@dataclass(frozen=True)
class Benchmark:
    task: str
    title: str
    """The name in the paper's table."""
    metric: str
    """The accuracy metric that the paper reports."""
    chance: float
    """Accuracy of random guessing, in percent."""
    definition: str
    """The file in lm-eval's folder of task definitions."""
    split: str
    """The split that is scored, as the hub's dataset names it."""
    split_names: tuple[str, ...]
    """Names of that split in file names."""
    read_row: Callable[[Row], Row]
    """Converts a row of a local file to the hub's format; raises KeyError or ValueError."""
    other_names: tuple[str, ...] = ()
    """Other names of the task in file names."""


def read_lambada(row: Row) -> Row:
    return {"text": text(row["text"])}


def read_hellaswag(row: Row) -> Row:
    texts = {name: text(row[name]) for name in ("activity_label", "ctx_a", "ctx_b")}
    endings = [text(ending) for ending in row["endings"]]
    return {**texts, "endings": endings, "label": str(index_below(row["label"], len(endings)))}


def read_piqa(row: Row) -> Row:
    texts = {name: text(row[name]) for name in ("goal", "sol1", "sol2")}
    return {**texts, "label": index_below(row["label"], 2)}


def read_arc(row: Row) -> Row:
    """The original release has {question: {stem, choices: [{text, label}]}, answerKey}, the hub
    {question, choices: {text, label}, answerKey}; {question, choices: [text], gold} works too."""
    question = row["question"]
    if isinstance(question, dict):
        texts = [choice["text"] for choice in question["choices"]]
        labels = [choice["label"] for choice in question["choices"]]
        question, answer = question["stem"], row["answerKey"]
    elif isinstance(row["choices"], dict):
        texts, labels, answer = row["choices"]["text"], row["choices"]["label"], row["answerKey"]
    else:
        texts = row["choices"]
        labels = [chr(ord("A") + index) for index in range(len(texts))]
        answer = labels[index_below(row["gold"], len(labels))]
    if answer not in labels:
        raise ValueError(f"answer {answer} is not one of {', '.join(labels)}")
    choices = {"text": [text(choice) for choice in texts], "label": labels}
    return {"question": text(question), "choices": choices, "answerKey": answer}


def read_winogrande(row: Row) -> Row:
    texts = {name: text(row[name]) for name in ("sentence", "option1", "option2")}
    if "_" not in texts["sentence"]:
        raise ValueError("the sentence has no _ to fill in")
    return {**texts, "answer": str(index_below(int(row["answer"]) - 1, 2) + 1)}


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def index_below(label: Any, count: int) -> int:
    if int(label) not in range(count):
        raise ValueError(f"answer {label} is not one of 0 to {count - 1}")
    return int(label)


BENCHMARKS = {
    benchmark.task: benchmark
    for benchmark in (
        Benchmark(
            task="lambada_openai",
            title="LAMBADA",
            metric="acc",
            chance=0.0,
            definition="lambada/lambada_openai.yaml",
            split="test",
            split_names=("test",),
            read_row=read_lambada,
            other_names=("lambada",),
        ),
        Benchmark(
            task="hellaswag",
            title="HellaSwag",
            metric="acc_norm",
            chance=25.0,
            definition="hellaswag/hellaswag.yaml",
            split="validation",
            split_names=VALIDATION_NAMES,
            read_row=read_hellaswag,
        ),
        Benchmark(
            task="piqa",
            title="PIQA",
            metric="acc",
            chance=50.0,
            definition="piqa/piqa.yaml",
            split="validation",
            split_names=VALIDATION_NAMES,
            read_row=read_piqa,
        ),
        Benchmark(
            task="arc_easy",
            title="Arc-E",
            metric="acc",
            chance=25.0,
            definition="arc/arc_easy.yaml",
            split="test",
            split_names=("test",),
            read_row=read_arc,
        ),
        Benchmark(
            task="arc_challenge",
            title="Arc-C",
            metric="acc_norm",
            chance=25.0,
            definition="arc/arc_challenge.yaml",
            split="test",
            split_names=("test",),
            read_row=read_arc,
        ),
        Benchmark(
            task="winogrande",
            title="WinoGrande",
            metric="acc",
            chance=50.0,
            definition="winogrande/default.yaml",
            split="validation",
            split_names=VALIDATION_NAMES,
            read_row=read_winogrande,
            other_names=("winogrande_xl",),
        ),
    )
}
"""Benchmarks by task name, in the order of the paper's columns."""
