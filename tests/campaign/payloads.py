"""The contents of hostile files: code that writes a canary, tensor files with false sizes, archives
and documents that expand to huge sizes."""

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Bomb:
    """Its pickle writes the canary when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def pickled(canary: Path) -> bytes:
    return pickle.dumps({"model": Bomb(canary)})


def torch_saved(canary: Path) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save({"model": Bomb(canary)}, stream)
    return stream.getvalue()


def python_code(canary: Path) -> str:
    return (
        f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
        "class Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    )


def tensor_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


NAME = "model.embed_tokens.weight"
TENSOR_FILES: dict[str, Callable[[Path], bytes]] = {
    "a pickle": pickled,
    "a torch archive": torch_saved,
    "a huge header": lambda _: tensor_file(b"{}", length=1 << 60),
    "a header of 90 MB that is not there": lambda _: tensor_file(b"{}", length=90_000_000),
    "a negative header": lambda _: tensor_file(b"{}", length=(1 << 64) - 8),
    "overlapping tensors": lambda _: tensor_file(
        {NAME: entry([4], 0, 16), "model.norm.weight": entry([4], 8, 24)}, bytes(24)
    ),
    "a tensor beyond the end": lambda _: tensor_file({NAME: entry([4], 0, 1 << 40)}, bytes(16)),
    "a shape that overflows": lambda _: tensor_file(
        {NAME: entry([1 << 62, 1 << 62], 0, 16)}, bytes(16)
    ),
    "a shape of terabytes": lambda _: tensor_file({NAME: entry([1 << 40], 0, 1 << 42)}, bytes(16)),
    "a header of brackets": lambda _: tensor_file(b'{"a":' + b"[" * 100_000),
    "tensors of no model": lambda _: tensor_file({"x": entry([4], 0, 16)}, bytes(16)),
    "another type": lambda _: tensor_file({NAME: entry([4], 0, 16, "I32")}, bytes(16)),
}
YAML_BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


def yaml_code(canary: Path) -> list[str]:
    return [
        f"run: !!python/object/apply:os.system ['touch {canary}']\n",
        f"run: !!python/object/new:os.system ['touch {canary}']\n",
        f"model: !!python/object/apply:subprocess.check_call [['touch', '{canary}']]\n",
        f"!!python/object/apply:open ['{canary}', w]\n",
    ]


YAML_DOCUMENTS: dict[str, str] = {
    "nested aliases": YAML_BOMB,
    "nested aliases in a section": "run:\n"
    + YAML_BOMB.replace("a", "  a", 1).replace("\na", "\n  a"),
    "an alias of itself": "run: &a\n  log_to: *a\n",
    "brackets": "run: " + "[" * 20_000,
    "a class path": "model:\n  class_path: subprocess.Popen\n  init_args:\n    args: [touch, x]\n",
}


def gzip_bomb(size: int) -> bytes:
    """Return `size` bytes of text, compressed a thousandfold."""
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=9) as file:
        for _ in range(size >> 20):
            file.write(b"a" * (1 << 20))
    return stream.getvalue()


def zip_bomb(size: int) -> bytes:
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.txt", "w") as file,
    ):
        for _ in range(size >> 20):
            file.write(b"a" * (1 << 20))
    return stream.getvalue()


def zip_outside(canary: Path) -> bytes:
    """Return an archive with members outside the folder it is unpacked to."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in (str(canary), f"../{canary.name}", f"a/../../{canary.name}", "plain.txt"):
            archive.writestr(name, "some text of a document " * 50)
    return stream.getvalue()


def png(width: int, height: int) -> bytes:
    """Return a black image with one bit per pixel: 18 MB of pixels in 18 kB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    about = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
