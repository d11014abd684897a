"""Which backend `auto` is.

Measured on CPUs, forward and backward (`python -m benchmarks.operator`): `direct` is as fast as
the plain formula or faster from a few hundred rows on, and keeps a third as much; `streamed` takes
a third longer than that and keeps next to nothing, so it is for scores that would fill the memory.
Few rows are fastest by the plain formula or, without gradients, as in decoding, by `native`; a
single one, where that cannot be, by `vector`. torch.compile fuses the passes of the formula by
itself. `triton` is named, never chosen, until timed on a GPU.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tokenformer.ops.native import suits
from tokenformer.ops.rules import is_trained
from tokenformer.ops.vector import parts_of

FEW_ROWS = 64
MOST_SCORE_BYTES = 1 << 30
"""Of one call; beyond, they are not kept."""


def choose(x: Tensor, key_tokens: Tensor, value_tokens: Tensor, scale: float | Tensor) -> str:
    rows = x.numel() // max(1, x.shape[-1])
    if not plain(x, key_tokens, value_tokens):
        return "reference"
    if rows < FEW_ROWS:
        if not is_trained(scale) and takes_native(x, key_tokens, value_tokens):
            return "native"
        return "vector" if parts_of(x, key_tokens, value_tokens) > 1 else "reference"
    score_bytes = rows * key_tokens.shape[0] * x.dtype.itemsize
    if score_bytes > MOST_SCORE_BYTES and is_trained(x, key_tokens, value_tokens, scale):
        return "streamed"
    return "direct"


def takes_native(x: Tensor, *matrices: Tensor) -> bool:
    """Whether native code may and can take these rows over these matrices."""
    return plain(x, *matrices) and not is_trained(x, *matrices) and suits(x, *matrices)


def plain(*tensors: Tensor) -> bool:
    """Whether these are tensors with memory, outside of all transforms: kernels by hand write to
    memory, know no forward derivatives, batched or distributed tensors, and are not seen by the
    compiler or by what listens to torch's operators, as its FLOP counter does."""
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
