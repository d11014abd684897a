"""Pattention with its tokens sharded over processes.

`key_tokens` and `value_tokens` are DTensors, sharded along the tokens over a one-dimensional mesh.
`num_tokens`, `active_tokens` and the scale refer to the tokens of all ranks.
"""

from typing import Any

from torch import Tensor

from tokenformer.layers.pattention import Pattention
from tokenformer.ops.sharded import sharded_pattention


class ShardedPattention(Pattention):
    """A `Pattention` becomes sharded by `layer.__class__ = ShardedPattention`.

    With `sum_gradient=False` the gradient of the input is only this rank's part.
    """

    sum_gradient = True

    def token_set(self) -> tuple[Tensor, Tensor, float | Tensor]:
        """Return the active keys and values of this rank, and the scale."""
        keys: Any = self.key_tokens
        values: Any = self.value_tokens
        local_keys, local_values, scale = keys.to_local(), values.to_local(), self.scale_tokens
        if self.active_tokens is not None:
            mesh = keys.device_mesh
            most = -(-self.num_tokens // mesh.size())  # per rank; the last ones may have fewer
            count = max(0, self.active_tokens - most * mesh.get_local_rank())
            local_keys, local_values = local_keys[:count], local_values[:count]
            scale = scale * (self.active_tokens / self.num_tokens)
        return local_keys, local_values, scale

    def forward(self, x: Tensor) -> Tensor:
        keys, values, scale = self.token_set()
        sharded: Any = self.key_tokens
        return sharded_pattention(
            x,
            keys,
            values,
            sharded.device_mesh.get_group(),
            scale_tokens=scale,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
            sum_gradient=self.sum_gradient,
        )
