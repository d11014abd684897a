"""Compiles the C++ sources on first use and loads the library.

Compiling takes a few seconds. The library is built for this machine's processor and kept in the
user's cache. Without it, decoding and training on a CPU work, but are slower.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from tokenformer.files import cache_folder

SOURCES = [Path(__file__).with_name(f"{name}.cpp") for name in ("decode", "fused", "rotary")]
HEADERS = [
    Path(__file__).with_name(f"{name}.h")
    for name in ("normal", "pattention", "quantized", "routed", "rows")
]
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast"]
# GCC vectorizes rounding and selection only without errno and floating-point traps.
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
# The first set that the compiler accepts is used: Apple's has no OpenMP, GCC on Arm no
# -march=native. The 512-bit vectors that GCC prefers read memory at two thirds of the speed.
CHOICES = [
    ["-march=native", "-mprefer-vector-width=256", "-fopenmp"],
    ["-march=native", "-fopenmp"],
    ["-mcpu=native", "-fopenmp"],
    ["-mcpu=native"],
    [],
]
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "i4"}
"""Suffix of the functions for tokens of a dtype; uint8 holds packed 4-bit numbers."""
KINDS = {dtype: number for number, dtype in enumerate(SUFFIXES)}
"""Number of a dtype in the native code."""

logger = logging.getLogger(__name__)

Pointer, Float = ctypes.c_void_p, ctypes.c_float
Int, Long, Int64 = ctypes.c_int, ctypes.c_long, ctypes.c_int64


class UntrustedError(OSError):
    """The cache folder is writable by other users, who could have put code in it."""


class Theta(ctypes.Structure):
    _fields_ = (("theta", Int), ("is_tanh", Int), ("eps", Float))


class Matrix(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("rows", "scales")),
        *((name, Long) for name in ("n", "width")),
        ("kind", Int),
    )


class Routing(ctypes.Structure):
    _fields_ = (
        *((name, Long) for name in ("size", "active")),
        *((name, Matrix) for name in ("router", "bias")),
        ("is_gated", Int),
        *((name, Pointer) for name in ("groups", "gates")),
        ("root", Matrix),
        ("norms", Pointer),
        ("shift", Matrix),
    )


class Tokens(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, Long) for name in ("n", "d_in", "d_out")),
        ("scale", Float),
        ("routing", Routing),
    )


class Norm(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("weight", "bias")),
        ("eps", Float),
        *((name, Int) for name in ("is_rms", "is_half")),
    )


class Block(ctypes.Structure):
    _fields_ = (
        *((name, Norm) for name in ("attention_norm", "ffn_norm")),
        *((name, Tokens) for name in ("q", "k", "v", "o", "ffn")),
        *((name, Pointer) for name in ("cached_keys", "cached_values")),
    )


class Shape(ctypes.Structure):
    _fields_ = (
        *((name, Long) for name in ("width", "heads", "kv_heads", "head_dim", "rotary_dim")),
        ("scaling", Float),
        *((name, Int) for name in ("is_parallel", "is_half")),
    )


class Ends(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("embedding", "positions", "head")),
        ("norm", Norm),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, Long) for name in ("rows", "length", "capacity")),
        *((name, Pointer) for name in ("ids", "positions")),
        ("offset", Long),
        *((name, Pointer) for name in ("starts", "cos", "sin", "hidden", "logits", "best")),
    )


class FusedGroup(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("values", "out", "grad", "dvalues")),
        *((name, Int64) for name in ("n", "d_out")),
        *((name, Float) for name in ("root", "eps")),
        ("is_tanh", Int),
    )


MAX_GROUPS = 3


class FusedLayers(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("gemm", "x", "keys", "scores", "stats")),
        *((name, Int64) for name in ("rows", "d_in", "n", "block_rows")),
        *((name, Int) for name in ("count", "threads")),
        ("groups", FusedGroup * MAX_GROUPS),
    )


class Work(ctypes.Structure):
    _fields_ = tuple(
        (name, Pointer) for name in ("scores", "totals", "tops", "sums", "chosen", "gates")
    )


ARGUMENTS = {
    "linear": [Pointer, Long, Long, Pointer, Pointer, Long, Pointer, Int],
    "pattention": [Pointer, Long, Pointer, Theta, Work, Pointer, Int],
    "decode": [Pointer, Long, Pointer, Pointer, Pointer, Theta, Int, Pointer, Work, Int],
    "rotary": [*[Pointer] * 2, *[Int64] * 5, *[Pointer] * 2, Int64, Float, Int],
    "fused_forward": [Pointer, Pointer],
    "fused_backward": [Pointer, Int64, *[Pointer] * 5],
}
RESULTS = {"decode": Int}


@functools.cache
def function(name: str, dtype: torch.dtype | None = None) -> Any:
    """Return a function of the library, for tokens of this dtype where there is one for each."""
    found = getattr(library(), name if dtype is None else f"{name}_{SUFFIXES[dtype]}")
    found.restype, found.argtypes = RESULTS.get(name), ARGUMENTS[name]
    return found


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if it cannot be built."""
    try:
        return ctypes.CDLL(str(built()))
    except UntrustedError as error:
        logger.warning("native CPU kernels are off, so decoding and training are slower: %s", error)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.info("native CPU kernels are not available: %s", error)
    return None


def built() -> Path:
    """Return the library for this source, compiler and processor; build it if needed."""
    if os.name != "posix":
        raise OSError("they are built on Linux and macOS only")
    compiler = find_compiler()
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, check=True, timeout=120
    ).stdout
    sources = [source.read_bytes() for source in (*SOURCES, *HEADERS)]
    inputs = [*sources, version, processor().encode(), repr((FLAGS, CHOICES)).encode()]
    target = cache() / f"native-{hashlib.sha256(b'|'.join(inputs)).hexdigest()[:16]}.so"
    if target.exists() and is_private(target):
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / target.name
        for flags in CHOICES:
            command = [*compiler, *FLAGS, *flags, "-o", str(part), *map(str, SOURCES)]
            made = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if made.returncode == 0:
                part.chmod(0o755)  # under umask 002 it would be writable by the group
                part.replace(target)  # atomic: other processes may be building it too
                return target
    raise OSError(f"{compiler[0]}: {made.stderr.strip().partition(chr(10))[0]}")


def find_compiler() -> list[str]:
    """Return the command in CXX, or the first compiler found. CXX=false disables native code."""
    named = shlex.split(os.environ.get("CXX", ""))
    for words in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]) is not None:
            return words
    raise OSError(f"no C++ compiler {named[0] if named else ''}".rstrip())


def cache() -> Path:
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise UntrustedError(
            f"{folder} belongs to another user or others can write to it, so code in it is not "
            f"run; chown it to yourself, and: chmod go-w {folder}"
        )
    return folder


def is_private(path: Path) -> bool:
    """Whether the path belongs to the user and nobody else may write to it."""
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def processor() -> str:
    """Return what `-march=native` depends on: different machines may share a home folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(flags)])
