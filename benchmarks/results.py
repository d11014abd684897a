"""The results file: one for each machine and version, a section for each benchmark.

    benchmarks/results/amd-epyc-2t-torch2.13.0-tokenformer0.1.0.json

holds the facts of the machine and, by benchmark, when and at which commit it ran and its rows.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FOLDER = Path(__file__).parent / "results"


def machine() -> Row:
    """What figures depend on; nothing that names the machine or its owner."""
    import torch

    import tokenformer

    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(memory_bytes() / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "tokenformer": tokenformer.__version__,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def results_path() -> Path:
    about = machine()
    cpu = re.sub(r"[^a-z0-9]+", "-", about["cpu"].lower()).strip("-")
    torch = about["torch"].partition("+")[0]
    name = f"{cpu}-{about['threads']}t-torch{torch}-tokenformer{about['tokenformer']}.json"
    return FOLDER / name


def keep(path: Path, name: str, section: Row) -> None:
    """Write one section; the others stay. A reader sees the old file or the new one, whole."""
    found = json.loads(path.read_text()) if path.exists() else {}
    when = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
    }
    found |= {"machine": machine(), name: {**when, **section}}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(rounded(found), indent=1) + "\n")
    beside.replace(path)


def rounded(found: Any) -> Any:
    """With as many digits as a timing can have."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(value) for value in found]
    return float(f"{found:.5g}") if isinstance(found, float) else found


def commit() -> str | None:
    """Of the sources, where they are a clone; with a mark where they differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(
            words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
