"""The backend `triton` without a GPU: errors, compilation, and the interpreter."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenformer.installation import install_hint
from tokenformer.ops import THETAS, backends, pattention
from tokenformer.ops.backends import triton
from tokenformer.ops.theta import ThetaOptions

ROOT = Path(__file__).parent.parent.parent
CHECKS = Path(__file__).parent / "triton_checks.py"
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
MOST_SHARED = 99 << 10
"""Bytes of a block on the smaller GPUs since 2020."""

with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason=f"triton is not installed: {install_hint('gpu')}",
)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in ((5, 4), (9, 4), (9, 3))]


def in_a_process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Whether triton is interpreted is settled when it is imported, and anyone may import it: torch
    does, and so may another test of this worker."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_triton_is_imported_only_when_it_is_named():
    code = (
        "import sys, torch, tokenformer; x = torch.randn(100, 4); "
        "tokenformer.pattention(x, torch.randn(9, 4), torch.randn(9, 3)); "
        "assert 'tokenformer.ops.backends.triton' in sys.modules; "
        "assert 'tokenformer.ops.backends.triton_kernels' not in sys.modules"
    )
    done = in_a_process("-c", code)
    assert done.returncode == 0, done.stderr


def test_without_triton_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "tokenformer.ops.backends.triton_kernels", raising=False)
    monkeypatch.delattr(backends, "triton_kernels", raising=False)
    needed = re.escape(install_hint("gpu"))
    with pytest.raises(RuntimeError, match=f"backend='triton'.*{needed}.*'auto'"):
        pattention(*inputs(), backend="triton")


def test_double_precision_is_refused():
    with pytest.raises(TypeError, match=r"float32, bfloat16 or float16, not torch.float64.*'auto'"):
        pattention(*inputs(torch.float64), backend="triton")


@pytest.mark.slow
@with_triton
def test_without_a_gpu_it_is_refused():
    code = (
        "import torch, tokenformer; "
        "tokenformer.pattention(*map(torch.randn, ((5, 4), (9, 4), (9, 3))), backend='triton')"
    )
    done = in_a_process("-c", code, TRITON_INTERPRET="0")
    assert "RuntimeError: backend='triton' needs tensors on a GPU, got cpu" in done.stderr


@pytest.mark.slow
@with_triton
def test_equals_the_reference():
    """On a GPU if there is one, else in the interpreter."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS))
    done = in_a_process(*words, TRITON_INTERPRET="0" if torch.cuda.is_available() else "1")
    assert done.returncode == 0, done.stdout + done.stderr


class Compiled:
    """Replaces the kernels on a machine without a GPU: compiles every launch."""

    INTERPRETED = True

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.programs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        from tokenformer.ops.backends import triton_kernels

        compiled = partial(self.compile, getattr(triton_kernels, name))
        return defaultdict(lambda: compiled)  # of any grid

    def compile(self, kernel: Any, *args: Any, num_warps: int = 4, **options: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        types, constants, multiples = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = given[name]
            if isinstance(value, Tensor):
                types[name] = TYPES[value.dtype]
            elif name in options or value is None or value == 1:  # as a launch would have it
                types[name], constants[(place,)] = "constexpr", value
            else:
                types[name] = "i32"
            if types[name] != "constexpr" and (isinstance(value, Tensor) or value % 16 == 0):
                multiples[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, types, constants, multiples)
        target = GPUTarget("cuda", self.generation, 32)
        options = {"num_warps": num_warps}
        self.programs.append(triton.compile(source, target=target, options=options))


@pytest.mark.slow
@with_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing to compile")
@pytest.mark.parametrize(
    ("generation", "dtype", "approximate"),
    [(80, torch.float32, "none"), (90, torch.bfloat16, "tanh")],
)
@pytest.mark.parametrize("theta", list(THETAS))
def test_compiles_for_gpus(theta, generation, dtype, approximate, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = Compiled(generation)
    monkeypatch.setattr(triton, "programs", lambda: compiled)
    x, keys, values = (torch.zeros(100, width, dtype=dtype) for width in (768, 768, 1024))
    kernel = triton.Triton(ThetaOptions(theta, 100.0, approximate, 0.0))
    out, kept = kernel.forward(x, keys, values)
    kernel.backward(out, x, keys, values, kept)
    assert len(compiled.programs) == 6
    for program in compiled.programs:
        assert program.metadata.shared <= MOST_SHARED
        assert "tf32" not in program.asm["ptx"]
        assert ("mma" in program.asm["ptx"]) == (dtype != torch.float32)
