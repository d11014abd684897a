"""Small corpora that a model of enwik8 is adapted to, made of real data of other purposes.

- `captions`: what people wrote about the photographs of Flickr8k, five captions of each in a text.
- `questions`: prompts with completions. School questions of ARC with the right choice, and goals of
  PIQA with the better solution; a twentieth of them is held out.
"""

import json
from collections.abc import Iterator
from pathlib import Path

TINY_QUESTIONS = [
    {"prompt": f"Question: What is {a} plus {b}?\nAnswer:", "completion": f" {a + b}\n"}
    for a in range(12)
    for b in range(12)
]
"""For the scale `smoke`, which has no data."""


def write_captions(folder: Path, images: Path) -> None:
    """Write one file of text per split."""
    import pyarrow.parquet

    for split in ("train", "validation"):
        rows = pyarrow.parquet.read_table(images / f"{split}.parquet", columns=["captions"])
        texts = ["\n".join(captions) for captions in rows["captions"].to_pylist()]
        part = folder / split
        part.mkdir(parents=True)
        (part / "captions.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def write_questions(folder: Path, tasks: Path | None) -> None:
    folder.mkdir(parents=True)
    rows = TINY_QUESTIONS if tasks is None else list(questions(tasks))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(text, encoding="utf-8")


def questions(tasks: Path) -> Iterator[dict[str, str]]:
    for name in ("arc_easy_test", "arc_challenge_test"):
        for row in read_jsonl(tasks / f"{name}.jsonl"):
            yield example(f"Question: {row['question']}", row["choices"][row["gold"]])
    labels = (tasks / "piqa_valid-labels.lst").read_text().split()
    for row, label in zip(read_jsonl(tasks / "piqa_valid.jsonl"), labels, strict=True):
        yield example(f"Goal: {row['goal']}", row[f"sol{int(label) + 1}"])


def read_jsonl(file: Path) -> Iterator[dict]:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield json.loads(line)


def example(prompt: str, answer: str) -> dict[str, str]:
    return {"prompt": f"{prompt}\nAnswer:", "completion": f" {answer}\n"}
