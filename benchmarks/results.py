"""Results files: one per machine and version, with a section per benchmark.

    benchmarks/results/amd-epyc-2t-torch2.13.0-tokenformer0.1.0.json

A section holds the rows of a benchmark, the date and the commit; the file also describes the
machine.
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
    """Describe the machine and library versions, without a host name or path."""
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
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def results_path() -> Path:
    about = machine()
    cpu = re.sub(r"[^a-z0-9]+", "-", about["cpu"].lower()).strip("-")
    torch = about["torch"].partition("+")[0]
    name = f"{cpu}-{about['threads']}t-torch{torch}-tokenformer{about['tokenformer']}.json"
    return FOLDER / name


def write_section(path: Path, name: str, section: Row) -> None:
    """Replace one section of the file and keep the others. The write is atomic."""
    results = json.loads(path.read_text()) if path.exists() else {}
    origin = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
    }
    results |= {"machine": machine(), name: {**origin, **section}}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(round_floats(results), indent=1) + "\n")
    partial.replace(path)


def round_floats(value: Any) -> Any:
    """Round every float to five digits."""
    if isinstance(value, dict):
        return {key: round_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [round_floats(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def commit() -> str | None:
    """Return the commit of a clone, marked `-dirty` if files differ, or None outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
