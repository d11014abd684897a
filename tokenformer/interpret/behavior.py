"""A behavior of a model: predictions whose loss and accuracy can be measured.

    behavior = Behavior.predicting(ids, lambda now, following: following == ord(">"))
    behavior.loss(model), behavior.accuracy(model)
    behavior.rest().loss(model)                    # all other predictions on the same text

`ids` are sequences [S, T] of a text; a behavior is a choice among their next-token predictions. Of
an image classifier it is a set of images with the class to predict.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.growth.model_inputs import run_model
from tokenformer.ops.theta import accumulation_dtype

IGNORED = -100
"""The target of a position that is not part of the behavior, as in torch."""
BATCH_SIZE = 16


@dataclass(frozen=True)
class Behavior:
    inputs: Tensor
    """Token ids [S, T], or images [S, C, H, W]."""
    targets: Tensor
    """The id to predict at every position [S, T], or `IGNORED`; of images, their class [S]."""
    others: Tensor | None = None
    """The targets that the behavior leaves out, [S, T]."""

    def __post_init__(self) -> None:
        expected = self.inputs.shape if self.inputs.ndim == 2 else self.inputs.shape[:1]
        if self.targets.shape != expected:
            raise ValueError(f"targets are {[*self.targets.shape]}, not {[*expected]}")
        if not len(self):
            raise ValueError("the behavior is empty: no prediction was chosen")

    def __len__(self) -> int:
        """The number of predictions."""
        return int((self.targets != IGNORED).sum())

    @classmethod
    def predicting(cls, ids: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> "Behavior":
        """Choose predictions on a text: `choose(now, following)` takes the ids at each position and
        the ids to predict from there, both [S, T - 1], and returns a mask."""
        now, following = ids[:, :-1], ids[:, 1:]
        chosen = choose(now, following)
        return cls(
            now,
            following.masked_fill(~chosen, IGNORED),
            following.masked_fill(chosen, IGNORED),
        )

    def rest(self) -> "Behavior":
        """Return all other predictions on the same inputs: what should not change."""
        if self.others is None:
            raise ValueError("this behavior knows no other predictions; make it by `predicting`")
        return Behavior(self.inputs, self.others, self.targets)

    def batches(self) -> Iterator["Behavior"]:
        """Yield parts of the behavior that have predictions."""
        for start in range(0, len(self.inputs), BATCH_SIZE):
            rows = slice(start, start + BATCH_SIZE)
            if (self.targets[rows] != IGNORED).any():
                yield Behavior(self.inputs[rows], self.targets[rows])

    def total_loss(self, model: PreTrainedModel) -> Tensor:
        """Return the sum of the losses in nats; it can be differentiated."""
        logits = run_model(model, self.inputs.to(model.device)).logits
        logits = logits.to(accumulation_dtype(logits.dtype))
        targets = self.targets.to(model.device)
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    @torch.no_grad()
    def loss(self, model: PreTrainedModel) -> float:
        """Return the mean loss of the predictions in nats."""
        return sum(part.total_loss(model).item() for part in self.batches()) / len(self)

    @torch.no_grad()
    def accuracy(self, model: PreTrainedModel) -> float:
        """Return the share of predictions in which the target has the largest logit."""
        hits = 0
        for part in self.batches():
            logits = run_model(model, part.inputs.to(model.device)).logits
            hits += int((logits.argmax(-1).cpu() == part.targets.cpu()).sum())
        return hits / len(self)
