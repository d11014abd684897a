"""How `backend="auto"` picks a backend.

Measured on CPUs, forward and backward (`python -m benchmarks.operator`): `direct` is as fast as
the reference or faster from a few hundred rows on and saves a quarter as much; `streamed` takes a
third longer and saves almost nothing, so it is for scores that would fill the memory. With few rows
the reference is fastest, or without gradients, as in decoding, `native`; for one row without a
compiler `single_row`. On CPUs without instructions for half precision `direct` computes in fp32,
which is far faster. torch.compile fuses the reference by itself. `triton` has not been timed on a
GPU, so it is never picked.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tokenformer.ops.backends import native
from tokenformer.ops.backends.direct import has_slow_products
from tokenformer.ops.backends.interface import is_trained
from tokenformer.ops.backends.single_row import parts_of

FEW_ROWS = 64
MAX_SCORE_BYTES = 1 << 30
"""Scores of one call that `direct` may save."""


def choose(x: Tensor, key_tokens: Tensor, value_tokens: Tensor, scale: float | Tensor) -> str:
    rows = x.numel() // max(1, x.shape[-1])
    if not is_plain(x, key_tokens, value_tokens):
        return "reference"
    if rows < FEW_ROWS:
        if not is_trained(scale) and can_use_native(x, key_tokens, value_tokens):
            return "native"
        if parts_of(x, key_tokens, value_tokens) > 1:
            return "single_row"
        is_slow = has_slow_products(x.device.type, x.dtype)
        trained = is_trained(x, key_tokens, value_tokens, scale)
        return "direct" if is_slow and not trained else "reference"
    score_bytes = rows * key_tokens.shape[0] * x.dtype.itemsize
    if score_bytes > MAX_SCORE_BYTES and is_trained(x, key_tokens, value_tokens, scale):
        return "streamed"
    return "direct"


def can_use_native(x: Tensor, *matrices: Tensor) -> bool:
    """Whether `native` supports these rows and matrices, and no gradient is needed."""
    return is_plain(x, *matrices) and not is_trained(x, *matrices) and native.supports(x, *matrices)


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors in memory, outside of all transforms. Our kernels write to
    memory, support neither forward-mode AD nor batched or distributed tensors, and are invisible to
    the compiler and to dispatch modes such as torch's FLOP counter."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
        for tensor in tensors
    )
