"""Local benchmark files: found by name, read in every format, or refused."""

import json

import pytest

from tokenformer.errors import DataError
from tokenformer.evaluate.benchmarks import BENCHMARKS
from tokenformer.evaluate.local_tasks import find_file, read_rows

ARC = {
    "question": "Which is a metal?",
    "choices": {"text": ["iron", "wood", "milk"], "label": ["A", "B", "C"]},
    "answerKey": "A",
}
WINOGRANDE = {"sentence": "It _ ends.", "option1": "a", "option2": "b", "answer": "2"}


def write(path, *rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("lambada_openai", "lambada_test.jsonl"),
        ("lambada_openai", "lambada_openai.jsonl"),
        ("lambada_openai", "lambada_openai/test.jsonl"),
        ("hellaswag", "hellaswag_val.jsonl"),
        ("hellaswag", "HellaSwag/validation.jsonl"),
        ("piqa", "PIQA/valid.jsonl"),
        ("arc_easy", "ARC-Easy-Test.jsonl"),
        ("arc_challenge", "ARC-Challenge/ARC-Challenge-Test.jsonl"),
        ("winogrande", "winogrande/dev.jsonl"),
        ("winogrande", "winogrande_xl_validation.jsonl"),
    ],
)
def test_files_are_found_by_task_and_split(task, name, tmp_path):
    path = write(tmp_path / name, {})
    write(tmp_path / "train.jsonl", {})
    write(tmp_path / f"{task}_train.jsonl", {})
    assert find_file(BENCHMARKS[task], tmp_path) == path


def test_a_folder_takes_precedence_over_its_subfolders(tmp_path):
    write(tmp_path / "old" / "piqa_valid.jsonl", {})
    path = write(tmp_path / "piqa_valid.jsonl", {})
    assert find_file(BENCHMARKS["piqa"], tmp_path) == path


def test_the_error_for_a_missing_file_lists_the_names_tried(tmp_path):
    with pytest.raises(DataError) as error:
        find_file(BENCHMARKS["hellaswag"], tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has no file for hellaswag: looked for hellaswag_val.jsonl, "
        "hellaswag_valid.jsonl, hellaswag_validation.jsonl, hellaswag_dev.jsonl, hellaswag.jsonl"
    )


def test_three_formats_of_arc_give_the_same_rows(tmp_path):
    texts, labels = ARC["choices"]["text"], ARC["choices"]["label"]
    choices = [{"text": t, "label": label} for t, label in zip(texts, labels, strict=True)]
    published = {
        "id": "x",
        "question": {"stem": ARC["question"], "choices": choices},
        "answerKey": "A",
    }
    flat = {"question": ARC["question"], "choices": ARC["choices"]["text"], "gold": 0}
    path = write(tmp_path / "arc.jsonl", ARC, published, flat)
    assert list(read_rows(BENCHMARKS["arc_easy"], path)) == [ARC] * 3


def test_labels_come_from_a_separate_file_or_from_the_rows(tmp_path):
    rows = [{"goal": "g", "sol1": "a", "sol2": "b"}, {"goal": "h", "sol1": "c", "sol2": "d"}]
    path = write(tmp_path / "valid.jsonl", *rows)
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    assert [row["label"] for row in read_rows(BENCHMARKS["piqa"], path)] == [1, 0]
    within = write(tmp_path / "piqa.jsonl", *({**row, "label": 1} for row in rows))
    assert [row["label"] for row in read_rows(BENCHMARKS["piqa"], within)] == [1, 1]
    (tmp_path / "valid-labels.lst").write_text("1\n")
    with pytest.raises(DataError, match="has 1 labels for the 2 rows"):
        list(read_rows(BENCHMARKS["piqa"], path))


@pytest.mark.parametrize(
    ("task", "row", "named"),
    [
        ("lambada_openai", {"txt": "a"}, "line 1 has no field 'text'"),
        ("lambada_openai", {"text": 3}, "3 is not a string"),
        ("lambada_openai", ["text"], "line 1 is not a row of lambada_openai"),
        ("piqa", {"goal": "g", "sol1": "a", "sol2": "b"}, "has no field 'label'"),
        (
            "piqa",
            {"goal": "g", "sol1": "a", "sol2": "b", "label": 2},
            "answer 2 is not one of 0 to 1",
        ),
        ("arc_easy", {**ARC, "answerKey": "E"}, "answer E is not one of A, B, C"),
        (
            "arc_easy",
            {"question": "q", "choices": ["a"], "gold": 1},
            "answer 1 is not one of 0 to 0",
        ),
        ("winogrande", {**WINOGRANDE, "sentence": "It ends."}, "the sentence has no _"),
        ("winogrande", {**WINOGRANDE, "answer": ""}, "is not a row of winogrande"),
        (
            "hellaswag",
            {"activity_label": "a", "ctx_a": "b", "ctx_b": "c"},
            "has no field 'endings'",
        ),
    ],
)
def test_an_invalid_row_is_an_error_that_names_its_line(task, row, named, tmp_path):
    path = write(tmp_path / "file.jsonl", row)
    with pytest.raises(DataError) as error:
        list(read_rows(BENCHMARKS[task], path))
    assert named in str(error.value)
    assert str(path) in str(error.value)


def test_empty_and_invalid_files_are_refused(tmp_path):
    path = tmp_path / "piqa.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        list(read_rows(BENCHMARKS["piqa"], path))
    path.write_text("not JSON\n")
    with pytest.raises(DataError, match="line 1 is not a row of piqa"):
        list(read_rows(BENCHMARKS["piqa"], path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        list(read_rows(BENCHMARKS["piqa"], path))
