"""Where jobs read data and keep models: one folder per scale, under `runs/experiments`.

    runs/experiments/laptop/  results.jsonl  data/enwik8/  models/3f0c.../  work/  report.md

Real data comes from the folder in the environment variable TOKENFORMER_DATA. The scale `smoke`
needs none: it trains on a few files of Python's standard library and on scikit-learn's digits.
"""

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from experiments.job import Job

ROOT = Path(__file__).parent.parent
SOURCES = {
    "enwik8": "text/enwik8.gz",
    "python": None,
    "fashion-mnist": "image/fashion-mnist",
    "tiny-imagenet": "image/tiny-imagenet",
    "zero-shot": "eval",
    "captions": "image-text/flickr8k",
    "questions": "eval",
    "flickr8k": "image-text/flickr8k",
    "other-images": "image-text/flickr8k",
    "image-questions": "image-text/flickr8k",
    "other-images-questions": "image-text/flickr8k",
}
"""Data by name, and its path under TOKENFORMER_DATA; None for what every machine has."""
CORPORA = {"enwik8", "python", "captions", "questions"}
IMAGE_TEXT = {"flickr8k", "other-images", "image-questions", "other-images-questions"}
"""Photographs with captions or questions; in two sets those of another photograph."""
SPLIT = {"enwik8", "captions"}
"""Corpora with a validation split of their own; of the others a twentieth is held out."""
STAND_INS = {"enwik8": slice(0, 40), "python": slice(40, 80), "captions": slice(80, 100)}
"""Files of the standard library that stand in for a corpus at scale `smoke`."""


class MissingDataError(Exception):
    """Real data that this machine does not have."""


@dataclass(frozen=True)
class Workspace:
    folder: Path
    small: bool = False
    """Whether small stand-ins replace the data."""

    def model(self, job: Job) -> Path:
        """Return the folder of the model that a job has trained."""
        return self.folder / "models" / job.digest

    def work(self, job: Job) -> Path:
        """Return the folder in which a job works; it is deleted when the job is finished."""
        return self.folder / "work" / job.digest

    def images(self, name: str) -> str:
        """Return the `data.images` of a recipe; `prepare_data` has made it where it must."""
        if self.small:
            return "digits"
        saved = self.folder / "data" / name
        return str(saved if saved.exists() else source(name))

    def image_text(self, name: str) -> Path:
        """Return a set of images with text; `prepare_data` has made it where it must."""
        return source(name) if name == "flickr8k" and not self.small else self.corpus(name)

    def corpus(self, name: str) -> Path:
        """Return a prepared corpus; `prepare_data` has made it."""
        return self.folder / "data" / name

    def prepare_data(self, names: set[str]) -> None:
        """Prepare the corpora and images among `names`, so that workers only read them."""
        from tokenformer.data.preparation import PrepareOptions, prepare

        if "tiny-imagenet" in names and not self.small:
            save_images(source("tiny-imagenet"), self.folder / "data" / "tiny-imagenet")
        for name in sorted(names & IMAGE_TEXT):
            from experiments.vision_language.image_texts import write_image_text

            if not self.image_text(name).exists():
                write_image_text(name, self.corpus(name), None if self.small else source(name))
        for name in sorted(names & CORPORA):
            if not (self.corpus(name) / "index.json").exists():
                options = {} if name in SPLIT else {"validation": 0.05}
                prepare(PrepareOptions(str(self.text(name)), **options), self.corpus(name))

    def text(self, name: str) -> Path:
        """Return the text of a corpus, written for it if it has no file of its own."""
        if name == "enwik8" and not self.small:
            return source(name)
        from experiments.adapters.corpora import write_captions, write_questions

        folder = self.folder / "data" / f"{name}-text"
        shutil.rmtree(folder, ignore_errors=True)
        if name == "questions":
            write_questions(folder, None if self.small else source(name))
        elif name == "captions" and not self.small:
            write_captions(folder, source(name))
        else:
            copy_sources(folder, STAND_INS[name] if self.small else slice(None))
        return folder


def copy_sources(folder: Path, part: slice) -> None:
    """Copy files of Python's standard library to one folder, as texts."""
    from tokenformer.data.standard_library import source_files

    root = Path(sysconfig.get_path("stdlib"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in list(source_files(root))[part]:
        name = "-".join(file.relative_to(root).parts)
        (folder / f"{name}.txt").write_bytes(file.read_bytes())


def save_images(parquet: Path, folder: Path) -> None:
    """Save the images of Parquet files, one per split, as the dataset that recipes can name."""
    if folder.exists():
        return
    import pyarrow.parquet
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    files = {path.stem: path for path in sorted(parquet.glob("*.parquet"))}
    tables = {split: pyarrow.parquet.read_table(path) for split, path in files.items()}
    partial = folder.with_name(f"{folder.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    DatasetDict({split: Dataset(table) for split, table in tables.items()}).save_to_disk(partial)
    partial.rename(folder)


def data_folder() -> Path:
    return Path(os.environ.get("TOKENFORMER_DATA", ROOT.parent / "shared" / "data"))


def source(name: str) -> Path:
    """Return the path of real data; raise MissingDataError if this machine does not have it."""
    relative = SOURCES[name]
    assert relative is not None
    path = data_folder() / relative
    if not path.exists():
        raise MissingDataError(f"{name}: TOKENFORMER_DATA has no {relative}")
    return path


def missing_data(names: set[str]) -> list[str]:
    """Return why real data of these names cannot be read, one reason each."""
    reasons = []
    for name in sorted(names):
        if SOURCES[name] is not None:
            try:
                source(name)
            except MissingDataError as error:
                reasons.append(str(error))
    return reasons
