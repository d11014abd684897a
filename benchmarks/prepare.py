"""What `tokenformer prepare` costs over the disk and over the tokenizer that it cannot do without.

    python -m benchmarks.prepare

Bytes: enwik8 unpacked to shards of uint16, against copying it and against copying the shards, which
are twice as long; all of it brought to the disk. Tokenizer: GPT-NeoX-20B on the pages of enwik8 as
jsonl, processes started and shards written included, against the `tokenizers` library's bare
`encode_batch` on the same texts in memory with as many threads. Interleaved rounds, medians,
ratios. Needs text/enwik8.gz and tokenizer/20B_tokenizer.json under TOKENFORMER_DATA.
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

from benchmarks.measuring import interleaved, number, parser, progress, ratio, run, with_spread
from benchmarks.results import Row
from tokenformer.data.preparation import Request, prepare

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("TOKENFORMER_DATA", ROOT.parent / "shared" / "data"))
BATCH = 256  # texts; a corpus in one batch would fill the memory with offsets
COLUMNS = {
    "time of the limit's": with_spread("times_limit"),
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


def compared_with(limit: str, case: str, taken: dict[str, list[float]], size: int) -> Iterator[Row]:
    """The seconds of each, also of the limit, against the limit's."""
    for name, seconds in taken.items():
        times, spread = ratio(seconds, taken[limit])
        median = statistics.median(seconds)
        row = {"case": case, "name": name, "limit": limit, "seconds": median}
        row |= {"times_limit": times, "times_limit_spread": spread}
        yield row | {"mb_per_second": size / median / 1e6}


def bytes_against_the_disk(work: Path, rounds: int) -> Iterator[Row]:
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
    taken = interleaved(functions, rounds, before=os.sync)  # others' writes are not its cost
    yield from compared_with("copy of the shards", "enwik8, byte level", taken, 100_000_000)


def tokenizer_against_the_library(
    work: Path, rounds: int, megabytes: int, workers: int
) -> Iterator[Row]:
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
    taken = interleaved(functions, rounds, before=os.sync)
    case = f"{len(pages):,} pages, {size / 1e6:.0f} MB"
    for row in compared_with("encode_batch", case, taken, size):
        watched = {"peak_bytes": max(peaks)} if row["name"].startswith("prepare") else {}
        yield row | {"workers": workers} | watched


def measure(options: Namespace) -> Iterator[Row]:
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    rounds = options.rounds or 5
    with tempfile.TemporaryDirectory() as folder:
        progress("prepare by bytes")
        yield from bytes_against_the_disk(Path(folder), rounds)
        progress("prepare with a tokenizer")
        yield from tokenizer_against_the_library(
            Path(folder), rounds, options.megabytes, options.workers
        )


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--megabytes", type=int, default=32, help="of text for the tokenizer")
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    run("prepare", measure, COLUMNS, made.parse_args(arguments))


if __name__ == "__main__":
    main()
