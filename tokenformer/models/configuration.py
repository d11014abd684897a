"""Configurations of the language models: the TokenFormer and its plain-Transformer twin."""

from typing import ClassVar

from transformers.models.auto.configuration_auto import AutoConfig

from tokenformer.models.block_configuration import (
    FOLLOWS,
    BlockConfig,
    check_count,
    check_number,
)
from tokenformer.models.presets import TOKENFORMER_PRESETS, TRANSFORMER_PRESETS
from tokenformer.models.projection_configuration import MatrixConfig, TokenConfig


class LanguageConfig(BlockConfig):
    """What the TokenFormer and the Transformer have in common.

    Attributes:
        positions: `rotary` (on `rotary_fraction` of each head, with `rotary_base`), `learned`
            (`max_position_embeddings` of them) or `none`; by default as the variant has it.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 50304
    max_position_embeddings: int = 2048
    positions: str = FOLLOWS
    rotary_fraction: float = 0.25
    rotary_base: float = 10000.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None

    @classmethod
    def families(cls) -> list[type[BlockConfig]]:
        return [TokenformerConfig, TransformerConfig]

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that rotate."""
        return int(self.head_dim * self.rotary_fraction)

    def _check(self) -> None:
        super()._check()
        check_count("vocab_size", self.vocab_size)
        check_count("max_position_embeddings", self.max_position_embeddings)
        check_number("rotary_base", self.rotary_base, positive=True)
        check_number("rotary_fraction", self.rotary_fraction, positive=True)
        if self.rotary_fraction > 1:
            raise ValueError(f"rotary_fraction={self.rotary_fraction} must be in (0, 1]")
        if self.positions == "rotary" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} is "
                f"{self.rotary_dim} channels; it must be an even number, at least 2"
            )


class TokenformerConfig(TokenConfig, LanguageConfig):
    """A language model whose every projection is Pattention."""

    model_type = "tokenformer"
    presets = TOKENFORMER_PRESETS


class TransformerConfig(MatrixConfig, LanguageConfig):
    """The same language model with linear projections and a two-layer MLP."""

    model_type = "tokenformer_transformer"
    presets = TRANSFORMER_PRESETS


for _config in (TokenformerConfig, TransformerConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
