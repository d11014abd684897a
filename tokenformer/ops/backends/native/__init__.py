"""Compiled C++ for decoding on a CPU: each parameter token is read once, in order."""

from tokenformer.ops.backends.native.few_rows import linear, supports

__all__ = ["linear", "supports"]
