"""Loads the training and held-out images of a source, given by name or path.

| source                              | found by                                                |
|-------------------------------------|---------------------------------------------------------|
| `digits`                            | the name: scikit-learn's 1,797 digits, no download      |
| a folder of IDX files               | `train-images-idx3-ubyte`, ..., gzipped or not          |
| a folder of CIFAR's binary files    | `data_batch_1.bin`, ..., or `train.bin` and `test.bin`  |
| a folder of folders of images       | `train/CLASS/*.jpg` and `val/CLASS/...`, as ImageNet's  |
| a folder of parquet files           | `train.parquet` or `train-*.parquet`, `validation...`   |
| a Hugging Face dataset              | a folder made by `save_to_disk`, or a name on the hub   |
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer.data.image_formats import cifar_images, idx_images, read_bytes
from tokenformer.data.images import (
    ArrayImages,
    DatasetImages,
    FileImages,
    ImageSet,
    SubsetImages,
    check_policy,
)
from tokenformer.data.order import shuffled_indices
from tokenformer.errors import DataError, one_line
from tokenformer.installation import install_hint
from tokenformer.paths import (
    NameNotFoundError,
    check_hub,
    exists,
    expand_user,
    is_local,
    missing_message,
)

DIGITS = "digits"
HELD_OUT = ("val", "validation", "valid", "test")
"""Names of the held-out split, by priority."""
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
FASHION = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
SPLIT_SEED = 0
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class ImageSplits:
    train: ImageSet
    held_out: ImageSet

    @property
    def classes(self) -> list[str]:
        return self.train.classes


def load_images(
    source: str, *, held_out_share: float = HELD_OUT_SHARE, on_corrupt: str = "refuse"
) -> ImageSplits:
    """Load both splits of a source. Without a held-out split, `held_out_share` of the training
    images is held out, always the same ones."""
    splits = all_splits(source, on_corrupt)
    if "train" not in splits:
        raise DataError(f"{source} has no split `train`; it has {', '.join(splits)}")
    train = splits["train"]
    for name in HELD_OUT:
        if name in splits:
            known, found = train.classes, splits[name].classes
            if found != known[: len(found)]:  # the last classes may be missing
                raise DataError(f"{source} has other classes in {name} than in train")
            return ImageSplits(train, splits[name])
    return split_set(train, held_out_share)


def load_test_images(source: str, on_corrupt: str = "refuse") -> tuple[ImageSet, str]:
    """Load the images to evaluate on and the name of their split: the held-out split, for `digits`
    the images that training holds out, else all images."""
    splits = all_splits(source, on_corrupt)
    if source == DIGITS:
        return split_set(splits["train"], HELD_OUT_SHARE).held_out, "held out"
    for name in (*HELD_OUT, *splits):
        if name in splits:
            return splits[name], name
    raise DataError(f"{source} has no images")


def image_splits(source: str, on_corrupt: str = "refuse") -> dict[str, ImageSet]:
    """Load all splits of a source by name. Without a held-out split, `validation` is the share that
    `load_images` holds out."""
    splits = all_splits(source, on_corrupt)
    if "train" not in splits or any(name in splits for name in HELD_OUT):
        return splits
    found = split_set(splits["train"], HELD_OUT_SHARE)
    return {**splits, "train": found.train, "validation": found.held_out}


def check_images(source: str) -> None:
    """Raise an error unless a source is a local folder or a dataset on the hub."""
    reason = ""
    if source == DIGITS:
        return
    if not is_local(source):
        try:
            check_hub(source, "dataset")
        except NameNotFoundError as error:
            reason = str(error)
    elif not exists(expand_user(source)):
        reason = missing_message(source)
    elif not expand_user(source).is_dir():
        reason = "it is a file; give its folder"
    if reason:
        raise DataError(f"images {source} are neither a folder nor a dataset: {reason}")


def all_splits(source: str, on_corrupt: str) -> dict[str, ImageSet]:
    check_policy(on_corrupt)
    check_images(source)
    folder = expand_user(source)
    if source == DIGITS:
        return {"train": digits()}
    if not is_local(source):
        return dataset_splits(source, on_corrupt)
    for read_splits in (idx_splits, cifar_splits, saved_splits, parquet_splits, folder_splits):
        if splits := read_splits(folder, on_corrupt):
            return splits
    raise DataError(
        f"{folder} has no images: no IDX or CIFAR files, no folders of images by class, "
        "no parquet files or saved dataset"
    )


def split_set(whole: ImageSet, share: float) -> ImageSplits:
    """Hold out a fixed random share of a set."""
    if not 0 < share < 1:
        raise DataError(f"held_out_share={share} must be between 0 and 1")
    order = shuffled_indices(len(whole), SPLIT_SEED, 0, len(whole)).tolist()
    held_out = max(1, round(share * len(whole)))
    if held_out >= len(whole):
        raise DataError(f"{len(whole)} images are too few to hold some out")
    return ImageSplits(
        SubsetImages(whole, sorted(order[held_out:])), SubsetImages(whole, sorted(order[:held_out]))
    )


def digits() -> ArrayImages:
    """scikit-learn's handwritten digits, 8 x 8, in 17 shades of grey."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"the digits come with scikit-learn: {install_hint('vision')}") from None
    found = load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)
    return ArrayImages(pixels[..., None], found.target)


