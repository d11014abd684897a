"""Pure functions on tensors: the modified softmaxes (theta) and pattention over them."""

from tokenformer.ops.pattention import BACKENDS, pattention
from tokenformer.ops.theta import THETAS

__all__ = ["BACKENDS", "THETAS", "pattention"]
