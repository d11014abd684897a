"""nn.Modules: Pattention, attention, norms, positions, blocks, and torch-style layers."""

from tokenformer.layers.attention import Attention
from tokenformer.layers.block import ParallelBlock, SequentialBlock
from tokenformer.layers.mlp import GeluMLP, SwiGLU
from tokenformer.layers.norm import LayerNorm, RMSNorm
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.positions import LearnedPositions, NoPositions, RotaryPositions
from tokenformer.layers.transformer import TokenformerDecoderLayer, TokenformerEncoderLayer

__all__ = [
    "Attention",
    "GeluMLP",
    "LayerNorm",
    "LearnedPositions",
    "NoPositions",
    "ParallelBlock",
    "Pattention",
    "RMSNorm",
    "RotaryPositions",
    "SequentialBlock",
    "SwiGLU",
    "TokenformerDecoderLayer",
    "TokenformerEncoderLayer",
]