def idx_splits(folder: Path, on_corrupt: str) -> dict[str, ImageSet]:
    splits: dict[str, ImageSet] = {}
    names = FASHION if "fashion" in folder.resolve().name.lower() else None
    for split, prefix in (("train", "train"), ("test", "t10k")):
        files = [
            next(iter(sorted(folder.glob(f"{prefix}-{what}[.-]idx*-ubyte*"))), None)
            for what in ("images", "labels")
        ]
        if files[0] is not None and files[1] is not None:
            splits[split] = idx_images(files[0], files[1], names)
        elif any(files):
            raise DataError(f"{folder} lacks the images or the labels of {prefix}")
    return splits


def cifar_splits(folder: Path, on_corrupt: str) -> dict[str, ImageSet]:
    batches: dict[str, list[Any]] = {
        "train": sorted(folder.glob("data_batch_*.bin")),
        "test": ["test_batch.bin"],
    }
    names = "batches.meta.txt"
    if not batches["train"]:
        if not (folder / "train.bin").exists():
            return {}
        batches, names = {"train": ["train.bin"], "test": ["test.bin"]}, "fine_label_names.txt"
    classes = read_bytes(folder / names).decode("utf-8", "replace").split()
    found = {split: [folder / file for file in files] for split, files in batches.items()}
    return {
        split: cifar_images(files, classes) for split, files in found.items() if files[0].exists()
    }


def saved_splits(folder: Path, on_corrupt: str) -> dict[str, ImageSet]:
    """Read a dataset saved by `datasets`."""
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        import datasets

        return read_dataset(str(folder), lambda: datasets.load_from_disk(str(folder)), on_corrupt)
    return {}


def parquet_splits(folder: Path, on_corrupt: str) -> dict[str, ImageSet]:
    files = parquet_files(folder)
    if not files:
        return {}
    return read_dataset(str(folder), lambda: read_parquet(files), on_corrupt)


def read_parquet(files: dict[str, list[str]]) -> dict[str, Any]:
    """Read the parquet files of each split as Hugging Face datasets."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()  # local files take a second
    try:
        return {
            split: datasets.load_dataset("parquet", data_files=paths, split="train")
            for split, paths in files.items()
        }
    finally:
        if shown:
            datasets.enable_progress_bars()


def parquet_files(folder: Path) -> dict[str, list[str]]:
    """Return the parquet files of each split, named as `train.parquet` or `train-00000.parquet`."""
    found = {
        split: sorted(str(path) for path in folder.glob(f"{split}[.-]*parquet"))
        for split in ("train", *HELD_OUT)
    }
    return {split: paths for split, paths in found.items() if paths}


def dataset_splits(name: str, on_corrupt: str) -> dict[str, ImageSet]:
    import datasets

    return read_dataset(name, lambda: datasets.load_dataset(name), on_corrupt)


def read_dataset(name: str, load: Callable[[], Any], on_corrupt: str) -> dict[str, ImageSet]:
    try:
        found = load()
    except Exception as error:  # anything the hub, the disk or a loader raises
        reason = one_line(error)
        raise DataError(f"images {name} are neither a folder nor a dataset: {reason}") from None
    rows_by_split = dict(found) if isinstance(found, dict) else {"train": found}
    return {split: read_rows(name, rows, on_corrupt) for split, rows in rows_by_split.items()}


def read_rows(name: str, rows: Any, on_corrupt: str) -> DatasetImages:
    """Find the first column of images and the first of classes by their types."""
    import datasets

    kinds = {column: type(feature) for column, feature in rows.features.items()}
    image = next((c for c, kind in kinds.items() if kind is datasets.Image), None)
    label = next((c for c, kind in kinds.items() if kind is datasets.ClassLabel), None)
    label = label or next((c for c in ("label", "labels", "fine_label") if c in kinds), None)
    if image is None or label is None:
        raise DataError(
            f"dataset {name} needs an image column and a label column; it has "
            + ", ".join(f"{column} ({kind.__name__})" for column, kind in kinds.items())
        )
    return DatasetImages(rows, image, label, on_corrupt)


def folder_splits(folder: Path, on_corrupt: str) -> dict[str, ImageSet]:
    """Read `train/CLASS/...` and `val/CLASS/...`, one of them, or just `CLASS/...`."""
    inside = {path.name: path for path in subfolders(folder)}
    if "train" not in inside and not set(inside) <= set(HELD_OUT):
        whole = class_folders(folder, on_corrupt)
        return {} if whole is None else {"train": whole}
    found = {
        name: class_folders(inside[name], on_corrupt)
        for name in ("train", *HELD_OUT)
        if name in inside
    }
    splits: dict[str, ImageSet] = {
        name: images for name, images in found.items() if images is not None
    }
    first = next(iter(splits), "")
    for name, pictures in splits.items():
        if pictures.classes != splits[first].classes:
            different = sorted(set(pictures.classes) ^ set(splits[first].classes))
            raise DataError(
                f"{folder / name} has other classes than {first}: {', '.join(different[:5])}"
            )
    return splits


def class_folders(folder: Path, on_corrupt: str) -> FileImages | None:
    """Read a folder with one subfolder per class; classes and files are sorted by name."""
    classes: list[str] = []
    paths: list[Path] = []
    labels: list[int] = []
    for home in subfolders(folder):
        files = sorted(path for path in home.rglob("*") if is_image(path.relative_to(home), home))
        if files:
            paths += files
            labels += [len(classes)] * len(files)
            classes.append(home.name)
    return FileImages(paths, labels, classes, on_corrupt) if paths else None


def subfolders(folder: Path) -> list[Path]:
    """Return the subfolders by name, without hidden ones such as `.ipynb_checkpoints`."""
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def is_image(path: Path, home: Path) -> bool:
    """Whether a path is an image by its suffix. Hidden files, such as `._1.jpg` from macOS, are
    not."""
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden and (home / path).is_file()
