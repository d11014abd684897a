"""The summary of a conversion that only renames tensors, as text or JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from tokenformer.convert.source import Source
from tokenformer.models.configuration import LanguageConfig, VisionConfig


@dataclass(frozen=True)
class ConversionSummary:
    source: str
    kind: str
    """The source format: released, checkpoint or tokenformer."""
    to: str
    """The target format: tokenformer or released."""
    layers: int
    width: int
    heads: int
    parameters: int
    dtype: str
    tokenizer: str | None
    """Where the tokenizer was found."""
    image_processor: str | None
    """Where the image processor was found."""

    @classmethod
    def of(
        cls,
        source: Source,
        config: LanguageConfig | VisionConfig,
        tensors: Mapping[str, Tensor],
        *,
        to: str,
        tokenizer: str | None = None,
        image_processor: str | None = None,
    ) -> "ConversionSummary":
        return cls(
            source=source.name,
            kind=source.kind,
            to=to,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            parameters=sum(tensor.numel() for tensor in tensors.values()),
            dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
            tokenizer=tokenizer,
            image_processor=image_processor,
        )

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.layers} layers of width {self.width}, {self.heads} heads, "
            f"{self.parameters:,} parameters in {self.dtype}"
        )
