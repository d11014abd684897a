"""The library of `kernels.cpp`, built by the machine's own compiler when it is first needed.

It takes a second or two, is for the very processor that it was built on, and is kept in the user's
cache. Where it cannot be built, nothing is lost but speed.
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

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno"]
# The first that the compiler takes: Apple's knows no OpenMP, GCC on Arm no -march=native. Vectors
# of 512 bits, which GCC takes where they are to be had, read memory at two thirds of the speed.
CHOICES = [
    ["-march=native", "-mprefer-vector-width=256", "-fopenmp"],
    ["-march=native", "-fopenmp"],
    ["-mcpu=native", "-fopenmp"],
    ["-mcpu=native"],
    [],
]
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "i8"}
"""Of the functions for tokens of that type."""

logger = logging.getLogger(__name__)

Pointer, Long, Float, Int = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class Rule(ctypes.Structure):
    _fields_ = (("theta", Int), ("is_tanh", Int), ("eps", Float))


class Tokens(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, Long) for name in ("n", "d_in", "d_out")),
        ("scale", Float),
    )


class Norm(ctypes.Structure):
    _fields_ = (("weight", Pointer), ("bias", Pointer), ("eps", Float), ("is_rms", Int))


class Block(ctypes.Structure):
    _fields_ = (
        *((name, Norm) for name in ("attention_norm", "ffn_norm")),
        *((name, Tokens) for name in ("q", "k", "v", "o", "ffn")),
        *((name, Pointer) for name in ("cached_keys", "cached_values")),
    )


class Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, Long)
            for name in ("width", "heads", "kv_heads", "head_dim", "rotary_dim", "seen", "room")
        ),
        ("scaling", Float),
        ("is_parallel", Int),
    )


class Work(ctypes.Structure):
    _fields_ = tuple((name, Pointer) for name in ("scores", "totals", "tops", "sums"))


ARGUMENTS = {
    "linear": [Pointer, Long, Long, Pointer, Pointer, Long, Pointer, Int],
    "pattention": [Pointer, Long, Pointer, Rule, Work, Pointer, Int],
    "step": [Pointer, Pointer, Long, Pointer, Rule, Pointer, Pointer, Int, Pointer, Work, Int],
}


@functools.cache
def function(name: str, dtype: torch.dtype) -> Any:
    found = getattr(library(), f"{name}_{SUFFIXES[dtype]}")
    found.restype, found.argtypes = None, ARGUMENTS[name]
    return found


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where it cannot be had."""
    try:
        return ctypes.CDLL(str(built()))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.info("no native code for decoding: %s", error)
        return None


def built() -> Path:
    """The library of this source, compiler and processor."""
    if os.name != "posix":
        raise OSError("it is built on Linux and macOS only")
    compiler = find_compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    maker = [SOURCE.read_bytes(), version, processor().encode(), repr((FLAGS, CHOICES)).encode()]
    target = cache() / f"native-{hashlib.sha256(b'|'.join(maker)).hexdigest()[:16]}.so"
    if target.exists():
        check_owner(target)
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / target.name
        for flags in CHOICES:
            command = [*compiler, *FLAGS, *flags, "-o", str(part), str(SOURCE)]
            made = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if made.returncode == 0:
                part.replace(target)  # whole or not at all, whoever else builds it meanwhile
                return target
    raise OSError(f"{compiler[0]}: {made.stderr.strip().partition(chr(10))[0]}")


def find_compiler() -> list[str]:
    """CXX, which may be a command of several words, or what there is; CXX=false for none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for words in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]) is not None:
            return words
    raise OSError(f"no C++ compiler {named[0] if named else ''}".rstrip())


def cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenformer"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)
    return folder


def check_owner(path: Path) -> None:
    """What lies there is run, so it must be the user's own."""
    about = path.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise OSError(f"{path} can be written to by others; it is not loaded")


def processor() -> str:
    """What `-march=native` depends on: a home may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(flags)])
