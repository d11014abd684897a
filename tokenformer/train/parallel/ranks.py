"""The ranks of a run: sharing values, and raising an error on all ranks when one fails."""

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
    """This process's rank in a group; a group of one without a process group.

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
        """Return the values of all ranks, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, value: T) -> T:
        """Return the value of rank 0."""
        if self.count == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    @contextmanager
    def together(self, task: str) -> Iterator[None]:
        """Raise on every rank if the block fails on one, a CheckpointError that starts with `task`.
        Otherwise the other ranks would wait for the failed one."""
        error: BaseException | None = None
        failed_rank = self.index
        try:
            yield
        except CheckpointException as caught:  # a BaseException, raised on all ranks
            failed_rank, (error, _) = next(iter(caught.failures.items()))
        except Exception as caught:
            error = interrupt_behind(caught) or caught
        problems = self.gather(None if error is None else (failed_rank, reason(error)))
        if error is not None and not isinstance(error, Exception):
            raise error  # Ctrl-C that torch or shutil replaced with an error of their own
        for rank, problem in filter(None, problems):
            where = f" (rank {rank})" if self.count > 1 else ""
            raise CheckpointError(f"{task}: {problem}{where}") from error


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the Ctrl-C whose handling raised `error`, as in the clean-up of shutil.rmtree."""
    context = error.__context__
    while context is not None and not isinstance(context, KeyboardInterrupt):
        context = context.__context__
    return context


def reason(error: BaseException) -> str:
    """Return the message of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    number = re.search(r"\(os error (\d+)\)", text)  # as safetensors reports system errors
    return os.strerror(int(number[1])) if number else text
