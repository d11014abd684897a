"""What the page of a model costs: `tokenformer explore` as a process of its own."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.interpretability.measurement import ModelJob
from experiments.job import Result
from experiments.workspace import Workspace


@dataclass(frozen=True)
class PageCost(ModelJob):
    """Seconds and peak memory, on one thread."""

    sequences: int = 1000

    @property
    def flops(self) -> float:
        return 3 * self.sequences * self.forward_flops

    def reduced(self) -> "PageCost":
        return replace(super().reduced(), sequences=min(20, self.sequences // 100))

    def measure(self, workspace: Workspace) -> Result:
        site = workspace.work(self) / "site"
        shutil.rmtree(site.parent, ignore_errors=True)
        site.parent.mkdir(parents=True)
        words = ["explore", str(workspace.model(self.start)), "--out", str(site)]
        words += ["--data", str(workspace.corpus(self.start.corpus)), "--split", "train"]
        words += ["--length", str(self.start.length), "--sequences", str(self.sequences), "--json"]
        command = [sys.executable, "-m", "tokenformer", *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        index = site / "index"
        result = {
            "positions": self.sequences * self.start.length,
            "core_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "peak_bytes": usage.ru_maxrss * 1024,
            "index_bytes": size_of(index),
            "site_bytes": size_of(site) - size_of(index),
        }
        shutil.rmtree(site.parent)
        return result


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
