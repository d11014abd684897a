"""The journal of a preparation: its settings, its sources, and how far the shards on disk reach.

`unfinished.json` is in the folder while the work lasts. A later run continues only from a journal
that is whole, has the same settings, and whose sources have not been modified since.
"""

import json
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenformer.data.corpus import (
    INDEX,
    TOKENIZER,
    UNFINISHED,
    check_shards,
    read_index,
    shown,
    whole_number,
)
from tokenformer.data.reading import UTF8, marked_encoding
from tokenformer.data.shards import write_json
from tokenformer.data.sources import SAMPLE, SPLITS, Source
from tokenformer.errors import DataError

Journal = dict[str, Any]
DEFAULTS = {"encoding": UTF8, "encoding_errors": "strict"}
"""What None stands for in the settings."""
COMPATIBLE = {"encoding_errors": ("strict", "replace")}
"""Settings that may change from one value to another: what was written without a single error is
the same either way."""


def open_journal(
    out: Path, settings: dict[str, Any], sources: list[Source], stamps: list[list[int]]
) -> Journal | None:
    """How far `out` is: a journal to continue from, or None if it is finished."""
    if (out / INDEX).exists():
        check_same(out, read_index(out).get("settings", {}), settings)
        (out / UNFINISHED).unlink(missing_ok=True)
        return None
    if (out / UNFINISHED).exists():
        journal = read_journal(out)
        check_same(out, journal["settings"], settings, finished=False)
        check_unmodified(out, journal, sources)
        if "stamps" not in journal:  # of an older version
            check_unmarked(out, sources)
        return journal | {"settings": settings}
    if any(not is_ours(path) for path in out.iterdir()):
        raise DataError(f"--out {out} is in use; name a new folder")
    journal = {
        "settings": settings,
        "stamps": stamps,
        "position": None,
        "split": "train",
        "splits": {},
        "threshold": None,
    }
    write_json(out / UNFINISHED, journal)
    return journal


def read_journal(out: Path) -> Journal:
    path = out / UNFINISHED
    try:
        journal = json.loads(path.read_text(encoding="utf-8"))
        check_journal(journal)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged: {error}; remove {out} and run the command again"
        ) from None
    return dict(journal)


def check_journal(journal: Any) -> None:
    """Raise ValueError unless every field that a later run relies on is there and of its type."""
    if not isinstance(journal, dict) or not isinstance(journal.get("settings"), dict):
        raise ValueError("it has no settings")
    position, parts = journal.get("position"), journal.get("parts", [])
    if position is not None:
        if not isinstance(position, list) or len(position) != 3:
            raise ValueError(f"position is {shown(position)}, expected three numbers")
        for number in position:
            whole_number(number, -1, "position")
    if journal.get("split") not in SPLITS:
        raise ValueError(f"split is {shown(journal.get('split'))}")
    if journal.get("threshold") is not None:
        whole_number(journal["threshold"], 0, "threshold")
    if not isinstance(parts, list) or not all(isinstance(p, list) and len(p) == 2 for p in parts):
        raise ValueError(f"parts are {shown(parts)}")
    if not isinstance(journal.get("splits"), dict):
        raise ValueError(f"splits are {shown(journal.get('splits'))}")
    for split, state in journal["splits"].items():
        if split not in SPLITS or not isinstance(state, dict):
            raise ValueError(f"splits.{split} is {shown(state)}")
        for field in ("bytes", "documents", "open_tokens"):
            whole_number(state.get(field), 0, f"splits.{split}.{field}")
        check_shards(state.get("shards"), f"splits.{split}")
    stamps = journal.get("stamps", [])
    if not isinstance(stamps, list) or not all(isinstance(s, list) and len(s) == 2 for s in stamps):
        raise ValueError(f"stamps are {shown(stamps)}")
    for number in (number for stamp in stamps for number in stamp):
        whole_number(number, 0, "stamps")
    known = journal.get("tokenizer")
    if known is not None:
        if not isinstance(known, dict):
            raise ValueError(f"tokenizer is {shown(known)}")
        whole_number(known.get("vocab_size"), 1, "tokenizer.vocab_size")
        whole_number(known.get("end_of_text"), 0, "tokenizer.end_of_text")


