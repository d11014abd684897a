"""Decoding on a CPU in code of the machine's own: each parameter token is read once, in order."""

from tokenformer.ops.native.rows import linear, native, suits

__all__ = ["linear", "native", "suits"]
