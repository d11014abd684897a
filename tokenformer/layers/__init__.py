"""nn.Modules: Pattention, attention, norms, positions, blocks, and torch-style layers."""

from tokenformer.layers.attention import Attention
from tokenformer.layers.block import ParallelBlock, SequentialBlock
from tokenformer.layers.drop_path import DropPath
from tokenformer.layers.linear import Linear
from tokenformer.layers.mlp import GeluMLP, SwiGLU
from tokenformer.layers.modality_pattention import ModalityPattention, ModalityRows
from tokenformer.layers.norm import LayerNorm, RMSNorm
from tokenformer.layers.patches import PatchEmbedding
from tokenformer.layers.pattention import Pattention
from tokenformer.layers.positions import LearnedPositions, NoPositions, RotaryPositions
from tokenformer.layers.routed_pattention import RoutedPattention
from tokenformer.layers.thresholded_pattention import ThresholdedPattention
from tokenformer.layers.transformer_layers import TokenformerDecoderLayer, TokenformerEncoderLayer

__all__ = [
    "Attention",
    "DropPath",
    "GeluMLP",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "ModalityPattention",
    "ModalityRows",
    "NoPositions",
    "ParallelBlock",
    "PatchEmbedding",
    "Pattention",
    "RMSNorm",
    "RotaryPositions",
    "RoutedPattention",
    "SequentialBlock",
    "SwiGLU",
    "ThresholdedPattention",
    "TokenformerDecoderLayer",
    "TokenformerEncoderLayer",
]
