"""Loads images with captions or conversations from a source, given by name or path.

| source                              | found by                                                 |
|-------------------------------------|----------------------------------------------------------|
| a folder of parquet files           | `train.parquet` or `train-*.parquet`, `validation...`    |
| a folder of JSON lines              | `train.jsonl`, `validation.jsonl`, ...; image paths are  |
|                                     | relative to the folder                                   |
| a folder of images and text files   | `train/NAME.jpg` with `train/NAME.txt`, a caption a line |
| a Hugging Face dataset              | a folder made by `save_to_disk`, or a name on the hub    |

A table has a column of images and one of captions or conversations; see `image_text.Columns`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenformer.data.image_sources import (
    HELD_OUT,
    SPLIT_SEED,
    check_images,
    is_image,
    parquet_files,
    read_parquet,
    subfolders,
)
from tokenformer.data.image_text import ImageTextSet, SubsetImageText
from tokenformer.data.images import check_policy
from tokenformer.data.order import shuffled_indices
from tokenformer.errors import DataError, one_line
from tokenformer.paths import expand_user, is_local

SPLITS = ("train", *HELD_OUT)
AnyImageText = ImageTextSet | SubsetImageText


@dataclass(frozen=True)
class ImageTextSplits:
    train: AnyImageText
    held_out: AnyImageText | None


def load_image_text(
    source: str, *, held_out_share: float = 0.1, on_corrupt: str = "refuse"
) -> ImageTextSplits:
    """Load both splits of a source. Without a held-out split, `held_out_share` of the training
    images is held out, always the same ones, with all their rows; 0 holds out none."""
    splits = image_text_splits(source, on_corrupt)
    if "train" not in splits:
        raise DataError(f"{source} has no split train; it has {', '.join(splits)}")
    train = splits["train"]
    for name in HELD_OUT:
        if name in splits:
            return ImageTextSplits(train, splits[name])
    if held_out_share == 0:
        return ImageTextSplits(train, None)
    kept, held_out = split_groups(train.groups(), held_out_share)
    return ImageTextSplits(SubsetImageText(train, kept), SubsetImageText(train, held_out))


def split_groups(
    groups: list[list[int]], share: float, seed: int = SPLIT_SEED
) -> tuple[list[int], list[int]]:
    """Return the rows to train on and those to hold out, a random share of the groups."""
    if not 0 < share < 1:
        raise DataError(f"held_out_share={share} must be between 0 and 1")
    order = shuffled_indices(len(groups), seed, 0, len(groups)).tolist()
    count = max(1, round(share * len(groups)))
    if count >= len(groups):
        raise DataError(f"{count_images(len(groups))} too few to hold some out")
    kept, held_out = (
        sorted(row for group in numbers for row in groups[group])
        for numbers in (order[count:], order[:count])
    )
    return kept, held_out


def count_images(count: int) -> str:
    return "1 image is" if count == 1 else f"{count} images are"


def load_captions(source: str, on_corrupt: str = "refuse") -> tuple[ImageTextSet, str]:
    """Load the images to evaluate on and the name of their split: the held-out split, else all."""
    splits = image_text_splits(source, on_corrupt)
    for name in (*HELD_OUT, *splits):
        if name in splits:
            return splits[name], name
    raise DataError(f"{source} has no images")


def image_text_splits(source: str, on_corrupt: str = "refuse") -> dict[str, ImageTextSet]:
    check_policy(on_corrupt)
    check_images(source)
    if not is_local(source):
        return dataset_splits(source, lambda datasets: datasets.load_dataset(source), on_corrupt)
    folder = expand_user(source)
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return dataset_splits(
            source, lambda datasets: datasets.load_from_disk(str(folder)), on_corrupt
        )
    for read_splits in (parquet_splits, jsonl_splits, file_splits):
        if splits := read_splits(folder, on_corrupt):
            return splits
    raise DataError(
        f"{folder} has no images with text: no train.parquet, train.jsonl, images with text files "
        "of the same name, or saved dataset"
    )


def dataset_splits(
    name: str, load: Callable[[Any], Any], on_corrupt: str, folder: Path | None = None
) -> dict[str, ImageTextSet]:
    import datasets

    try:
        found = load(datasets)
    except Exception as error:  # anything the hub, the disk or a loader raises
        raise DataError(f"{name} cannot be read as a dataset: {one_line(error)}") from None
    by_split = dict(found) if isinstance(found, dict) else {"train": found}
    splits = {}
    for split, rows in by_split.items():
        for column, feature in rows.features.items():
            if isinstance(feature, datasets.Image):  # decoded here, after a check of its size
                rows = rows.cast_column(column, datasets.Image(decode=False))
            inner = getattr(feature, "feature", None)
            if isinstance(inner, datasets.Image):
                rows = rows.cast_column(column, datasets.List(datasets.Image(decode=False)))
        splits[split] = ImageTextSet(f"{name} ({split})", rows, folder, on_corrupt)
    return splits


def parquet_splits(folder: Path, on_corrupt: str) -> dict[str, ImageTextSet]:
    files = parquet_files(folder)
    if not files:
        return {}
    return dataset_splits(str(folder), lambda _: read_parquet(files), on_corrupt, folder)


def jsonl_splits(folder: Path, on_corrupt: str) -> dict[str, ImageTextSet]:
    files = {name: folder / f"{name}.jsonl" for name in SPLITS}
    return {
        name: ImageTextSet(str(file), read_lines(file), folder, on_corrupt)
        for name, file in files.items()
        if file.is_file()
    }


def read_lines(file: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{file}, line {number} is not JSON: {error.msg} at column {error.colno}"
                    ) from None
                if not isinstance(row, dict):
                    raise DataError(f"{file}, line {number} is not a JSON object")
                rows.append(row)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read: {one_line(error)}") from None
    return rows


def file_splits(folder: Path, on_corrupt: str) -> dict[str, ImageTextSet]:
    """Read images with text files of the same name, in folders by split or in one folder."""
    inside = {path.name: path for path in subfolders(folder) if path.name in SPLITS}
    homes = inside or {"train": folder}
    splits = {}
    for name, home in homes.items():
        rows = list(read_pairs(home))
        if rows:
            splits[name] = ImageTextSet(str(home), rows, home, on_corrupt)
    return splits


def read_pairs(home: Path) -> Any:
    for path in sorted(home.rglob("*")):
        text = path.with_suffix(".txt")
        if is_image(path.relative_to(home), home) and text.is_file():
            try:
                lines = text.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{text} cannot be read: {one_line(error)}") from None
            captions = [line.strip() for line in lines if line.strip()]
            yield {"image": str(path.relative_to(home)), "captions": captions}
