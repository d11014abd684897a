"""Preparing images with text: every image decoded and checked, in parquet files for training.

    prepare_image_text(ImageTextPreparation("llava", image_size=224), Path("data/llava"))

The rows are read twice. The first time finds which show the same image: those are written one after
the other, and of captions become one row. The second time decodes the images and writes them. Only
the digests of images are kept in memory, and a batch of rows. The result depends only on the source
and the settings. The folder appears when all of it is written; an interrupted run leaves nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from tokenformer.data.image_sources import HELD_OUT, read_parquet
from tokenformer.data.image_text import (
    ImageTextSet,
    as_list,
    caption_texts,
    digest,
    group_rows,
    image_key,
    select_column,
)
from tokenformer.data.image_text_sources import (
    JsonLines,
    dataset_splits,
    image_text_splits,
    split_groups,
)
from tokenformer.data.images import CorruptImageError, check_policy, decode
from tokenformer.data.interrupts import reraise_lost_interrupts
from tokenformer.data.preparation import check_outside
from tokenformer.data.sources import DATASETS_PREFIX
from tokenformer.errors import DataError, one_line
from tokenformer.files import new_folder
from tokenformer.models.pixels import Pixels, to_pillow
from tokenformer.paths import exists, expand_user

SHARE = 0.1
"""Of the images to hold out, as `data.held_out_share`."""
VALIDATION, TEST = "validation", "test"
BATCH_ROWS = 32
"""Rows that are decoded at a time."""
GROUP_BYTES = 1 << 26
"""Bytes of images in a row group of a parquet file, which is in memory while it is written."""
GROUP_ROWS = 10_000
SHARD_BYTES = 1 << 29
"""Bytes of images after which a new file begins."""

OnProgress = Callable[[str, int, int], None]
"""Takes what is done with the rows, and how many of how many rows are done."""


@dataclass(frozen=True)
class ImageTextPreparation:
    source: str
    """A folder, a file of JSON lines or parquet, or a dataset; see `image_text_sources`."""
    image_size: int | None = None
    """Larger images are fitted to this many pixels a side, as the processor of a model does it;
    None keeps the bytes of all images."""
    on_corrupt: str = "refuse"
    validation: float | None = None
    """Share of the images to hold out; None is SHARE, unless the source has a held-out split."""
    seed: int = 0
    """Of the choice of images to hold out."""

    def check(self) -> None:
        check_policy(self.on_corrupt)
        if self.image_size is not None and self.image_size < 1:
            raise DataError(f"--image_size {self.image_size} must be at least 1")
        if self.validation is not None and not 0 <= self.validation < 1:
            raise DataError(f"--validation {self.validation} must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise DataError(f"--seed {self.seed} must be from 0 to {2**63 - 1}")


def prepare_image_text(
    options: ImageTextPreparation,
    out: Path,
    *,
    workers: int = 1,
    on_progress: OnProgress = lambda what, done, total: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Write a source to a new folder `out`, and return how much of it there is by split."""
    options.check()
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")
    check_outside(options.source, out)
    with new_folder("--out", out) as folder, reraise_lost_interrupts() as check_interrupt:
        splits = named_splits(options, on_message)
        plans = {
            name: RowPlan.of(rows, name, on_progress, check_interrupt)
            for name, rows in splits.items()
        }
        if len(plans) == 1 and options.validation != 0:
            plans = hold_out(plans["train"], options)
        for name in list(plans)[1:]:
            if shared := len(plans["train"].keys() & plans[name].keys()):
                on_message(f"{shared:,} images of {name} are in train too")
        found = {}
        with ThreadPoolExecutor(workers) as threads:
            for name, plan in plans.items():
                writer = SplitWriter(folder, name, plan, options.image_size)
                try:
                    found[name] = writer.run(threads, on_progress, check_interrupt)
                except OSError as error:  # a full disk; errors of reading are DataErrors
                    reason = error.strerror or one_line(error)
                    raise DataError(f"--out {out} cannot be written: {reason}") from None
    return {"splits": found}


