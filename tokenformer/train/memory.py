"""Memory of a training run: a lower bound, the amount used, and out-of-memory errors."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tokenformer.errors import TokenformerError
from tokenformer.models.block_configuration import BlockConfig
from tokenformer.train.options import RunOptions

FLOAT_BYTES = 4


class OutOfMemoryError(TokenformerError):
    """A training step does not fit in memory."""

    exit_code = 1


def least_activation_bytes(config: BlockConfig, length: int) -> int:
    """Return a lower bound on the bytes that one sequence keeps for the backward pass in fp32: the
    inputs of norms and projections, and the queries, keys, values and outputs of attention. The
    rest depends on the backend, see `models.accounting`."""
    norms = 1 if config.residual == "parallel" else 2
    stream = (norms + 2) * config.hidden_size
    attention = 2 * config.hidden_size + 2 * config.key_value_size
    return FLOAT_BYTES * length * config.num_hidden_layers * (stream + attention)


def check_memory(
    sample_bytes: int, micro_batch_size: int, run: RunOptions, device: torch.device
) -> None:
    """Raise for a micro-batch that cannot fit, before the system kills the process."""
    if run.activation_checkpointing:
        return  # it keeps a small part of these
    needed = micro_batch_size * sample_bytes // (1 if run.precision == "fp32" else 2)
    if needed > (free := free_bytes(device)):
        raise OutOfMemoryError(
            f"a micro-batch of {micro_batch_size:,} needs more than {needed / 1e9:,.1f} GB of "
            f"memory, {free / 1e9:,.1f} GB are free on the {device.type}; {remedy()}"
        )


def remedy() -> str:
    return "lower run.micro_batch_size (the global batch stays as it is) or run.batch_size"


def free_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or the free memory of the machine or container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = (
            int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
        )
    with suppress(OSError, ValueError):  # a container without a limit has "max"
        free = min(free, free_in_group(Path("/sys/fs/cgroup")))
    return free


def free_in_group(group: Path) -> int:
    """Return the free memory of a control group. It counts cached files as used, but drops them
    when memory is needed."""
    limit = int((group / "memory.max").read_text())
    used = int((group / "memory.current").read_text())
    with suppress(OSError, ValueError):
        rows = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        used -= sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))
    return min(limit, max(0, limit - used))


def used_bytes() -> int:
    """Return the peak memory of the GPU or, without one, of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def explained_memory(micro_batch_size: int, device: torch.device) -> Iterator[None]:
    """Turn a failed allocation in the block into an OutOfMemoryError that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # The CPU allocator has no exception class of its own.
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemoryError(
            f"{device.type} is out of memory with a micro-batch of {micro_batch_size:,}; {remedy()}"
        ) from None
