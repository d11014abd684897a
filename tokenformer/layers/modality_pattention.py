"""Pattention with tokens routed by modality: image rows and text rows use different tokens.

The tokens of a layer are stored in one tensor, in the order vision, new, language. Image rows
attend to vision and new tokens, text rows to language and new tokens: two overlapping slices, each
a dense Pattention with a scale of its own. Compare Mixture-of-Transformers (arXiv 2411.04996).

    layer = ModalityPattention(768, 768, vision_tokens=576, new_tokens=64, language_tokens=576)
    y = layer(x)                            # all rows are text: an ordinary dense Pattention
    y = layer(x, ModalityRows.of(is_image)) # x [B, T, d], is_image [B, T]
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tokenformer.layers.pattention import DENSE_LAYERS, Pattention
from tokenformer.ops.pattention import check_scale


class ModalityRows(NamedTuple):
    """Which rows of [B, T], flattened, are of images and which of text."""

    image: Tensor
    text: Tensor
    order: Tensor
    """Indices that put image rows followed by text rows back in place."""

    @classmethod
    def of(cls, is_image: Tensor) -> "ModalityRows":
        """From a mask [B, T] of the image rows."""
        flat = is_image.flatten()
        image, text = flat.nonzero().flatten(), (~flat).nonzero().flatten()
        order = torch.empty_like(flat, dtype=torch.long)
        order[torch.cat((image, text))] = torch.arange(len(flat), device=flat.device)
        return cls(image, text, order)

    def route(
        self, x: Tensor, image: Callable[[Tensor], Tensor], text: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply `image` to the rows of images, `text` to the others: x [B, T, d_in] -> d_out."""
        flat = x.flatten(0, -2)  # [R, d_in]
        parts = image(flat.index_select(0, self.image)), text(flat.index_select(0, self.text))
        joined = torch.cat(parts).index_select(0, self.order)  # [R, d_out]
        return joined.view(*x.shape[:-1], -1)


class ModalityPattention(Pattention):
    """A `Pattention` of language and new tokens, for text, that also holds the vision tokens.

    `scale_tokens` is the scale of text rows, `vision_scale_tokens` that of image rows. Rows of one
    modality are gathered, so that none is multiplied with tokens it does not use.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        vision_tokens: int,
        new_tokens: int,
        language_tokens: int,
        theta: str = "l2_gelu",
        vision_scale_tokens: float | None = None,
        scale_tokens: float | None = None,
        approximate: str = "none",
        eps: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        counts = {
            "vision_tokens": (vision_tokens, 1),
            "new_tokens": (new_tokens, 0),
            "language_tokens": (language_tokens, 1),
        }
        for name, (count, least) in counts.items():
            if count < least:
                raise ValueError(f"{name}={count} must be at least {least}")
        super().__init__(
            in_features,
            out_features,
            vision_tokens + new_tokens + language_tokens,
            theta=theta,
            scale_tokens=language_tokens if scale_tokens is None else scale_tokens,
            approximate=approximate,
            eps=eps,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        scale = vision_tokens if vision_scale_tokens is None else vision_scale_tokens
        check_scale(scale)
        self.vision_scale_tokens = float(scale)
        self.vision_tokens, self.new_tokens = vision_tokens, new_tokens

    @property
    def language_tokens(self) -> int:
        return self.num_tokens - self.new_tokens - self.vision_tokens

    @property
    def active_tokens(self) -> int | None:
        """Always None: the first tokens of a routed layer are those of one modality."""
        return None

    @active_tokens.setter
    def active_tokens(self, count: int | None) -> None:
        if count is not None:
            raise ValueError(
                "a layer with tokens routed by modality has no prefix; leave active_tokens at None"
            )

    def token_set(self) -> tuple[Tensor, Tensor, float | Tensor]:
        """Return the keys, values and scale of text rows: new and language tokens."""
        start = self.vision_tokens
        return self.key_tokens[start:], self.value_tokens[start:], self.scale_tokens

    def vision_token_set(self) -> tuple[Tensor, Tensor, float]:
        """Return the keys, values and scale of image rows: vision and new tokens."""
        stop = self.vision_tokens + self.new_tokens
        return self.key_tokens[:stop], self.value_tokens[:stop], self.vision_scale_tokens

    def forward(self, x: Tensor, rows: ModalityRows | None = None) -> Tensor:
        """x [..., d_in] -> [..., d_out]; without `rows` all rows are text."""
        if rows is None:
            return self.attend(x, *self.token_set())
        return rows.route(
            x,
            lambda image: self.attend(image, *self.vision_token_set()),
            lambda text: self.attend(text, *self.token_set()),
        )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, vision_tokens={self.vision_tokens}, "
            f"new_tokens={self.new_tokens}, language_tokens={self.language_tokens}, "
            f"vision_scale_tokens={self.vision_scale_tokens:g}"
        )


DENSE_LAYERS.add(ModalityPattention)
