"""Times of several functions side by side, as shares of what the machine can do."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def interleaved(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each; they take turns, since the machine is shared."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:  # the first warms up
                taken[name].append(time.perf_counter() - start)
    return taken


def ratio(over: list[float], under: list[float]) -> tuple[float, float]:
    """The median of over / under of the same round, and the distance between its quartiles."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), high - low


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def keep(path: Path | None, results: Any) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
        print(f"kept in {path}")
