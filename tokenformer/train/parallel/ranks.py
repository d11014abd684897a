"""The processes that share a run, and how they come to one mind about a failure."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tokenformer.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """This process among its peers; alone where no process group was made.

    Every method but the constructor is collective: all ranks call it, in the same order.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        distributed = dist.is_available() and dist.is_initialized()
        self.index = dist.get_rank(group) if distributed else 0
        self.count = dist.get_world_size(group) if distributed else 1

    @property
    def first(self) -> bool:
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, value: T) -> T:
        """Rank 0's value."""
        if self.count == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    @contextmanager
    def together(self, task: str) -> Iterator[None]:
        """A block that fails on every rank if it fails on one, as a CheckpointError that opens with
        `task`. Otherwise the others would wait for the one that failed."""
        error: BaseException | None = None
        culprit = self.index
        try:
            yield
        except CheckpointException as caught:  # torch's, which is no Exception, raised on all ranks
            culprit, (error, _) = next(iter(caught.failures.items()))
        except Exception as caught:
            error = interrupt_behind(caught) or caught
        problems = self.gather(None if error is None else (culprit, reason(error)))
        if error is not None and not isinstance(error, Exception):
            raise error  # Ctrl-C, which torch or shutil replaced by an error of its own
        for rank, problem in filter(None, problems):
            where = f" (rank {rank})" if self.count > 1 else ""
            raise CheckpointError(f"{task}: {problem}{where}") from error


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The Ctrl-C during whose handling `error` was raised, as by shutil.rmtree in its clean-up."""
    context = error.__context__
    while context is not None and not isinstance(context, KeyboardInterrupt):
        context = context.__context__
    return context


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    number = re.search(r"\(os error (\d+)\)", text)  # how safetensors passes on the system's word
    return os.strerror(int(number[1])) if number else text
