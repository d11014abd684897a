"""The data and models of a run: the interface of text and image recipes."""

from collections.abc import Iterator, Sized
from typing import Any, Protocol

from torch import Tensor

from tokenformer.train.image_workload import ImageWorkload
from tokenformer.train.options import Recipe
from tokenformer.train.task import Task
from tokenformer.train.text_workload import TextWorkload


class Workload(Protocol):
    unit: str
    """tokens or images"""

    @property
    def train(self) -> Sized: ...

    def first_model(self) -> Any: ...

    def task(self, model: Any) -> Task: ...

    def token_batches(self) -> Iterator[Tensor] | None:
        """Yield token ids [B, T] for a growth method that learns on data; None for images."""
        ...

    def preprocessor(self, model: Any) -> Any:
        """Return the tokenizer or image processor to export with the model."""
        ...


def make_workload(recipe: Recipe) -> Workload:
    return TextWorkload(recipe) if recipe.data.images is None else ImageWorkload(recipe)
