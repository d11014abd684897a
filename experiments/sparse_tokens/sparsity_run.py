"""The job that makes a trained dense model sparse: by routing, by thresholds, or by pruning.

    SparsityRun(dense, "routing", active=0.25, distill_steps=300)

The feed-forward layers keep, or visit per row, a share of their tokens. With `distill_steps` the
result is trained to match the dense model.
"""

import shutil
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from experiments.job import Job, Result
from experiments.language import LanguageRun, held_out_loss
from experiments.workspace import Workspace


@dataclass(frozen=True)
class SparsityRun(Job):
    start: LanguageRun
    method: str = "routing"
    """routing, threshold, or prune: the same tokens for all rows."""
    active: float = 0.25
    group_size: int = 16
    distill_steps: int = 0
    rate: float = 1e-3
    """Peak learning rate of these steps."""
    fit_batches: int = 64
    seed: int = 0

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.start,)

    @property
    def data(self) -> tuple[str, ...]:
        return self.start.data

    @property
    def flops(self) -> float:
        """With those of the dense model, which is the teacher and whose tokens are all fitted."""
        batch = self.start.batch * self.start.model.training_flops(self.start.length)
        return (4 / 3 * self.distill_steps + self.fit_batches) * batch

    def reduced(self) -> "SparsityRun":
        return replace(
            self,
            start=self.start.reduced(),
            distill_steps=min(2, self.distill_steps),
            fit_batches=2,
        )

    def with_seed(self, seed: int) -> "SparsityRun":
        """Return the same run of the dense model of another seed."""
        return replace(self, start=self.start.with_seed(seed), seed=seed)

    def run(self, workspace: Workspace) -> Result:
        from tokenformer.growth.model_folder import copy_companions
        from tokenformer.models.loading import load_tokenformer
        from tokenformer.train.text_workload import TextWorkload

        began = time.perf_counter()
        source, folder = workspace.model(self.start), workspace.work(self)
        recipe = self.start.recipe(workspace, str(source))
        count = max(self.fit_batches, self.distill_steps)
        batches = list(islice(TextWorkload(recipe).token_batches(), count))
        sparse, errors = self.make_sparse(load_tokenformer(source), batches)
        sparse.save_pretrained(folder)
        copy_companions(source, folder)
        bits = held_out_loss(self.start, recipe, workspace, str(folder), self.start.corpus)
        shutil.rmtree(folder)
        return {
            "bits_per_byte": round(bits, 5),
            **errors,
            "seconds": round(time.perf_counter() - began, 1),
        }

    def make_sparse(self, model: Any, batches: list[Tensor]) -> tuple[Any, dict[str, float]]:
        """Return the sparse model and, unless it is pruned, the mean error of its layers before
        distillation, with that of an oracle."""
        import tokenformer
        from tokenformer.growth.tokens.sparse_distillation import train_to_match

        fit = batches[: self.fit_batches]
        if self.method == "prune":
            tokens = max(1, round(self.active * model.config.ffn_tokens))
            sparse, _ = tokenformer.prune(model, fit, ffn_tokens=tokens)
            errors = {}
        else:
            sparse, report = tokenformer.sparsify(
                model, fit, self.active, self.group_size, method=self.method, held_out=fit[:1]
            )
            count = len(report.layers)
            errors = {
                "error": round(sum(layer.error for layer in report.layers) / count, 4),
                "oracle_error": round(sum(x.oracle_error for x in report.layers) / count, 4),
            }
        for _ in train_to_match(sparse, model, batches, self.distill_steps, self.rate):
            pass
        return sparse, errors
