"""The resume journal of `prepare`: its settings, its sources, and how much of them is on disk.

The journal is `unfinished.json` in the output folder. A later run resumes only if the journal is
intact, its settings are the same, and the sources have not been modified since.
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
    check_integer,
    check_shards,
    read_index,
    shown,
)
from tokenformer.data.shards import write_json
from tokenformer.data.sources import SAMPLE, SPLITS, Source
from tokenformer.data.text_encoding import UTF8, detect_byte_order_mark
from tokenformer.errors import DataError

Journal = dict[str, Any]
LEFTOVER = f".{UNFINISHED}.tmp"
"""The file that a killed process may leave before there is a journal."""
DEFAULTS = {"encoding": UTF8, "encoding_errors": "strict"}
"""Values that None stands for in the settings."""
COMPATIBLE = {"encoding_errors": ("strict", "replace")}
"""Settings that may change from the first value to the second: text without errors is the same
either way."""


def open_journal(
    out: Path, settings: dict[str, Any], sources: list[Source], stamps: list[list[int]]
) -> Journal | None:
    """Return the journal to resume `out` from, a new one, or None if `out` is finished."""
    if (out / INDEX).exists():
        check_settings(out, read_index(out).get("settings", {}), settings)
        (out / UNFINISHED).unlink(missing_ok=True)
        return None
    if (out / UNFINISHED).exists():
        journal = read_journal(out)
        check_settings(out, journal["settings"], settings, finished=False)
        check_unmodified(out, journal, sources)
        if "stamps" not in journal:  # written by an older version
            check_no_byte_order_mark(out, sources)
        return journal | {"settings": settings}
    if any(path.name != LEFTOVER for path in out.iterdir()):
        raise DataError(f"--out {out} already exists; name a new folder")
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
    """Raise ValueError unless every required field exists and has the right type."""
    if not isinstance(journal, dict) or not isinstance(journal.get("settings"), dict):
        raise ValueError("it has no settings")
    position, parts = journal.get("position"), journal.get("parts", [])
    if position is not None:
        if not isinstance(position, list) or len(position) != 3:
            raise ValueError(f"position is {shown(position)}, expected three integers")
        for number in position:
            check_integer(number, -1, "position")
    if journal.get("split") not in SPLITS:
        raise ValueError(f"split is {shown(journal.get('split'))}")
    if journal.get("threshold") is not None:
        check_integer(journal["threshold"], 0, "threshold")
    if not isinstance(parts, list) or not all(isinstance(p, list) and len(p) == 2 for p in parts):
        raise ValueError(f"parts are {shown(parts)}")
    if not isinstance(journal.get("splits"), dict):
        raise ValueError(f"splits are {shown(journal.get('splits'))}")
    for split, state in journal["splits"].items():
        if split not in SPLITS or not isinstance(state, dict):
            raise ValueError(f"splits.{split} is {shown(state)}")
        for field in ("bytes", "documents", "open_tokens"):
            check_integer(state.get(field), 0, f"splits.{split}.{field}")
        check_shards(state.get("shards"), f"splits.{split}")
    stamps = journal.get("stamps", [])
    if not isinstance(stamps, list) or not all(isinstance(s, list) and len(s) == 2 for s in stamps):
        raise ValueError(f"stamps are {shown(stamps)}")
    for number in (number for stamp in stamps for number in stamp):
        check_integer(number, 0, "stamps")
    tokenizer = journal.get("tokenizer")
    if tokenizer is not None:
        if not isinstance(tokenizer, dict):
            raise ValueError(f"tokenizer is {shown(tokenizer)}")
        check_integer(tokenizer.get("vocab_size"), 1, "tokenizer.vocab_size")
        check_integer(tokenizer.get("end_of_text"), 0, "tokenizer.end_of_text")


def check_settings(
    out: Path, before: dict[str, Any], now: dict[str, Any], *, finished: bool = True
) -> None:
    """Raise DataError if the settings differ from those that `out` was started with."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        default = DEFAULTS.get(name)
        values = (default if old is None else old, default if new is None else new)
        if values[0] == values[1] or COMPATIBLE.get(name) == values:
            continue
        if name == "sources":
            raise DataError(
                f"--out {out} holds another corpus{changed_file(*values)}; use a new folder or "
                "remove it"
            )
        remedy = "use a new folder or remove it"
        if name in DEFAULTS and not finished:
            remedy = f"remove {out} first and run the command again"
        raise DataError(
            f"--out {out} was made with --{name} {values[0]}, not {values[1]}; {remedy}"
        )


def changed_file(before: Any, now: Any) -> str:
    """Name the file that has changed, if two lists of sources have the same names."""
    try:
        pairs = [(old, new) for old, new in zip(before, now, strict=True)]
        if [old["name"] for old, _ in pairs] == [new["name"] for _, new in pairs]:
            return f", or {next(new['name'] for old, new in pairs if old != new)} has changed"
    except (TypeError, ValueError, KeyError, StopIteration):
        pass
    return ""


def check_unmodified(out: Path, journal: Journal, sources: list[Source]) -> None:
    """Raise DataError if a source was modified since, even if its size is the same: part of it has
    been read."""
    stamps = journal.get("stamps", [])  # an older version did not write them
    identities = journal["settings"]["sources"]
    for source in modified_sources(stamps, sources, identities):
        size, time = stamps[sources.index(source)]
        restore = "restore the old file with its modification time"
        if source.kind != "dataset" and size == source.stamp()[0]:
            seconds = f"{time // 10**9}.{time % 10**9:09d}"
            restore = (
                "if its content is the same, restore its modification time with "
                f"`touch -d @{seconds} {shlex.quote(str(source.path))}` and run the command again"
            )
        raise DataError(
            f"{source.name} was modified after {out} was started, and part of it may have been "
            f"read; {restore}, or remove {out} and run the command again"
        )


def modified_sources(
    stamps: Any, sources: list[Source], identities: list[dict[str, Any]] | None = None
) -> list[Source]:
    """Return the sources whose size or modification time differs from their stamp.

    The time may differ if the sampled hash covers the whole file and is that of its identity.
    Without `identities`, they have been compared already.
    """
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


def check_no_byte_order_mark(out: Path, sources: list[Source]) -> None:
    """Raise DataError for a journal of an older version, which read a byte order mark as text."""
    for source in sources:
        if source.kind not in ("text", "jsonl"):
            continue
        if detect_byte_order_mark(source.start())[0] is not None:
            raise DataError(
                f"{source.name} has a byte order mark, which the older version that started {out} "
                f"did not support; remove {out} and run the command again"
            )


def remove_if_empty(out: Path) -> bool:
    """Remove the folder after an error. Return False if tokens were written, which are kept."""
    with suppress(DataError, OSError):
        if read_journal(out)["splits"]:
            return False
        shutil.rmtree(out / TOKENIZER, ignore_errors=True)
        for path in (*out.glob("*.bin"), out / UNFINISHED):
            path.unlink(missing_ok=True)
        out.rmdir()
    return True
