"""The job that compresses random keys as the pull request compresses its model."""

import zlib
from dataclasses import dataclass

from experiments.job import Job, Result
from experiments.workspace import Workspace


@dataclass(frozen=True)
class UntrainedKeys(Job):
    """One layer of keys that still have their initial values, in int8, through zlib.

    The pull request rounds a row to steps of its largest entry / 127, but of at least 1/127, which
    is larger for all of these.
    """

    rows: int = 341
    columns: int = 512 + 1024
    std: float = 0.02

    def run(self, workspace: Workspace) -> Result:
        import numpy as np

        keys = np.random.default_rng(0).normal(0, self.std, (self.rows, self.columns))
        rounded = np.round(keys * 127).astype(np.int8)
        return {"bytes_per_weight": len(zlib.compress(rounded.tobytes(), 9)) / rounded.size}
