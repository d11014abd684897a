"""Preparing images with text: what is written, what training reads of it, and bad input."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from pyarrow.parquet import ParquetFile

from tests.data.test_image_text import CHAT, LLAVA, jsonl, save_pictures, write_lines
from tests.support.image_text import pictures
from tests.support.processes import LIMIT, started, wait_until
from tokenformer.cli import main
from tokenformer.data import image_text_preparation
from tokenformer.data.image_text import Turn
from tokenformer.data.image_text_preparation import ImageTextPreparation, prepare_image_text
from tokenformer.data.image_text_sources import holds_image_text, load_image_text
from tokenformer.models.image_processing import TokenformerImageProcessor


def pairs(folder: Path) -> str:
    for name in save_pictures(folder, 10):
        (folder / name).with_suffix(".txt").write_text("one\ntwo\n")
    return str(folder)


def chats(folder: Path) -> str:
    """A file whose first rows have no image, as in mixes."""
    jsonl(folder, {"messages": CHAT}, 10)
    alone = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    lines = (folder / "train.jsonl").read_text()
    (folder / "mix.jsonl").write_text(json.dumps({"messages": alone}) + "\n" + lines)
    (folder / "train.jsonl").unlink()
    return str(folder / "mix.jsonl")


def parquet(folder: Path) -> str:
    folder.mkdir()
    images = [{"bytes": Path(folder, name).read_bytes(), "path": name}
              for name in save_pictures(folder, 10)]  # fmt: skip
    rows = datasets.Dataset.from_dict({"image": images, "caption": list("abcdefghij")})
    rows.to_parquet(folder / "train.parquet")
    return str(folder)


def saved(folder: Path) -> str:
    features = {"images": datasets.List(datasets.Image()), "text": datasets.Value("string")}
    rows = {"images": [[each] for each in pictures(10)], "text": list("abcdefghij")}
    found = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    datasets.DatasetDict({"train": found}).save_to_disk(folder)
    return str(folder)


def prepare(*arguments: Any) -> None:
    main(["prepare", *map(str, arguments)])


def fails(capsys: Any, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as end:
        prepare(*arguments)
    assert end.value.code == 2
    return str(capsys.readouterr().err)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def samples(found: Any) -> list[tuple[list[Turn], list[bytes]]]:
    made = (found.sample(index) for index in range(len(found)))
    return [(each.turns, [image.tobytes() for image in each.images]) for each in made]


@pytest.mark.parametrize("make", [pairs, chats, parquet, saved])
def test_every_source_trains_as_before(
    make: Callable[[Path], str], tmp_path: Path, capsys: Any
) -> None:
    """The same samples in both splits as training holds out by itself."""
    source, out = make(tmp_path / "source"), tmp_path / "out"
    prepare(source, "--out", out)
    assert f"Saved to {out}" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["train.parquet", "validation.parquet"]
    if source.endswith(".jsonl"):
        Path(source).rename(tmp_path / "source" / "train.jsonl")
        source = str(tmp_path / "source")
    before, after = load_image_text(source), load_image_text(str(out))
    assert samples(after.train) == samples(before.train)
    assert samples(after.held_out) == samples(before.held_out)


def test_rows_of_an_image_are_held_out_together_and_captions_merged(
    tmp_path: Path, capsys: Any
) -> None:
    names = save_pictures(tmp_path / "images", 10)
    copy = tmp_path / "images" / "copy.png"
    copy.write_bytes((tmp_path / "images" / names[0]).read_bytes())
    rows = [{"image": f"images/{name}", "caption": f"{name} {n}"} for n in "ab" for name in names]
    rows += [{"image": "images/copy.png", "caption": "copy"}, {"caption": "none"}, {"caption": "x"}]
    write_lines(tmp_path / "train.jsonl", rows)
    out = tmp_path / "out"
    prepare(tmp_path, "--out", tmp_path / ".." / f"{tmp_path.name}-out", "--json")
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    found = json.loads(capsys.readouterr().out)["splits"]
    assert found["train"]["rows"] + found["validation"]["rows"] == 12
    splits = load_image_text(str(out))
    assert (len(splits.train), len(splits.held_out or [])) == (
        found["train"]["samples"], found["validation"]["samples"],
    )  # fmt: skip
    merged = ParquetFile(out / "train.parquet").read().to_pylist()
    assert ["0.png a", "0.png b", "copy"] in [row["captions"] for row in merged]
    assert [row["captions"] for row in merged if row["image"] is None] == [["none"], ["x"]]
    both = [{row["image"]["bytes"] for row in ParquetFile(file).read().to_pylist() if row["image"]}
            for file in sorted(out.iterdir())]  # fmt: skip
    assert not both[0] & both[1]


def test_fitted_images_give_training_the_same_values(tmp_path: Path) -> None:
    folder = jsonl(tmp_path / "source", {"conversations": LLAVA}, 6)
    Image.new("RGB", (4, 8), "red").save(folder / "images" / "0.png")  # small ones are kept
    Image.new("L", (40, 8), 77).save(folder / "images" / "1.png")
    out = tmp_path / "out"
    prepare(folder, "--out", out, "--image_size", 8, "--validation", 0)
    assert [path.name for path in out.iterdir()] == ["train.parquet"]
    processor = TokenformerImageProcessor.for_size(8)
    before, after = (load_image_text(str(each), held_out_share=0).train for each in (folder, out))
    for index in range(6):
        images = [each.sample(index).images[0] for each in (before, after)]
        assert max(images[1].shape[:2]) == 8
        values = [processor(images=image)["pixel_values"][0] for image in images]
        np.testing.assert_array_equal(*values)
    rows = ParquetFile(out / "train.parquet").read().to_pylist()
    assert rows[0]["image"]["bytes"] == (folder / "images" / "0.png").read_bytes()


def test_the_result_depends_on_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    """Not on the number of threads; files are of bounded size."""
    monkeypatch.setattr(image_text_preparation, "GROUP_ROWS", 2)
    monkeypatch.setattr(image_text_preparation, "SHARD_BYTES", 5000)
    folder = str(jsonl(tmp_path / "source", {"messages": CHAT}, 20))
    found = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        report = prepare_image_text(ImageTextPreparation(folder), out, workers=workers)
        found.append(contents(out))
        assert report["splits"]["train"]["files"] == 5
    assert found[0] == found[1]
    assert "train-00004-of-00005.parquet" in found[0]
    assert samples(load_image_text(str(out)).train) == samples(load_image_text(folder).train)
    prepare_image_text(ImageTextPreparation(folder, seed=1), tmp_path / "other")
    assert contents(tmp_path / "other") != found[0]


def test_splits_of_the_source_are_kept(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "source"
    names = save_pictures(folder, 4)
    for split, chosen in (("train", names[:3]), ("val", names[2:]), ("test", names[3:])):
        write_lines(folder / f"{split}.jsonl", [{"image": n, "caption": "a"} for n in chosen])
    prepare(folder, "--out", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "1 images of validation are in train too" in printed
    assert "test: 1 images, 1 samples" in printed
    assert len(load_image_text(str(tmp_path / "out")).held_out or []) == 2
    message = fails(capsys, folder, "--out", tmp_path / "a", "--validation", 0.1)
    assert "has a held-out split of its own" in message


@pytest.mark.parametrize("damage", ["broken", "missing", "truncated"])
def test_corrupt_images_follow_the_policy(damage: str, tmp_path: Path, capsys: Any) -> None:
    folder = jsonl(tmp_path / "source", {"captions": ["a", "b"]}, 5)
    bad = folder / "images" / "1.png"
    if damage == "missing":
        bad.unlink()
    else:
        bad.write_bytes(b"x" if damage == "broken" else bad.read_bytes()[:-200])
    out = tmp_path / "out"
    message = fails(capsys, folder, "--out", out, "--validation", 0)
    assert "image images/1.png of row 1 of" in message
    assert list(tmp_path.iterdir()) == [folder]  # nothing is left
    prepare(folder, "--out", out, "--validation", 0, "--on_corrupt", "skip")
    assert "train: 4 images, 8 samples" in (printed := capsys.readouterr().out)
    assert "1 rows skipped" in printed
    assert len(load_image_text(str(out), held_out_share=0).train) == 8


def open_read(pipe: Path) -> int | None:
    """Open a named pipe that a process has opened to read; None if none has."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    folder, out = jsonl(tmp_path / "source", {"caption": "a"}, 4), tmp_path / "out"
    os.mkfifo(folder / "images" / "x.png")  # reading waits for a writer
    with (folder / "train.jsonl").open("a") as lines:
        lines.write(json.dumps({"image": "images/x.png", "caption": "a"}) + "\n")
    command = [sys.executable, "-m", "tokenformer", "prepare", str(folder), "--out", str(out)]
    with started(command) as process:
        writers: list[int] = []

        def is_read() -> bool:
            writers.extend(filter(None, [open_read(folder / "images" / "x.png")]))
            return bool(writers)

        assert wait_until(is_read, process)
        assert list(tmp_path.glob(".out.unfinished-*"))
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
        os.close(writers[0])
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == [folder]


