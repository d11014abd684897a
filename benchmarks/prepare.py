"""`tokenformer prepare`, relative to copying its output and to the bare tokenizer.

    python -m benchmarks.prepare --data DIR    # with text/enwik8.gz, tokenizer/20B_tokenizer.json

Bytes: enwik8 to uint16 shards, against copying the text and copying the shards, which are twice as
long; all synced to disk. Tokenizer: GPT-NeoX-20B on the pages of enwik8 as jsonl, including process
start-up and writing shards, against `encode_batch` of the `tokenizers` library on the same texts in
memory with as many threads.
"""

import gzip
import json
import os
import shutil
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from benchmarks.harness import (
    make_parser,
    number,
    progress,
    ratio,
    run,
    time_interleaved,
    with_spread,
)
from benchmarks.results import Row
from tokenformer.data.preparation import PrepareOptions, prepare

BATCH = 256  # texts; in one batch, the offsets of a whole corpus would fill the memory
COLUMNS = {
    "time / limit": with_spread("times_limit"),
    "seconds": number("seconds"),
    "MB/s": number("mb_per_second", ".1f"),
    "peak, MB": number("peak_bytes", ",.0f", unit=1e6),
}


def copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while block := read.read(1 << 20):
            write.write(block)
        write.flush()
        os.fsync(write.fileno())


def relative_to(limit: str, case: str, times: dict[str, list[float]], size: int) -> Iterator[Row]:
    """Yield a row per function, the limit included."""
    for name, seconds in times.items():
        share, spread = ratio(seconds, times[limit])
        median = statistics.median(seconds)
        row = {"case": case, "name": name, "limit": limit, "seconds": median}
        row |= {"times_limit": share, "times_limit_spread": spread}
        yield row | {"mb_per_second": size / median / 1e6}


def byte_tokenizer_rows(data: Path, work: Path, rounds: int) -> Iterator[Row]:
    raw, out = work / "enwik8", work / "bytes"
    raw.write_bytes(gzip.decompress((data / "text/enwik8.gz").read_bytes()))
    request = PrepareOptions(corpus=str(raw))

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
    times = time_interleaved(functions, rounds, before=os.sync)  # finish earlier writes first
    yield from relative_to("copy of the shards", "enwik8, byte level", times, 100_000_000)


def bpe_tokenizer_rows(
    data: Path, work: Path, rounds: int, megabytes: int, workers: int
) -> Iterator[Row]:
    with gzip.open(data / "text/enwik8.gz") as file:
        text = file.read(megabytes * 1_000_000).decode(errors="replace")
    pages = [f"<page>{page}" for page in text.split("<page>")]
    rows = work / "pages.jsonl"
    rows.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    size = sum(len(page.encode()) for page in pages)
    tokenizer_file, out = data / "tokenizer/20B_tokenizer.json", work / "tokens"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    request = PrepareOptions(corpus=str(rows), tokenizer=str(tokenizer_file))
    peaks = []

    def record_memory(_: object) -> None:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        peaks.append(sum(process.memory_info().rss for process in processes))

    def run() -> None:
        shutil.rmtree(out, ignore_errors=True)
        prepare(request, out, workers=workers, on_progress=record_memory)

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
    times = time_interleaved(functions, rounds, before=os.sync)
    case = f"{len(pages):,} pages, {size / 1e6:.0f} MB"
    for row in relative_to("encode_batch", case, times, size):
        memory = {"peak_bytes": max(peaks)} if row["name"].startswith("prepare") else {}
        yield row | {"workers": workers} | memory


def measure(options: Namespace) -> Iterator[Row]:
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    rounds = options.rounds or 5
    with tempfile.TemporaryDirectory() as folder:
        progress("prepare with the byte tokenizer")
        yield from byte_tokenizer_rows(options.data, Path(folder), rounds)
        progress("prepare with the GPT-NeoX tokenizer")
        yield from bpe_tokenizer_rows(
            options.data, Path(folder), rounds, options.megabytes, options.workers
        )


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with enwik8 and tokenizer")
    parser.add_argument("--megabytes", type=int, default=32, help="text for the GPT-NeoX tokenizer")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    run("prepare", measure, COLUMNS, parser.parse_args(arguments))


if __name__ == "__main__":
    main()
