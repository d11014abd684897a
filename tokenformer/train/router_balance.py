"""Balances the load of a model's routers after every optimizer step, over all ranks.

The biases are buffers of the model, so checkpoints hold them and a resumed run routes as before. A
run that trains only a part of a model, such as an adapter, leaves them as they are.
"""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from tokenformer.layers.router import balance_routers, reset_counts, routers
from tokenformer.train.metrics import Row
from tokenformer.train.parallel.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RouterBalance:
    def __init__(self, model: "PreTrainedModel", ranks: Ranks, *, is_frozen: bool = False) -> None:
        self.model, self.ranks = model, ranks
        self.is_routed = not is_frozen and any(True for _ in routers(model))

    def start_step(self) -> None:
        """Forget rows of a step that was not taken, or of measurements before the first."""
        if self.is_routed:
            reset_counts(self.model)

    def finish_step(self) -> Row:
        """Update the biases; return the metrics of the step's load: the groups that no row chose,
        over all layers, and the largest load of a group relative to the mean of its layer."""
        load = balance_routers(self.model, self.sum_over_ranks) if self.is_routed else None
        if load is None:
            return {}
        return {"dead_groups": load.dead, "peak_load": load.peak}

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        if self.ranks.count > 1:
            dist.all_reduce(counts, group=self.ranks.group)
        return counts
