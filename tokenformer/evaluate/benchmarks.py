"""The six benchmarks of the paper's zero-shot table: which task of lm-evaluation-harness each is,
which metric is reported, and how its rows look in files.

The paper calls every accuracy "acc". Most of its figures of other models are the Mamba paper's,
which says that HellaSwag and ARC-Challenge are counted with each answer's log-likelihood divided by
the answer's length (acc_norm), the others without (acc).
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
    """As in the paper's table."""
    metric: str
    """The accuracy that the paper reports."""
    chance: float
    """Percent that a guess gets right."""
    definition: str
    """lm-eval's own file, in its folder of tasks."""
    split: str
    """The split it is scored on, by the name of the dataset on the hub."""
    split_names: tuple[str, ...]
    """What that split is called in file names."""
    read_row: Callable[[Row], Row]
    """A row of a local file as the hub has it; KeyError or ValueError where it is not one."""
    other_names: tuple[str, ...] = ()
    """What a file of it may also be called after."""


def read_lambada(row: Row) -> Row:
    return {"text": text(row["text"])}


def read_hellaswag(row: Row) -> Row:
    texts = {name: text(row[name]) for name in ("activity_label", "ctx_a", "ctx_b")}
    endings = [text(ending) for ending in row["endings"]]
    return {**texts, "endings": endings, "label": str(within(row["label"], len(endings)))}


def read_piqa(row: Row) -> Row:
    texts = {name: text(row[name]) for name in ("goal", "sol1", "sol2")}
    return {**texts, "label": within(row["label"], 2)}


def read_arc(row: Row) -> Row:
    """As published, {question: {stem, choices: [{text, label}]}, answerKey}; as on the hub,
    {question, choices: {text, label}, answerKey}; or {question, choices: [text], gold}."""
    question = row["question"]
    if isinstance(question, dict):
        texts = [choice["text"] for choice in question["choices"]]
        labels = [choice["label"] for choice in question["choices"]]
        question, answer = question["stem"], row["answerKey"]
    elif isinstance(row["choices"], dict):
        texts, labels, answer = row["choices"]["text"], row["choices"]["label"], row["answerKey"]
    else:
        texts = row["choices"]
        labels = [chr(ord("A") + place) for place in range(len(texts))]
        answer = labels[within(row["gold"], len(labels))]
    if answer not in labels:
        raise ValueError(f"the answer {answer} is not among {', '.join(labels)}")
    choices = {"text": [text(choice) for choice in texts], "label": labels}
    return {"question": text(question), "choices": choices, "answerKey": answer}


def read_winogrande(row: Row) -> Row:
    texts = {name: text(row[name]) for name in ("sentence", "option1", "option2")}
    if "_" not in texts["sentence"]:
        raise ValueError("the sentence has no _")
    return {**texts, "answer": str(within(int(row["answer"]) - 1, 2) + 1)}


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def within(label: Any, count: int) -> int:
    """An answer's number, from 0."""
    if int(label) not in range(count):
        raise ValueError(f"the answer {label} is not among {count}")
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
"""By task, in the order of the paper's columns."""
