"""What a run asks of its recipe, whatever is trained: text or images."""

from collections.abc import Iterator, Sized
from typing import Any, Protocol

from torch import Tensor

from tokenformer.train.image_workload import ImageWorkload
from tokenformer.train.options import Recipe
from tokenformer.train.task import Task
from tokenformer.train.text_workload import TextWorkload


class Workload(Protocol):
    unit: str
    """What is counted: tokens or images."""

    @property
    def train(self) -> Sized: ...

    def first_model(self) -> Any: ...

    def task(self, model: Any) -> Task: ...

    def token_batches(self) -> Iterator[Tensor] | None:
        """Yield token ids [B, T] for a growth method that learns on data; None for images."""
        ...

    def preprocessor(self, model: Any) -> Any:
        """What goes beside an exported model: its tokenizer or its image processor."""
        ...


def workload_of(recipe: Recipe) -> Workload:
    return TextWorkload(recipe) if recipe.data.images is None else ImageWorkload(recipe)
