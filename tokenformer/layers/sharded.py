"""The Pattention layer of a process that has some of its tokens; others have the rest.

`key_tokens` and `value_tokens` are DTensors, split along the tokens over a mesh of one dimension.
Whatever is said of a layer (`num_tokens`, `active_tokens`, the scale) is said of all its tokens.
"""

from typing import Any

from torch import Tensor

from tokenformer.layers.pattention import Pattention
from tokenformer.ops.sharded import sharded_pattention


class ShardedPattention(Pattention):
    """What a `Pattention` becomes: `layer.__class__ = ShardedPattention`, its tokens being spread.

    Without `sum_gradient` the gradient of its input is this process's part of it.
    """

    sum_gradient = True

    def token_set(self) -> tuple[Tensor, Tensor, float | Tensor]:
        """The keys and values of this process that take part, and the scale."""
        keys: Any = self.key_tokens
        values: Any = self.value_tokens
        mine, other, scale = keys.to_local(), values.to_local(), self.scale_tokens
        if self.active_tokens is not None:
            mesh = keys.device_mesh
            most = -(-self.num_tokens // mesh.size())  # of a process; the last ones may have fewer
            count = max(0, self.active_tokens - most * mesh.get_local_rank())
            mine, other = mine[:count], other[:count]
            scale = scale * (self.active_tokens / self.num_tokens)
        return mine, other, scale

    def forward(self, x: Tensor) -> Tensor:
        keys, values, scale = self.token_set()
        spread: Any = self.key_tokens
        return sharded_pattention(
            x,
            keys,
            values,
            spread.device_mesh.get_group(),
            scale_tokens=scale,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
            sum_gradient=self.sum_gradient,
        )
