"""Compiled C++ kernels for CPUs.

few_rows   pattention and matrix products of a few rows without gradients, as in decoding
fused      products, norm, scale and GELU of a layer in one call, forward and backward, for `direct`
routed     pattention of a few rows over the groups of tokens that each has chosen
rotary     rotary positions of queries and keys, forward and backward
library    compiles the C++ sources and loads them
"""

from tokenformer.ops.backends.native.few_rows import linear, supports

__all__ = ["linear", "supports"]
