"""Routed Pattention with quantized tokens, for inference only.

Router and Gram matrix would be as large as the tokens that a row attends to, so they are small too:
the router in int8 with a scale per group, the factor of the Gram matrix, which is that of the
quantized keys, in bf16. Both are multiplied with fp32 rows, in native code and elsewhere, so that
all choose the same groups.
"""

import torch
from torch import Tensor

from tokenformer.layers.int4 import GROUP, Int4Pattention
from tokenformer.layers.int8 import Int8Pattention, dequantize, quantize
from tokenformer.layers.quantized import QuantizedLayer, QuantizedPattention, fixed
from tokenformer.layers.routed_pattention import NATIVE_ROUTERS, GroupRouting, RoutedPattention
from tokenformer.layers.router import Router
from tokenformer.ops.backends.native.library import Tokens
from tokenformer.ops.backends.native.routed import routing
from tokenformer.ops.backends.score_norm import exact_gram_root, pack_upper
from tokenformer.ops.routed_pattention import routed_pattention


class Int8Router(QuantizedLayer, Router):
    """The rows of a router [groups, d] in int8."""

    def __init__(self, rows: Tensor, router: Router) -> None:
        super().__init__(len(rows), balance_rate=0.0, device=rows.device)
        numbers, scales = quantize(rows)
        self.weight, self.scales = fixed(numbers), fixed(scales)
        self.bias = router.bias.detach().clone()
        self.is_gated = router.is_gated

    def rows(self, directions: Tensor | None = None) -> Tensor:
        return dequantize(self.weight, self.scales, torch.float32)


NATIVE_ROUTERS.add(Int8Router)


class QuantizedRouting(GroupRouting, QuantizedPattention):
    """The routing of a layer whose tokens another base class quantizes."""

    router: Int8Router

    def __init__(self, layer: RoutedPattention) -> None:
        super().__init__(layer)
        self.group_size, self._active_groups = layer.group_size, layer.active_groups
        self.norm = layer.norm
        self.router = Int8Router(layer.router.rows(layer.directions()), layer.router)
        self.bias = None if layer.bias is None else fixed(layer.bias.detach().clone())
        keys = self.dequantized(torch.float32)[0] if self.norm == "all" else None
        root = None if keys is None else pack_upper(exact_gram_root(keys))
        self.gram_root = None if root is None else fixed(root.bfloat16())

    def supports_native(self, x: Tensor) -> bool:
        return super().supports_native(x) and self.has_plain_router()

    def pointers(self) -> Tokens:
        tokens = super().pointers()
        tokens.scale = float(self.routed_scale)
        found = routing(
            self.group_size,
            self._active_groups,
            router=self.router.weight,
            router_scales=self.router.scales,
            bias=self.router.bias,
            root=self.gram_root,
            root_rows=self.root_rows,
            is_gated=self.router.is_gated,
            shift=self.bias,
        )
        assert found is not None
        tokens.routing = found
        return tokens

    def attend(self, x: Tensor) -> Tensor:
        return self.attend_to_groups(x)

    def attend_with_added(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `RoutedPattention.attend_with_added`."""
        return self.attend_to_groups(x, (keys, values))

    def attend_to_groups(self, x: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
        groups, gates = self.router(x, None, self._active_groups)
        out = routed_pattention(
            x,
            *self.dequantized(x.dtype),
            groups,
            group_size=self.group_size,
            norm=self.norm,
            gates=gates,
            added=added,
            scale_tokens=self.routed_scale,
            theta=self.theta,
            approximate=self.approximate,
            eps=self.eps,
            gram_root=self.unpacked(self.gram_root, x.dtype),
        )
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.describe_routing()}"


class RoutedInt8Pattention(QuantizedRouting, Int8Pattention):
    pass


class RoutedInt4Pattention(QuantizedRouting, Int4Pattention):
    def __init__(self, layer: RoutedPattention) -> None:
        if layer.group_size % GROUP:
            raise ValueError(
                f"group_size={layer.group_size} cannot have 4 bits: values share scales by {GROUP} "
                f"tokens, so groups need a multiple of {GROUP}; use bits=8"
            )
        super().__init__(layer)
