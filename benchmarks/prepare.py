"""What `tokenformer prepare` costs over the disk and over the tokenizer that it cannot do without.

    python -m benchmarks.prepare

Bytes: enwik8 unpacked to shards of uint16, against copying it and against copying the shards, which
are twice as long; all of it brought to the disk. Tokenizer: GPT-NeoX-20B on the pages of enwik8 as
jsonl, processes started and shards written included, against the `tokenizers` library's bare
`encode_batch` on the same texts in memory with as many threads. Interleaved rounds, medians,
ratios. Needs text/enwik8.gz and tokenizer/20B_tokenizer.json under TOKENFORMER_DATA.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from tokenformer.data.preparation import Request, prepare

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("TOKENFORMER_DATA", ROOT.parent / "shared" / "data"))
BATCH = 256  # texts; a corpus in one batch would fill the memory with offsets


def copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while block := read.read(1 << 20):
            write.write(block)
        write.flush()
        os.fsync(write.fileno())


def measure(functions: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            os.sync()  # what others left to write is not this one's cost
            start = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first warms


def show(title: str, medians: dict[str, float], size: int, limit: str) -> None:
    print(f"\n{title}")
    for name, median in medians.items():
        speed, ratio = size / median / 1e6, median / medians[limit]
        print(f"  {name:<28}{median:>8.2f} s{speed:>9.1f} MB/s{ratio:>8.2f} x {limit}")


def bytes_against_the_disk(work: Path, rounds: int) -> None:
    raw, out = work / "enwik8", work / "bytes"
    raw.write_bytes(gzip.decompress((DATA / "text/enwik8.gz").read_bytes()))
    request = Request(corpus=str(raw))

    def run() -> None:
        shutil.rmtree(out, ignore_errors=True)
        prepare(request, out)

    def copy_shards() -> None:
        for shard in out.glob("*.bin"):
            copy(shard, work / "copy")

    run()
    functions = {
        "copy of the text": lambda: copy(raw, work / "copy"),
        "copy of the shards": copy_shards,
        "prepare, bytes": run,
    }
    show("enwik8, byte level", measure(functions, rounds), 100_000_000, "copy of the shards")


def tokenizer_against_the_library(work: Path, rounds: int, megabytes: int, workers: int) -> None:
    with gzip.open(DATA / "text/enwik8.gz") as file:
        text = file.read(megabytes * 1_000_000).decode(errors="replace")
    pages = [f"<page>{page}" for page in text.split("<page>")]
    rows = work / "pages.jsonl"
    rows.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    size = sum(len(page.encode()) for page in pages)
    tokenizer_file, out = DATA / "tokenizer/20B_tokenizer.json", work / "tokens"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    request = Request(corpus=str(rows), tokenizer=str(tokenizer_file))
    peaks = []

    def watch(_: object) -> None:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        peaks.append(sum(process.memory_info().rss for process in processes))

    def run() -> None:
        shutil.rmtree(out, ignore_errors=True)
        prepare(request, out, workers=workers, on_standing=watch)

    def library(encode: Callable[..., object]) -> Callable[[], None]:
        def encode_all() -> None:
            for start in range(0, len(pages), BATCH):
                encode(pages[start : start + BATCH], add_special_tokens=False)

        return encode_all

    functions = {
        "encode_batch": library(tokenizer.encode_batch),
        "encode_batch_fast": library(tokenizer.encode_batch_fast),
        "prepare, 20B tokenizer": run,
    }
    title = f"{len(pages):,} pages, {size / 1e6:.0f} MB, {workers} threads or processes"
    show(title, measure(functions, rounds), size, "encode_batch")
    print(f"  memory of prepare and its workers, at most: {max(peaks) / 1e6:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=32, help="of text for the tokenizer")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    with tempfile.TemporaryDirectory() as folder:
        bytes_against_the_disk(Path(folder), options.rounds)
        tokenizer_against_the_library(
            Path(folder), options.rounds, options.megabytes, options.workers
        )


if __name__ == "__main__":
    main()
