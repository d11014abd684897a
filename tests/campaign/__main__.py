"""python -m tests.campaign [--kills 1000] [--rank_kills 100] [--seed 0] [--out FOLDER] ...

Runs the parts it is asked for and ends with 1 if anything failed. What is finished in --out is not
done again.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.update(THREADS | OFFLINE)  # read when torch and transformers are imported

from tests.campaign import report  # noqa: E402
from tests.campaign.corruptions import Corruptions  # noqa: E402
from tests.campaign.hostile import Hostile  # noqa: E402
from tests.campaign.kills import Kills  # noqa: E402
from tests.campaign.ranks import RankKills  # noqa: E402
from tests.campaign.runs import RECIPES, Reference, Subject, prepare_reference  # noqa: E402
from tests.campaign.signals import Signals  # noqa: E402
from tests.campaign.trials import Campaign, Part  # noqa: E402

PRELOADED = (
    "tokenformer.cli.parser",
    "tokenformer.files",
    "tokenformer.train.matmul_peak",
    "tokenformer.train.progress_display",
    "tokenformer.train.run",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "rich._emoji_codes",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto",
)
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign",
        description="Kill, damage, attack and interrupt tokenformer, and compare the results.",
    )
    add = parser.add_argument
    add("--kills", type=int, default=0, metavar="N", help="SIGKILLs of a training process")
    add("--rank_kills", type=int, default=0, metavar="N", help="SIGKILLs of one of two ranks")
    add("--corruptions", type=int, default=0, metavar="N", help="damaged files")
    add("--hostile", type=int, nargs="?", const=-1, default=0, metavar="N", help="hostile files")
    add("--signals", type=int, default=0, metavar="N", help="SIGINT, SIGTERM, closed pipes")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="results, resumable; by default a temporary folder")
    add("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], help="what is trained")
    add("--workers", type=int, default=min(2, os.cpu_count() or 1), help="trials at a time")
    add("--max_disk", type=size, default=size("2GB"), help="of --out; by default 2GB")
    add("--max_seconds", type=float, help="start no trial after this time")
    add("--only", metavar="PART:INDEX", help="one trial again, as a failure names it")
    add("--table", action="store_true", help="print the table of what is in --out, and end")
    return parser.parse_args(arguments)


def size(text: str) -> int:
    unit = next((name for name in UNITS if text.upper().endswith(name)), "")
    return int(float(text[: len(text) - len(unit)]) * UNITS.get(unit, 1))


def parts(options: argparse.Namespace, references: Path) -> Iterator[Part]:
    """Return the requested parts, with their inputs prepared."""
    only = (options.only or "").partition(":")[0]
    corpus = references / "corpus"

    def ready(*skipped: str, ranks: int = 1) -> list[Reference]:
        names = [name for name in options.recipes if name not in skipped]
        return [prepare_reference(references, name, ranks) for name in names]

    if options.kills or only == Kills.name:
        yield Kills(options.kills, ready())
    if options.rank_kills or only == RankKills.name:
        yield RankKills(options.rank_kills, ready("average", "transformer", ranks=2))
    if options.corruptions or only == Corruptions.name:
        yield Corruptions(options.corruptions, ready("average", "images"), corpus)
    if options.hostile or only == Hostile.name:
        count = options.hostile if options.hostile > 0 else None
        yield Hostile(count, Subject.of(prepare_reference(references, "plain")), corpus)
    if options.signals or only == Signals.name:
        yield Signals(options.signals, ready("images"), corpus)


def preload() -> None:
    """Import what every trial needs, but nothing that starts threads."""
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        with suppress(ImportError):  # an import that moved costs time, not truth
            importlib.import_module(name)
    from tokenformer.cli import COMMANDS, load
    from tokenformer.train import matmul_peak

    for target in COMMANDS.values():
        load(target)
    matmul_peak.SIZE = 64  # of the matrices whose product only the progress bar asks for
    threads = len([*Path("/proc/self/task").iterdir()])
    if threads > 1:
        raise SystemExit(f"{threads} threads before the first fork; the trials would not be sound")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="campaign-"))
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    campaign = Campaign(
        out,
        seed=options.seed,
        workers=options.workers,
        max_disk=options.max_disk,
        max_seconds=options.max_seconds,
        tell=tell,
    )
    if options.table:
        print(report.markdown(campaign.results))
        return
    preload()
    for part in parts(options, out / "references"):
        if options.only:
            campaign.only(part, int(options.only.rpartition(":")[2]))
        else:
            campaign.run(part)
    finish(campaign, out)


def finish(campaign: Campaign, out: Path) -> None:
    report.write(out, campaign.results, campaign.seed)
    failed = report.failures(campaign.results)
    print(f"\n{report.markdown(campaign.results)}")
    for line in failed:
        print(line)
    print(f"{len(failed)} trials failed; summary.md, summary.json and results.jsonl are in {out}")
    if campaign.stopped:
        print(f"not finished: {campaign.stopped}; the same command goes on")
    sys.exit(1 if failed else 3 if campaign.stopped else 0)


if __name__ == "__main__":
    main()