def named_splits(
    options: ImageTextPreparation, on_message: Callable[[str], None]
) -> dict[str, ImageTextSet]:
    """Return the splits to write, by the names they get: train, validation and test."""
    source = options.source.removeprefix(DATASETS_PREFIX)
    file = expand_user(source)
    if not (exists(file) and file.is_file()):
        found = image_text_splits(source, options.on_corrupt)
    elif file.suffix.lower() == ".parquet":
        files = {"train": [str(file)]}
        found = dataset_splits(
            source, lambda _: read_parquet(files), options.on_corrupt, file.parent
        )
    else:
        rows = JsonLines(file)
        found = {"train": ImageTextSet(source, rows, file.parent, options.on_corrupt)}
    if "train" not in found:
        raise DataError(f"{source} has no split train; it has {', '.join(found)}")
    splits = {"train": found.pop("train")}
    for name in HELD_OUT:
        written = TEST if name == TEST else VALIDATION
        if name in found and written not in splits:
            splits[written] = found.pop(name)
    if found:
        on_message(f"left out: {', '.join(found)}")
    if len(splits) > 1 and options.validation is not None:
        raise DataError(
            f"--validation {options.validation} cannot be used: {source} has a held-out split of "
            "its own"
        )
    return splits


@dataclass(frozen=True)
class RowPlan:
    """The rows of a split that have text, and the images that they show."""

    rows: ImageTextSet
    images: list[tuple[Any, ...]]
    """The keys of the images of each row."""
    groups: list[list[int]]
    """Rows that show the same image, in the order in which they are written."""

    @classmethod
    def of(
        cls,
        rows: ImageTextSet,
        name: str,
        on_progress: OnProgress,
        check_interrupt: Callable[[], None],
    ) -> "RowPlan":
        digests: dict[str, bytes] = {}  # of files, by path
        images = []
        for row, found in enumerate(select_column(rows.rows, rows.columns.image)):
            check_interrupt()
            images.append(tuple(content_key(rows, each, digests) for each in rows.images(found)))
            on_progress(f"reading {name}", row + 1, len(rows.rows))
        with_text = {row for row, _ in rows.samples}
        groups = ([row for row in each if row in with_text] for each in group_rows(images))
        return cls(rows, images, [each for each in groups if each])

    def only(self, rows: Sequence[int]) -> "RowPlan":
        chosen = set(rows)
        return RowPlan(self.rows, self.images, [g for g in self.groups if g[0] in chosen])

    def keys(self) -> set[Any]:
        return {key for group in self.groups for row in group for key in self.images[row]}

    def merged(self) -> Iterator[list[int]]:
        """Yield the rows of the source that become one: captions of the same images."""
        for group in self.groups:
            together: dict[Any, list[int]] = {}
            for row in group:
                key = row if self.rows.columns.is_chat else self.images[row] or row
                together.setdefault(key, []).append(row)
            yield from together.values()


def content_key(rows: ImageTextSet, stored: Any, digests: dict[str, bytes]) -> Any:
    """Return what is equal for images of equal bytes. A file that cannot be read has its path."""
    key = image_key(stored)
    if not isinstance(key, str) or key in digests:
        return digests.get(key, key)
    try:
        digests[key] = digest(read_content(rows, stored))
    except (OSError, ValueError):
        return key
    return digests[key]


def read_content(rows: ImageTextSet, stored: Any) -> bytes:
    found = rows.find(stored)
    return found.read_bytes() if isinstance(found, Path) else found.getvalue()


def hold_out(plan: RowPlan, options: ImageTextPreparation) -> dict[str, RowPlan]:
    share = SHARE if options.validation is None else options.validation
    try:
        train, validation = split_groups(plan.groups, share, options.seed)
    except DataError as error:
        raise DataError(f"{error}; with --validation 0 none are held out") from None
    return {"train": plan.only(train), VALIDATION: plan.only(validation)}