def test_text_stays_text(tmp_path: Path) -> None:
    """Metadata about images, a few pictures among texts, and chats."""
    write_lines(tmp_path / "train.jsonl", [{"text": "a", "image": "https://host/a.png"}])
    assert not holds_image_text(str(tmp_path))
    write_lines(tmp_path / "train.jsonl", [{"messages": CHAT}])
    assert not holds_image_text(str(tmp_path / "train.jsonl"))
    save_pictures(tmp_path / "book", 1)
    for name in range(5):
        (tmp_path / "book" / f"{name}.txt").write_text("text")
    assert not holds_image_text(str(tmp_path / "book"))
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "book" / "train.parquet")
    assert not holds_image_text(str(tmp_path / "book"))
    assert not holds_image_text(str(tmp_path / "missing"))


def test_a_dataset_on_the_hub_is_known_by_its_features(monkeypatch: Any) -> None:
    class Builder:
        def __init__(self, image: Any) -> None:
            features = {"image": image, "caption": datasets.Value("string")}
            self.info = datasets.DatasetInfo(features=datasets.Features(features))

    monkeypatch.setattr("tokenformer.data.image_text_sources.check_hub", lambda *names: None)
    for image, wanted in ((datasets.Image(), True), (datasets.Value("string"), False)):
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, i=image: Builder(i))
        assert holds_image_text("owner/name") == holds_image_text("datasets:name") == wanted


