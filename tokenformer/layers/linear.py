"""A matrix as a layer, `nn.Linear` but for decoding on a CPU, where it is as fast as it is read."""

import torch.nn.functional as F
from torch import Tensor, nn

from tokenformer.ops.choice import plain
from tokenformer.ops.native import linear, suits
from tokenformer.ops.rules import is_trained


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if plain(x, self.weight) and not is_trained(x, self.weight) and suits(x, self.weight):
            out = linear(x, self.weight)
            return out if self.bias is None else out + self.bias
        return F.linear(x, self.weight, self.bias)
