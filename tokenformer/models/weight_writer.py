"""Writing the weights of a model one tensor at a time, as the files that `save_pretrained` writes.

Only the tensor being written is in memory. It is hashed by a second thread while it is written, so
its file is not read again for checksums.json.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from tokenformer.models.weight_files import DTYPES, INDEX, SHARD, WEIGHTS

MAX_SHARD_SIZE = "50GB"
"""The default of `save_pretrained`."""
BLOCK, PREFIX = 1 << 22, 1 << 6
"""Bytes that are written at once, and that are searched first for something other than zero."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightWriter:
    """Writes weight files. Call `write` with the tensors in the order of `names`."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` are on the meta device: the name, shape and dtype of all that will come."""
        self.folder, self.tensors = folder, tensors
        self.split = split_torch_state_dict_into_shards(
            dict(tensors),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_SHARD_SIZE,
        )
        self.files = {
            name: sorted(names, key=lambda tensor: (-tensors[tensor].itemsize, tensor))
            for name, names in self.split.filename_to_tensors.items()
        }
        """Tensor names by file, in the order of the safetensors library: larger dtypes first, so
        that all are aligned."""

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write all files and return the SHA-256 of each. They replace the weights of an earlier
        save when all are complete."""
        source = iter(tensors)
        hashes: dict[str, str] = {}
        try:
            for file in self.files:
                hashes[file] = self.write_file(file, source)
        except BaseException:
            for file in self.files:
                with suppress(OSError):
                    self.unfinished(file).unlink()
            raise
        for path in self.folder.iterdir():
            if path.name in (WEIGHTS, INDEX) or SHARD.fullmatch(path.name):
                path.unlink()
        for file in self.files:
            self.unfinished(file).replace(self.folder / file)
        if self.split.is_sharded:
            self.write_index()
        return hashes

    def write_file(self, file: str, source: Iterator[tuple[str, Tensor]]) -> str:
        header, digest = self.header(file), hashlib.sha256()
        digest.update(header)
        with (
            self.unfinished(file).open("wb") as stream,
            ThreadPoolExecutor(1) as hasher,
            ThreadPoolExecutor(1) as flusher,
        ):
            stream.write(header)
            flushed: Future[None] | None = None
            for name in self.files[file]:
                given, tensor = next(source)
                expected = self.tensors[name]
                if (given, tensor.shape, tensor.dtype) != (name, expected.shape, expected.dtype):
                    raise ValueError(f"expected {name}, {expected.shape}, {expected.dtype}")
                data: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
                hashed = hasher.submit(digest.update, data)
                write_sparse(stream, data)
                hashed.result()
                if (
                    flushed is None or flushed.done()
                ):  # the disk works while the next tensors are made
                    flushed = flusher.submit(os.fsync, stream.fileno())
            stream.truncate()  # to the position, which may be after a hole
        return digest.hexdigest()

    def header(self, file: str) -> bytes:
        """Return the beginning of a safetensors file, up to the data of the first tensor."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self.files[file]:
            start, end = end, end + self.tensors[name].nbytes
            entries[name] = {
                "dtype": DTYPE_NAMES[self.tensors[name].dtype],
                "shape": list(self.tensors[name].shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def unfinished(self, file: str) -> Path:
        return self.folder / f".{file}.unfinished"

    def write_index(self) -> None:
        parameters = sum(tensor.numel() for tensor in self.tensors.values())
        metadata = {"total_parameters": parameters, **self.split.metadata}
        index = {"metadata": metadata, "weight_map": self.split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.folder / INDEX).write_text(text, encoding="utf-8")


def write_sparse(stream: BinaryIO, data: Any) -> None:
    """Write an array of bytes, with holes for blocks of zeros: they read as zeros and take neither
    time nor space, on file systems that have them. Half of the tokens of a growth by `zero` are
    zero keys."""
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        if block[:PREFIX].max() == 0 and block.max() == 0:
            stream.seek(len(block), os.SEEK_CUR)
        else:
            stream.write(block)
