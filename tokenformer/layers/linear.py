"""`nn.Linear` with native code for decoding on a CPU."""

import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.ops.backends.auto import can_use_native
from tokenformer.ops.backends.native import linear


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if can_use_native(x, self.weight):
            out = linear(x, self.weight)
            return out if self.bias is None else out + self.bias
        return F.linear(x, self.weight, self.bias)
