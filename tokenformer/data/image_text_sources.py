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
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

from tokenformer.data.image_sources import (
    HELD_OUT,
    SPLIT_SEED,
    check_images,
    is_image,
    parquet_files,
    read_parquet,
    subfolders,
)
from tokenformer.data.image_text import (
    CAPTION_COLUMNS,
    CHAT_COLUMNS,
    IMAGE_COLUMNS,
    ImageTextSet,
    SubsetImageText,
    as_list,
)
from tokenformer.data.images import check_policy
from tokenformer.data.order import shuffled_indices
from tokenformer.data.sources import DATASET_NAME, DATASETS_PREFIX
from tokenformer.errors import DataError, one_line
from tokenformer.paths import check_hub, exists, expand_user, is_local

SPLITS = ("train", *HELD_OUT)
LOOKED_AT = 1000
"""Rows of a file that are looked at for an image. Mixes have rows without one."""
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
        name: ImageTextSet(str(file), JsonLines(file), folder, on_corrupt)
        for name, file in files.items()
        if file.is_file()
    }


class JsonLines(Sequence[dict[str, Any]]):
    """The rows of a file of JSON lines, which are parsed when they are read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.places: list[tuple[int, int, int]] = []
        """Offset, size and line number of every row."""
        columns: dict[str, None] = {}  # rows may lack some
        try:
            self.stream = file.open("rb")
            offset = 0
            for number, line in enumerate(self.stream, 1):
                if line.strip():
                    self.places.append((offset, len(line), number))
                    columns |= dict.fromkeys(self.parse(line, number))
                offset += len(line)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {one_line(error)}") from None
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        offset, size, number = self.places[row]
        return self.parse(os.pread(self.stream.fileno(), size, offset), number)  # in any thread

    def parse(self, line: bytes, number: int) -> dict[str, Any]:
        name = f"{self.file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{name} is not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name} cannot be read: {one_line(error)}") from None
        if not isinstance(row, dict):
            raise DataError(f"{name} is not a JSON object")
        return row


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


def holds_image_text(source: str) -> bool:
    """Whether a source is images with text rather than a text corpus, by its files and the first of
    their rows."""
    path = expand_user(source)
    if not exists(path):
        return dataset_holds_image_text(source)
    if path.is_file():
        return file_holds_image_text(path)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return any(is_feature_of_images(each) for each in saved_features(path))
    files = [Path(file) for several in parquet_files(path).values() for file in several]
    files = files or [path / f"{split}.jsonl" for split in SPLITS]
    if any(file_holds_image_text(file) for file in files if file.is_file()):
        return True
    images, texts, other = 0, 0, None
    for file in path.rglob("*"):
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        if is_image(file.relative_to(path), path):
            images += file.with_suffix(".txt").is_file()
        elif file.suffix.lower() == ".txt":
            texts += 1
        elif file.suffix.lower() in (".jsonl", ".ndjson", ".parquet"):
            other = min(other or file, file)
    if 2 * images > texts:
        return True
    if other is not None and other not in files and file_holds_image_text(other):
        raise DataError(
            f"{other} holds images; call it train{other.suffix} in {source}, or prepare the file"
        )
    return False


def file_holds_image_text(file: Path) -> bool:
    """Whether one of the first rows of a file has an image and text; False if it has none."""
    read = {".jsonl": json_rows, ".ndjson": json_rows, ".parquet": parquet_rows}
    if file.suffix.lower() not in read:
        return False
    try:
        return any(is_image_text(row) for row in read[file.suffix.lower()](file))
    except (OSError, ValueError, RecursionError):  # the corpus reader says what is wrong
        return False


def json_rows(file: Path) -> Iterator[Any]:
    with file.open("rb") as lines:
        for line in islice(lines, LOOKED_AT):
            if line.strip():
                yield json.loads(line)


def parquet_rows(file: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as table:
        known = (*IMAGE_COLUMNS, *CAPTION_COLUMNS, *CHAT_COLUMNS)
        names = [name for name in table.schema_arrow.names if name in known]
        if not set(names) & set(IMAGE_COLUMNS):
            return
        for batch in islice(table.iter_batches(10, columns=names), LOOKED_AT // 10):
            yield from batch.to_pylist()


def is_image_text(row: Any) -> bool:
    if not isinstance(row, dict) or not row.keys() & {*CAPTION_COLUMNS, *CHAT_COLUMNS}:
        return False
    images = (each for name in IMAGE_COLUMNS for each in as_list(row.get(name)))
    return any(is_stored_image(each) for each in images)


def is_stored_image(value: Any) -> bool:
    """Whether a value is an image and not metadata of a text, such as the address of one."""
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes) or is_stored_image(value.get("path"))
    is_path = isinstance(value, str) and value and "://" not in value
    return bool(is_path) or isinstance(value, bytes)


def saved_features(folder: Path) -> list[Any]:
    """Return the features of every split of a saved dataset."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception:  # the corpus reader says what is wrong
        return []
    return [each.features for each in (found.values() if isinstance(found, dict) else [found])]


def dataset_holds_image_text(source: str) -> bool:
    """Whether a dataset on the hub has a column of images and one of text."""
    name = source.removeprefix(DATASETS_PREFIX)
    if is_local(name) or Path(name).suffix or not DATASET_NAME.fullmatch(name):
        return False
    check_hub(name, "dataset")
    import datasets

    try:
        features = datasets.load_dataset_builder(name).info.features
    except Exception:  # the corpus reader says what is wrong
        return False
    return features is not None and is_feature_of_images(features)


def is_feature_of_images(features: Any) -> bool:
    import datasets

    images = [features[name] for name in IMAGE_COLUMNS if name in features]
    has_text = any(name in features for name in (*CAPTION_COLUMNS, *CHAT_COLUMNS))
    return has_text and any(
        isinstance(getattr(each, "feature", each), datasets.Image) for each in images
    )
