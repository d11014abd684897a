"""Streaming datasets of the `datasets` library, created by the tests."""

import json

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.errors import DataError

ROWS = [f"row {number} of a web page\n" for number in range(1000)]


def run(corpus, out, **options) -> Corpus:
    prepare(PrepareOptions(corpus=corpus, **options), out)
    return Corpus(out)


def texts(corpus: Corpus, split: str) -> list[str]:
    ids = corpus.split(split)[:]
    return bytes(np.where(ids == 256, 0, ids).astype(np.uint8)).decode().split("\0")[:-1]


def test_five_percent_of_a_dataset_without_validation_split_are_held_out(tmp_path):
    """Like OpenWebText, which has only a training split."""
    folder = tmp_path / "web"
    folder.mkdir()
    for half, rows in enumerate((ROWS[:500], ROWS[500:])):
        Dataset.from_dict({"text": rows}).to_parquet(folder / f"train-0000{half}-of-00002.parquet")
    corpus = run(f"datasets:{folder}", tmp_path / "out")
    train, held_out = texts(corpus, "train"), texts(corpus, "validation")
    assert train == [row for row in ROWS if row not in set(held_out)]
    assert 25 <= len(held_out) <= 75
    assert set(train) | set(held_out) == set(ROWS)


def test_the_splits_of_a_dataset_are_kept(tmp_path):
    """Like the Pile; `save_to_disk` datasets are memory-mapped."""
    parts = {"train": ROWS[:800], "validation": ROWS[800:900], "test": ROWS[900:]}
    DatasetDict(
        {split: Dataset.from_dict({"body": rows}) for split, rows in parts.items()}
    ).save_to_disk(tmp_path / "pile")
    corpus = run(f"datasets:{tmp_path / 'pile'}", tmp_path / "out", text_field="body")
    assert {split: texts(corpus, split) for split in corpus.splits} == parts


def test_a_subset_is_selected_by_name(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("one", "two")]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    corpus = run(f"datasets:{folder}", tmp_path / "out", subset="two", validation=0)
    assert texts(corpus, "train") == ["two"]
    with pytest.raises(DataError, match=r"cannot be opened: .*one.*two"):
        run(f"datasets:{folder}", tmp_path / "other")


def test_a_missing_corpus_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"dataset .*no-such was not found") as raised:
        run(f"datasets:{tmp_path}/no-such", tmp_path / "out")
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match=r"no .*/missing.txt \(pass"):
        run(str(tmp_path / "missing.txt"), tmp_path / "out")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="--subset x is for datasets"):
        run(str(tmp_path / "a.txt"), tmp_path / "out", subset="x")
