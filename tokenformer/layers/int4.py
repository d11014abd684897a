"""Pattention layers with 4-bit tokens: groups of 32 numbers share a scale, 4.5 bits per weight.

A group of keys is 32 inputs of a token. A group of values is one output of 32 tokens, so that a sum
over the tokens of a group is one of integers. Numbers are packed in blocks of 8 groups, in the
order in which `ops/backends/native/quantized.h` reads them. Inputs, tokens and outputs are padded
with zeros to multiples of 256, 32 and 8.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.layers.pattention import Pattention
from tokenformer.layers.quantized import QuantizedPattention, fixed

GROUP = 32
BLOCK = 8
"""Groups that are packed together."""
STEPS = [tenths / 10 for tenths in range(66, 92, 2)]
"""Scales to try, as the number of steps to the largest number of the group."""


def quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize groups [..., 32] to int8 in -8..7 and bf16 scales [...]. Of some scales, the one
    with the least squared error is taken."""
    groups = groups.detach().float()
    # The number that is largest in absolute value becomes about -8, of which there are more than 7.
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    size = extreme.abs().masked_fill(extreme == 0, 1)  # squares of other sizes could overflow
    best, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
    for steps in STEPS:
        scales = (extreme / -steps).bfloat16().float()
        error = (round_to_steps(groups, scales) * scales - groups) / size
        error = error.square().sum(-1, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return round_to_steps(groups, best).to(torch.int8), best.squeeze(-1).bfloat16()


def round_to_steps(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales.masked_fill(scales == 0, 1)).round().clamp(-8, 7)


def pack(numbers: Tensor) -> Tensor:
    """Pack numbers [..., 8, 32] in -8..7 into bytes [..., 128]."""
    shape = numbers.shape[:-2]
    shifted = (numbers + 8).to(torch.uint8).view(*shape, BLOCK, 4, 2, 4)  # g, m, half, k
    low, high = shifted.unbind(-2)
    return (low | high << 4).transpose(-3, -2).reshape(*shape, BLOCK * GROUP // 2)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: int8 [..., 8, 32]."""
    shape = packed.shape[:-1]
    bytes_ = packed.view(*shape, 4, BLOCK, 4).transpose(-3, -2)  # g, m, k
    numbers = torch.stack([bytes_ & 15, bytes_ >> 4], -2).to(torch.int8) - 8
    return numbers.view(*shape, BLOCK, GROUP)


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Pad a matrix with zeros to multiples of `rows` and `columns`."""
    return F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))


class Int4Pattention(QuantizedPattention):
    """Blocks of 128 bytes hold 8 groups of 32 numbers:

    key_tokens    [n, blocks x 128], key_scales [n, blocks x 8]: groups of inputs
    value_tokens  [n / 32, blocks x 128], value_scales [n / 32, blocks x 8]: an output each
    """

    scales_dtype = torch.bfloat16

    def __init__(self, layer: Pattention) -> None:
        super().__init__(layer)
        keys = padded(layer.key_tokens, 1, BLOCK * GROUP).unflatten(1, (-1, BLOCK, GROUP))
        values = padded(layer.value_tokens, GROUP, BLOCK)
        values = values.unflatten(0, (-1, GROUP)).unflatten(2, (-1, BLOCK)).permute(0, 2, 3, 1)
        for name, groups in (("key", keys), ("value", values)):
            numbers, scales = quantize_groups(groups)
            setattr(self, f"{name}_tokens", fixed(pack(numbers).flatten(1)))
            setattr(self, f"{name}_scales", fixed(scales.flatten(1)))

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = self.groups("key", dtype).flatten(1)
        values = self.groups("value", dtype).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)
        return keys[:, : self.in_features], values[: self.num_tokens, : self.out_features]

    def groups(self, name: str, dtype: torch.dtype) -> Tensor:
        """Dequantized numbers, [rows, blocks, 8, 32]."""
        packed, scales = getattr(self, f"{name}_tokens"), getattr(self, f"{name}_scales")
        numbers = unpack(packed.unflatten(1, (-1, BLOCK * GROUP // 2)))
        return numbers.to(dtype) * scales.to(dtype).unflatten(1, (-1, BLOCK))[..., None]