def test_bad_input_is_one_line(tmp_path: Path, capsys: Any) -> None:
    folder = jsonl(tmp_path / "source", {"caption": "a"}, 3)
    out = ["--out", tmp_path / "out"]
    assert "--tokenizer bpe does not apply" in fails(capsys, folder, *out, "--tokenizer", "bpe")
    assert "--encoding raw does not apply" in fails(capsys, folder, *out, "--encoding", "raw")
    assert "--image_size 0 must be" in fails(capsys, folder, *out, "--image_size", 0)
    assert "--validation 1.0 must be" in fails(capsys, folder, *out, "--validation", 1)
    assert "is inside" in fails(capsys, folder, "--out", folder / "out")
    (tmp_path / "text.txt").write_text("text")
    message = fails(capsys, tmp_path / "text.txt", *out, "--on_corrupt", "skip")
    assert "--on_corrupt skip does not apply" in message
    assert "holds no images with text" in message
    (folder / "train.jsonl").rename(folder / "mine.jsonl")
    assert "call it train.jsonl" in fails(capsys, folder, *out)
    write_lines(folder / "train.jsonl", [{"image": "images/0.png", "caption": "a"}])
    message = fails(capsys, folder, *out)
    assert "1 image is too few to hold some out; with --validation 0 none are" in message
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("")
    assert "already exists" in fails(capsys, folder, *out, "--validation", 0)
