"""Pure functions on tensors: the modified softmaxes (theta), pattention over them, and routed."""

from tokenformer.ops.pattention import BACKENDS, pattention
from tokenformer.ops.routed_pattention import routed_pattention
from tokenformer.ops.theta import THETAS

__all__ = ["BACKENDS", "THETAS", "pattention", "routed_pattention"]
