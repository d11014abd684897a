"""The data and models of a run: the interface of text, image and image-text recipes."""

from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tokenformer.train.adapter_workload import AdapterWorkload, data_workload
from tokenformer.train.image_text_workload import ImageTextWorkload
from tokenformer.train.options import Recipe
from tokenformer.train.task import Task


class Workload(Protocol):
    unit: str
    """tokens, images or samples"""
    export_name: str
    """The folder in the run that `export` writes: model, or adapter."""

    @property
    def train(self) -> Sized: ...

    def first_model(self) -> Any: ...

    def saved_model(self, state: dict[str, Any]) -> Any:
        """Return the model of a checkpoint's state, whose tensors the checkpoint fills."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint's state has besides that of the loop, as JSON values."""
        ...

    def notes(self, model: Any) -> list[str]:
        """Return lines to print before training starts."""
        ...

    def task(self, model: Any) -> Task: ...

    def export(self, model: Any, folder: Path) -> None:
        """Write what was trained to a folder, atomically. Collective."""
        ...

    def token_batches(self) -> Iterator[Tensor] | None:
        """Yield token ids [B, T] for a growth method that learns on data; None for images."""
        ...

    def preprocessor(self, model: Any) -> Any:
        """Return the tokenizer or image processor to export with the model."""
        ...


def make_workload(recipe: Recipe) -> Workload:
    if recipe.data.image_text is not None:
        return ImageTextWorkload(recipe)
    return data_workload(recipe) if recipe.adapter.method is None else AdapterWorkload(recipe)
