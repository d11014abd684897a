"""The paper's table of model variants as printed, and the models that this package builds of it."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PrintedSize:
    """A row of the paper's Table 9."""

    preset: str
    printed: str
    """The number of parameters as printed: 109M."""
    layers: int
    width: int
    attention_tokens: int
    ffn_tokens: int
    heads: int
    images: bool = False

    @property
    def name(self) -> str:
        if self.images:
            return f"Vision TokenFormer {self.preset.capitalize()}"
        return f"TokenFormer {self.preset.upper()}"

    @property
    def printed_parameters(self) -> float:
        return float(self.printed[:-1]) * {"M": 1e6, "B": 1e9}[self.printed[-1]]

    @property
    def unit(self) -> float:
        """The place of the last digit that says something: 10M for 150M, 1M for 109M."""
        digits = self.printed[:-1].rstrip("0") if "." not in self.printed else self.printed[:-1]
        zeros = len(self.printed[:-1]) - len(digits)
        decimals = len(digits.partition(".")[2])
        return 10.0 ** (zeros - decimals) * {"M": 1e6, "B": 1e9}[self.printed[-1]]

    def config(self) -> Any:
        """Return the configuration of the preset."""
        from tokenformer.models.configuration import TokenformerConfig, TokenformerVisionConfig

        config_class = TokenformerVisionConfig if self.images else TokenformerConfig
        return config_class.from_preset(self.preset)

    def printed_config(self) -> Any:
        """Return a configuration with the sizes exactly as printed."""
        shape = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "qkv_tokens": self.attention_tokens,
            "output_tokens": self.attention_tokens,
            "ffn_tokens": self.ffn_tokens,
        }
        config = self.config()
        return type(config).from_dict({**config.to_dict(), **shape})

    def rounds_to_printed(self, parameters: int) -> bool:
        return round(parameters / self.unit) == round(self.printed_parameters / self.unit)


PRINTED = (
    PrintedSize("150m", "150M", 12, 768, 768, 3072, 12),
    PrintedSize("450m", "450M", 24, 1024, 1024, 4096, 16),
    PrintedSize("900m", "900M", 32, 1280, 1280, 5120, 16),
    PrintedSize("1.5b", "1.5B", 40, 1536, 1536, 6144, 16),
    PrintedSize("base-match", "86M", 12, 768, 576, 2304, 12, images=True),
    PrintedSize("base", "109M", 12, 768, 768, 3072, 12, images=True),
    PrintedSize("large-match", "307M", 24, 1024, 768, 768, 16, images=True),
    PrintedSize("large", "407M", 24, 1024, 1024, 4096, 16, images=True),
    PrintedSize("124m", "124M", 12, 768, 576, 2304, 12),
    PrintedSize("354m", "354M", 12, 768, 2140, 8560, 12),
    PrintedSize("757m", "757M", 12, 768, 4850, 19400, 12),
    PrintedSize("1.4b", "1.4B", 12, 768, 8620, 34480, 12),
)
"""Table 9 of the paper, digit by digit."""


def parameters(config: Any) -> int:
    from tokenformer.models.accounting import count_parameters

    return sum(count_parameters(config).values())


def best_ffn_tokens(size: PrintedSize) -> int:
    """Return the multiple of the attention tokens, for the feed-forward layer, that brings the
    model closest to its printed size."""
    candidates = [size.attention_tokens * factor for factor in range(1, 9)]

    def error(tokens: int) -> float:
        config = replace(size, ffn_tokens=tokens).printed_config()
        return abs(parameters(config) - size.printed_parameters)

    return min(candidates, key=error)


def transformers() -> dict[str, Any]:
    """Return the Transformer baselines: of the growth experiments, and the Vision Transformers."""
    from tokenformer.models.configuration import TransformerConfig, TransformerVisionConfig
    from tokenformer.models.presets import TRANSFORMER_PRESETS, VISION_TRANSFORMER_PRESETS

    text = {n: TransformerConfig.from_preset(n) for n in TRANSFORMER_PRESETS}
    images = {n: TransformerVisionConfig.from_preset(n) for n in VISION_TRANSFORMER_PRESETS}
    return {
        **{f"Transformer {n.upper()}": c for n, c in text.items()},
        **{f"Vision Transformer {n.capitalize()}": c for n, c in images.items()},
    }


def models() -> dict[str, Any]:
    """Return all published sizes by name, as configurations."""
    return {**{size.name: size.config() for size in PRINTED}, **transformers()}
