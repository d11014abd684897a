"""Datasets by name, streamed: real ones of the `datasets` library, made on the spot."""

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


def test_a_dataset_with_training_rows_alone_has_five_percent_held_out(tmp_path):
    """As OpenWebText, which has no split but `train`."""
    folder = tmp_path / "web"
    folder.mkdir()
    for half, rows in enumerate((ROWS[:500], ROWS[500:])):
        Dataset.from_dict({"text": rows}).to_parquet(folder / f"train-0000{half}-of-00002.parquet")
    corpus = run(f"datasets:{folder}", tmp_path / "out")
    train, held_out = texts(corpus, "train"), texts(corpus, "validation")
    assert train == [row for row in ROWS if row not in set(held_out)]
    assert 25 <= len(held_out) <= 75
    assert set(train) | set(held_out) == set(ROWS)


def test_a_dataset_keeps_the_splits_it_has(tmp_path):
    """As the Pile; here saved by `save_to_disk`, which is read without a copy in memory."""
    parts = {"train": ROWS[:800], "validation": ROWS[800:900], "test": ROWS[900:]}
    DatasetDict(
        {split: Dataset.from_dict({"body": rows}) for split, rows in parts.items()}
    ).save_to_disk(tmp_path / "pile")
    corpus = run(f"datasets:{tmp_path / 'pile'}", tmp_path / "out", text_field="body")
    assert {split: texts(corpus, split) for split in corpus.splits} == parts


def test_a_subset_is_chosen_by_its_name(tmp_path):
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


def test_what_cannot_be_found_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"dataset .*no-such was not found") as raised:
        run(f"datasets:{tmp_path}/no-such", tmp_path / "out")
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match=r"no .*/missing.txt \(pass"):
        run(str(tmp_path / "missing.txt"), tmp_path / "out")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="--subset x is for datasets"):
        run(str(tmp_path / "a.txt"), tmp_path / "out", subset="x")