def check_same(
    out: Path, before: dict[str, Any], now: dict[str, Any], *, finished: bool = True
) -> None:
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        default = DEFAULTS.get(name)
        values = (default if old is None else old, default if new is None else new)
        if values[0] == values[1] or COMPATIBLE.get(name) == values:
            continue
        if name == "sources":
            raise DataError(
                f"--out {out} holds another corpus{difference(*values)}; name a new folder or "
                "remove it"
            )
        remedy = "name a new folder or remove it"
        if name in DEFAULTS and not finished:
            remedy = f"remove {out} first and run the command again"
        raise DataError(
            f"--out {out} was made with --{name} {values[0]}, not {values[1]}; {remedy}"
        )


def difference(before: Any, now: Any) -> str:
    """Which file has changed, where two lists of sources have the same names."""
    try:
        pairs = [(old, new) for old, new in zip(before, now, strict=True)]
        if [old["name"] for old, _ in pairs] == [new["name"] for _, new in pairs]:
            return f", or {next(new['name'] for old, new in pairs if old != new)} has changed"
    except (TypeError, ValueError, KeyError, StopIteration):
        pass
    return ""


def check_unmodified(out: Path, journal: Journal, sources: list[Source]) -> None:
    """A file edited since is refused even if its size is the same: part of it has been read."""
    stamps = journal.get("stamps", [])  # an older version did not write them
    identities = journal["settings"]["sources"]
    for source in modified_since(stamps, sources, identities):
        size, time = stamps[sources.index(source)]
        restore = "put the old file back with its time"
        if source.kind != "dataset" and size == source.stamp()[0]:
            seconds = f"{time // 10**9}.{time % 10**9:09d}"
            restore = (
                "if its content is the same, restore its time by "
                f"`touch -d @{seconds} {shlex.quote(str(source.path))}` and run the command again"
            )
        raise DataError(
            f"{source.name} was modified after {out} was started, and part of it may have been "
            f"read; {restore}, or remove {out} and run the command again"
        )


def modified_since(
    stamps: Any, sources: list[Source], identities: list[dict[str, Any]] | None = None
) -> list[Source]:
    """The sources whose size or time is not that of their stamp. A file that is small enough for
    its sampled hash to cover it may have another time, if the hash is that of its identity, or
    identities are not given because they have been compared."""
    if not isinstance(stamps, list):
        return []
    found = []
    for number, (source, stamp) in enumerate(zip(sources, stamps, strict=False)):
        now = source.stamp()
        if now == stamp:
            continue
        covered = source.kind != "dataset" and now[:1] == stamp[:1] and now[0] <= 3 * SAMPLE
        if not covered or (identities is not None and source.identity() != identities[number]):
            found.append(source)
    return found


def check_unmarked(out: Path, sources: list[Source]) -> None:
    """Older versions took a byte order mark for text; what they began cannot be continued."""
    for source in sources:
        if source.kind in ("text", "jsonl") and marked_encoding(source.start())[0] is not None:
            raise DataError(
                f"{out} was started by an older version, which read {source.name} without regard "
                f"to its byte order mark; remove {out} and run the command again"
            )


def abandon(out: Path) -> bool:
    """After an error before anything was written: make the name free for the next attempt. False
    if something was written, and is kept."""
    with suppress(DataError, OSError):
        if read_journal(out)["splits"]:
            return False
        shutil.rmtree(out / TOKENIZER, ignore_errors=True)
        for path in (*out.glob("*.bin"), out / UNFINISHED):
            path.unlink(missing_ok=True)
        out.rmdir()
    return True


def is_ours(path: Path) -> bool:
    """What a kill may leave behind before there is a journal."""
    return path.name == f".{UNFINISHED}.tmp"
