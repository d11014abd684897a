"""Benchmark files, and the requests of each benchmark built from them without lm-eval."""

import json
import re
from pathlib import Path
from typing import NamedTuple


class Item(NamedTuple):
    requests: list[tuple[str, str]]
    """Context and continuation of each choice."""
    gold: int
    choices: list[str]
    """Texts whose lengths `acc_norm` divides by."""


def copy_first_lines(source: Path, out: Path, count: int) -> Path:
    """Copy the first lines of every file of a folder; small files load faster."""
    for path in source.iterdir():
        lines = path.read_text().splitlines(keepends=True)[:count]
        (out / path.name).write_text("".join(lines))
    return out


def read(path: Path, limit: int | None) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[:limit]]


def items(task: str, data: Path, limit: int | None) -> list[Item]:
    return {
        "lambada_openai": lambada,
        "hellaswag": hellaswag,
        "piqa": piqa,
        "arc_easy": arc_easy,
        "arc_challenge": arc_challenge,
        "winogrande": winogrande,
    }[task](data, limit)


def lambada(data: Path, limit: int | None) -> list[Item]:
    found = []
    for row in read(data / "lambada_test.jsonl", limit):
        context, _, word = row["text"].rpartition(" ")
        found.append(Item([(context, " " + word)], 0, [word]))
    return found


def hellaswag(data: Path, limit: int | None) -> list[Item]:
    def clean(text: str) -> str:
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    found = []
    for row in read(data / "hellaswag_val.jsonl", limit):
        ctx = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        endings = [clean(ending) for ending in row["endings"]]
        found.append(Item([(clean(ctx), " " + e) for e in endings], row["label"], endings))
    return found


def piqa(data: Path, limit: int | None) -> list[Item]:
    labels = (data / "piqa_valid-labels.lst").read_text().split()
    rows = read(data / "piqa_valid.jsonl", limit)
    return [
        question(row["goal"], [row["sol1"], row["sol2"]], int(label))
        for row, label in zip(rows, labels, strict=False)
    ]


def arc_easy(data: Path, limit: int | None) -> list[Item]:
    rows = read(data / "arc_easy_test.jsonl", limit)
    return [question(row["question"], row["choices"], row["gold"]) for row in rows]


def arc_challenge(data: Path, limit: int | None) -> list[Item]:
    rows = read(data / "arc_challenge_test.jsonl", limit)
    return [question(row["question"], row["choices"], row["gold"]) for row in rows]


def question(text: str, choices: list[str], gold: int) -> Item:
    return Item([(f"Question: {text}\nAnswer:", " " + c) for c in choices], gold, choices)


def winogrande(data: Path, limit: int | None) -> list[Item]:
    found = []
    for row in read(data / "winogrande_dev.jsonl", limit):
        before, _, after = row["sentence"].partition("_")
        contexts = [before + row["option1"], before + row["option2"]]
        found.append(
            Item([(c, " " + after.strip()) for c in contexts], int(row["answer"]) - 1, contexts)
        )
    return found
