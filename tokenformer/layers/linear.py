"""A matrix as a layer, `nn.Linear` but for decoding on a CPU, where it is as fast as it is read."""

import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.ops.choice import takes_native
from tokenformer.ops.native import linear


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if takes_native(x, self.weight):
            out = linear(x, self.weight)
            return out if self.bias is None else out + self.bias
        return F.linear(x, self.weight, self.bias)
