"""Implementations of pattention, by name. `reference` is in `ops/pattention.py`.

auto         picks one of the others by shape and need
direct       plain products, saves the scores
streamed     chunks of tokens, saves nothing of the size of the scores
single_row   one row on a CPU without a compiler
native       few rows on a CPU, without gradients, in compiled C++
triton       fused GPU kernels
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tokenformer.ops.backends import autograd
from tokenformer.ops.backends.autograd import KERNELS
from tokenformer.ops.backends.interface import Sizes
from tokenformer.ops.backends.native.few_rows import run_native
from tokenformer.ops.backends.single_row import run_single_row
from tokenformer.ops.theta import ThetaOptions

Backend = Callable[[Tensor, Tensor, Tensor, ThetaOptions], Tensor]
FAST_BACKENDS: dict[str, Backend] = {
    **{name: partial(autograd.run, name) for name in KERNELS},
    "single_row": run_single_row,
    "native": run_native,
}


def saved_bytes(kernel: str, theta: str, sizes: Sizes, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that a backend of `autograd.KERNELS` saves for the backward pass of one call, besides
    its inputs."""
    options = ThetaOptions(theta, float(sizes.tokens), "none", 0.0)
    saved = KERNELS[kernel](options).saved_tensors(sizes, dtype)
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in saved)
