"""Compiled C++ kernels for CPUs.

few_rows      pattention and matrix products of a few rows without gradients, as in decoding
fused_theta   norm, scale and GELU of the scores in one pass, forward and backward, for `direct`
library       compiles decode.cpp and theta.cpp with their headers and loads them
"""

from tokenformer.ops.backends.native.few_rows import linear, supports

__all__ = ["linear", "supports"]