class SplitWriter:
    """Writes the rows of a split to parquet files."""

    def __init__(self, folder: Path, name: str, plan: RowPlan, image_size: int | None) -> None:
        import datasets

        self.folder, self.name, self.plan, self.image_size = folder, name, plan, image_size
        self.rows, self.is_chat = plan.rows, plan.rows.columns.is_chat
        self.is_list = any(len(plan.images[row]) > 1 for group in plan.groups for row in group)
        image, text = datasets.Image(), datasets.Value("string")
        messages = datasets.List({"role": text, "content": text})
        self.image_column = "images" if self.is_list else "image"
        self.text_column = "messages" if self.is_chat else "captions"
        self.schema = datasets.Features(
            {
                self.image_column: datasets.List(image) if self.is_list else image,
                self.text_column: messages if self.is_chat else datasets.List(text),
            }
        ).arrow_schema
        self.waiting: list[dict[str, Any]] = []
        """Rows of the next row group."""
        self.waiting_bytes = self.shard_bytes = 0
        self.shard: Any = None
        self.files: list[Path] = []
        self.shown: set[Any] = set()
        self.counts = dict.fromkeys(("rows", "samples", "images", "bytes", "skipped"), 0)

    def run(
        self,
        threads: ThreadPoolExecutor,
        on_progress: OnProgress,
        check_interrupt: Callable[[], None],
    ) -> dict[str, Any]:
        """Write all rows, and return how many of what."""
        merged, done = self.plan.merged(), 0
        total = sum(map(len, self.plan.groups))
        try:
            while batch := list(islice(merged, BATCH_ROWS)):
                for rows, made in zip(batch, threads.map(self.make_row, batch), strict=True):
                    check_interrupt()
                    done += len(rows)
                    self.add(rows, made)
                on_progress(f"writing {self.name}", done, total)
            if not self.counts["rows"]:
                raise DataError(f"{self.rows.name} has no image that can be read")
            self.end_shard()
        finally:
            if self.shard is not None:
                self.shard.close()
        for number, file in enumerate(self.files if len(self.files) > 1 else []):
            file.rename(self.folder / f"{self.name}-{number:05}-of-{len(self.files):05}.parquet")
        return {**self.counts, "files": len(self.files)}

    def make_row(self, rows: list[int]) -> dict[str, Any] | None:
        """Return one row for those of the source, or by the policy None."""
        found = self.rows.rows[rows[0]]
        stored = self.rows.images(found)
        try:
            images = [self.encode(rows[0], each) for each in stored]
        except CorruptImageError as error:
            self.rows.handle(rows[0], error)
            return None
        return {
            self.image_column: images if self.is_list else next(iter(images), None),
            self.text_column: [text for row in rows for text in self.texts(row, len(images))],
        }

    def texts(self, row: int, images: int) -> list[Any]:
        """Return the messages or the captions of a row, checked."""
        found = self.rows.rows[row]
        if self.is_chat:
            turns = self.rows.turns(row, found, 0, images)
            return [{"role": turn.role, "content": turn.text} for turn in turns]
        texts = caption_texts(found.get(self.rows.columns.text))
        for caption in range(len(texts)):
            self.rows.turns(row, found, caption, images)
        return [text.strip() for text in texts]

    def encode(self, row: int, stored: Any) -> dict[str, Any]:
        """Decode an image, and return the bytes to store."""
        from PIL import Image

        content = b""

        def read() -> Any:
            nonlocal content
            content = read_content(self.rows, stored)
            return Image.open(BytesIO(content))

        pixels = decode(self.rows.image_name(row, stored), read)
        if self.image_size is not None and max(pixels.shape[:2]) > self.image_size:
            content = fitted(pixels, self.image_size)
        path = stored.get("path") if isinstance(stored, dict) else stored
        return {"bytes": content, "path": path if isinstance(path, str) else None}

    def add(self, rows: list[int], made: dict[str, Any] | None) -> None:
        if made is None:
            self.counts["skipped"] += len(rows)
            return
        images = as_list(made[self.image_column])
        size = sum(len(image["bytes"]) for image in images)
        self.shown.update(key for row in rows for key in self.plan.images[row])
        self.counts["rows"] += 1
        self.counts["samples"] += 1 if self.is_chat else len(made[self.text_column])
        self.counts["images"] = len(self.shown)
        self.counts["bytes"] += size
        self.waiting.append(made)
        self.waiting_bytes += size
        if self.waiting_bytes >= GROUP_BYTES or len(self.waiting) >= GROUP_ROWS:
            self.write_group()
        if self.shard_bytes >= SHARD_BYTES:
            self.end_shard()

    def write_group(self) -> None:
        from pyarrow import Table
        from pyarrow.parquet import ParquetWriter

        if not self.waiting:
            return
        if self.shard is None:
            number = f"-{len(self.files):05}" if self.files else ""
            self.files.append(self.folder / f"{self.name}{number}.parquet")
            # Images are compressed, and a dictionary would keep them in memory.
            self.shard = ParquetWriter(
                self.files[-1], self.schema, compression="zstd", use_dictionary=False
            )
        self.shard.write_table(Table.from_pylist(self.waiting, schema=self.schema))
        self.shard_bytes += self.waiting_bytes
        self.waiting, self.waiting_bytes = [], 0

    def end_shard(self) -> None:
        self.write_group()
        shard, self.shard, self.shard_bytes = self.shard, None, 0
        if shard is not None:
            shard.close()


def fitted(pixels: Pixels, side: int) -> bytes:
    """Return a PNG of an image as the processor of a model of this size fits it, so that training
    sees the same values."""
    from tokenformer.models.image_processing import TokenformerImageProcessor

    processor = TokenformerImageProcessor.for_size(side, pixels.shape[2])
    file = BytesIO()
    to_pillow(processor.fit(pixels)).save(file, "PNG")
    return file.getvalue()
