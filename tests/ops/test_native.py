"""Native code for a few rows against the reference, and fallbacks without a compiler."""

import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.processes import LIMIT
from tokenformer.layers import Linear, Pattention
from tokenformer.layers.int8 import Int8Linear, Int8Pattention
from tokenformer.ops import THETAS, pattention
from tokenformer.ops.backends import auto
from tokenformer.ops.backends.direct import has_slow_products
from tokenformer.ops.backends.native import few_rows, linear
from tokenformer.ops.backends.native.library import library

needs_compiler = pytest.mark.skipif(library() is None, reason="no C++ compiler")
thetas = pytest.mark.parametrize("theta", list(THETAS))


@pytest.mark.skipif(
    shutil.which("c++") is None or "CXX" in os.environ, reason="no C++ compiler, or another one"
)
def test_a_compiler_that_is_there_builds_the_library():
    """Without it every test of native code would be skipped."""
    assert library() is not None


@pytest.fixture(autouse=True)
def threads_for_anything(monkeypatch: pytest.MonkeyPatch):
    """Three threads, also for tiny shapes; more than some have tokens."""
    monkeypatch.setattr(few_rows, "threads_for", lambda size: 3)
    with torch.no_grad():
        yield


def draw(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_true(found: Tensor, inputs: list[Tensor], **options) -> None:
    """Within some roundings of the scores, of what GELU is taken of, and of what is added up, of
    float64; or as near to it as the plain formula."""
    x, keys, values = (t.double() for t in inputs)
    given = {"theta": "l2_gelu", "approximate": "none", "eps": 0.0, "scale_tokens": None, **options}
    scale = given["scale_tokens"] or len(keys)

    def weights(scores: Tensor) -> Tensor:
        return THETAS[given["theta"]](scores, scale, given["approximate"], given["eps"])

    assert found.dtype == inputs[0].dtype
    # Tokens in bf16 are exact numbers, and sums of them are in fp32; the output is rounded again.
    rounding = torch.finfo(torch.float32).eps
    scores, slack = x @ keys.T, 8 * rounding * (x.abs() @ keys.abs().T)
    truth = weights(scores) @ values
    moved = [(weights(scores + d) - weights(scores)).abs() @ values.abs() for d in (slack, -slack)]
    summed = 8 * rounding * (weights(scores).abs() @ values.abs())
    # GELU has as many digits after the point as its input, also where it is next to nothing.
    summed += 4 * rounding * (gelu_inputs(scores, scale, given).abs() @ values.abs())
    if given["theta"] == "softmax":  # its weights have the digits that the largest score has left
        summed += 2 * slack.amax(-1, keepdim=True) * (weights(scores).abs() @ values.abs())
    last = torch.finfo(found.dtype).eps * truth.abs()
    plain = pattention(*inputs, backend="reference", **options).double()
    error, usual = ((t.double() - truth).abs() for t in (found, plain))
    assert found.shape == truth.shape
    assert (error <= moved[0] + moved[1] + summed + last + 2 * usual.max()).all(), (error, usual)


def gelu_inputs(scores: Tensor, scale: float, given: dict) -> Tensor:
    """What GELU is taken of, times what its output is multiplied with."""
    if given["theta"] == "softmax":
        return torch.zeros_like(scores)
    normed = scores
    if given["theta"] == "gelu_l2":
        normed = torch.nn.functional.gelu(scores, approximate=given["approximate"])
    order = 1 if given["theta"] == "l1_gelu" else 2
    norm = torch.linalg.vector_norm(normed, order, dim=-1, keepdim=True) + given["eps"]
    return (scores * scale ** (1 / order) / norm).nan_to_num(0.0, 0.0, 0.0)


@needs_compiler
@settings(max_examples=200, deadline=None)
@given(
    leading=st.sampled_from([(), (1,), (1, 1), (2,), (3,), (2, 4), (7,), (11,), (4, 4)]),
    d_in=st.integers(1, 70),
    n=st.integers(1, 90),
    d_out=st.integers(1, 70),
    seed=st.integers(0, 2**16),
    theta=st.sampled_from(list(THETAS)),
    approximate=st.sampled_from(["none", "tanh"]),
    scale=st.none() | st.floats(0.5, 100.0),
    eps=st.sampled_from([0.0, 1e-2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_odd_shapes(leading, d_in, n, d_out, seed, theta, approximate, scale, eps, dtype):
    inputs = draw((*leading, d_in), (n, d_in), (n, d_out), seed=seed, dtype=dtype)
    options = {"scale_tokens": scale, "theta": theta, "approximate": approximate, "eps": eps}
    found = pattention(*inputs, backend="native", **options)
    assert_true(found, inputs, **options)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 4, 9, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_lines_and_tiles(rows, dtype):
    """Wide rows, which are read a cache line at a time, with and without a rest."""
    for d_in, d_out in ((256, 128), (200, 141)):
        inputs = draw((rows, d_in), (67, d_in), (67, d_out), dtype=dtype)
        assert_true(pattention(*inputs, backend="native"), inputs)


@needs_compiler
@thetas
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_many_tokens(theta, rows):
    inputs = draw((rows, 32), (40_000, 32), (40_000, 16))
    found = pattention(*inputs, backend="native", theta=theta)
    assert_true(found, inputs, theta=theta)


@needs_compiler
@thetas
def test_zero_rows_and_nan(theta):
    x, keys, values = draw((4, 6), (30, 6), (30, 5))
    x[1] = 0
    found = pattention(x, keys, values, backend="native", theta=theta)
    assert_true(found, [x, keys, values], theta=theta)
    x[2, 3] = torch.nan
    found = pattention(x, keys, values, backend="native", theta=theta)
    assert found.isnan().any(-1).tolist() == [False, False, True, False]


@needs_compiler
def test_strides_of_rows():
    x, keys, values = draw((5, 12), (30, 6), (30, 5))
    inputs = [x[::2, ::2], keys, values]
    assert_true(pattention(*inputs, backend="native"), inputs)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix(dtype):
    x, weight = draw((2, 1, 70), (33, 70), dtype=dtype)
    wanted = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(linear(x, weight), wanted, rtol=1e-2, atol=1e-4)


@needs_compiler
def test_a_row_of_another_width_is_refused_as_ever():
    layer, small = Linear(8, 20, bias=False), Int8Linear(Linear(8, 20, bias=False))
    for width in (4, 16):
        for module in (layer, small):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                module(torch.ones(1, width))
        with pytest.raises(ValueError, match="last dimension of x"):
            Int8Pattention(Pattention(8, 8, 20))(torch.ones(1, width))


@needs_compiler
def test_a_traced_layer_computes():
    layer = Pattention(8, 8, 20).requires_grad_(False)
    x, other = torch.randn(2, 8), torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(other), layer(other))


@needs_compiler
def test_auto_takes_it_only_where_it_can():
    x, keys, values = draw((2, 6), (30, 6), (30, 5))

    def chosen(*inputs: Tensor) -> str:
        return auto.choose(*inputs, 30.0)

    assert chosen(x, keys, values) == "native"
    assert chosen(x.double(), keys.double(), values.double()) == "reference"
    in_fp32 = "direct" if has_slow_products("cpu", torch.float16) else "reference"
    assert chosen(x.half(), keys.half(), values.half()) == in_fp32
    assert chosen(x.repeat(9, 1), keys, values) == "reference", "more rows than it is for"
    assert chosen(x, keys.T.contiguous().T, values) == "reference"
    assert chosen(x[:0], keys, values) == "reference"
    with torch.autocast("cpu"):
        assert chosen(x, keys, values) == "reference"
    with FlopCounterMode(display=False) as counter:
        pattention(x, keys, values)
    assert counter.get_total_flops() == 2 * 2 * 30 * (6 + 5), "what counts FLOPs sees them"
    with torch.enable_grad():
        assert chosen(x, keys, values) == "native", "nothing here is trained"
        assert chosen(x, keys.requires_grad_(), values) == "reference"
        with pytest.raises(ValueError, match="without gradients"):
            pattention(x, keys, values, backend="native")


SCRIPT = textwrap.dedent(
    """
    import torch, tokenformer
    from tokenformer.ops.backends.native.library import library
    torch.manual_seed(0)
    x, keys, values = torch.randn(1, 8), torch.randn(20, 8), torch.randn(20, 8)
    with torch.no_grad():
        found = tokenformer.pattention(x, keys, values)
        wanted = tokenformer.pattention(x, keys, values, backend="reference")
    torch.testing.assert_close(found, wanted)
    print(library() is not None)
    """
)


def start(folder: Path, compiler: str | None = None) -> "subprocess.Popen[str]":
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    environment.pop("CXX", None)
    if compiler is not None:
        environment["CXX"] = compiler
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a process wrote."""
    try:
        return process.communicate(timeout=LIMIT)
    finally:
        process.kill()


@pytest.mark.slow
@needs_compiler
def test_processes_that_build_it_at_once(tmp_path):
    processes = [start(tmp_path) for _ in range(2)]
    for process in processes:
        out, errors = ended(process)
        assert (process.returncode, out.strip()) == (0, "True"), errors
    assert len(list((tmp_path / "tokenformer").iterdir())) == 1, "one library, nothing left over"


@pytest.mark.slow
@needs_compiler
def test_a_compiler_of_several_words(tmp_path):
    process = start(tmp_path, "env c++ -w")
    out, errors = ended(process)
    assert (process.returncode, out.strip()) == (0, "True"), errors


@needs_compiler
def test_a_library_that_others_may_write_is_not_loaded(tmp_path):
    (tmp_path / "tokenformer").mkdir()
    (tmp_path / "tokenformer").chmod(0o777)
    process = start(tmp_path)
    out, errors = ended(process)
    assert (process.returncode, out.strip()) == (0, "False"), errors
    assert f"chmod go-w {tmp_path / 'tokenformer'}" in errors
    assert errors.count("\n") == 1


@pytest.fixture
def group_umask():
    """Files are writable by the group, as where every user has a group of their own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.slow
@needs_compiler
def test_a_library_built_under_umask_002_is_loaded_again(tmp_path, monkeypatch, group_umask):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert library.__wrapped__() is not None
    (file,) = (tmp_path / "tokenformer").iterdir()
    assert not file.stat().st_mode & 0o022
    made = file.stat().st_ino
    assert library.__wrapped__() is not None
    assert file.stat().st_ino == made, "built once"
    file.chmod(0o775)  # as older versions left it
    assert library.__wrapped__() is not None
    assert not file.stat().st_mode & 0o022
    assert file.stat().st_ino != made, "what others could write to is built again"


@pytest.mark.parametrize(
    "compiler",
    [
        "no-such-compiler",
        "false",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("true", " ", '"')),
    ],
)
def test_without_a_compiler_nothing_is_lost_but_speed(tmp_path, compiler):
    """One that is not there, one that fails, one that writes nothing, and no words."""
    process = start(tmp_path, compiler)
    out, errors = ended(process)
    built = str(compiler == " " and library() is not None)  # as if none were named
    assert (process.returncode, out.strip()) == (0, built), errors
    assert not errors


def test_a_home_that_cannot_be_written_to(tmp_path):
    (tmp_path / "tokenformer").write_text("a file where the folder would be")
    process = start(tmp_path)
    out, errors = ended(process)
    assert (process.returncode, out.strip()) == (0, "False"), errors
