"""Where the images of a batch are in its text, and which positions attend to which.

An image takes as many positions as it has patches (and one for a class token), marked in the ids by
a placeholder. In a joint model

- an image position attends to all positions of its own image and to nothing else, so that its
  features are those of the vision model wherever the image is;
- a text position attends to all positions before it, of text and images, as in a language model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.layers.positions import Rotation

TEXT = -1
"""The image number of a text position."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) indices -> whether the query attends to the key."""


@dataclass(frozen=True)
class ImagePlaces:
    mask: Tensor  # [B, T], True at positions of images
    images: Tensor  # [B, T], the number of the image in its sequence, or TEXT
    last: Tensor  # [B, T], index of the last position of the image; of a text position, its own

    @classmethod
    def find(cls, mask: Tensor, count: int, size: int) -> "ImagePlaces":
        """Find the places of `count` images of `size` positions each, which `mask` [B, T] marks."""
        found = mask.sum(1)  # [B]
        if int(found.sum()) != count * size or bool((found % size != 0).any()):
            raise ValueError(
                f"{count} images of {size} positions need {count * size} placeholders; the "
                f"sequences have {', '.join(map(str, found.tolist()))}"
            )
        rank = mask.long().cumsum(1) - 1  # of each placeholder in its sequence
        indices = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        last = torch.where(mask, indices + size - 1 - rank % size, indices)
        images = torch.where(mask, rank // size, TEXT)
        if not torch.equal(last.gather(1, last.clamp_max(mask.shape[1] - 1)), last):
            raise ValueError(f"the {size} placeholders of an image must follow each other")
        return cls(mask, images, last)

    def shared_positions(self, position_ids: Tensor) -> Tensor:
        """Give all positions of an image the position of its last one, [B or 1, T] -> [B, T].

        Rotary positions rotate queries and keys by their distance. Positions of one image then have
        distance zero, so the vision model, which knows no rotation, is unchanged; text after the
        image sees it at the distance that the image ends.
        """
        return position_ids.expand_as(self.last).gather(1, self.last)

    def normalized(self, rotation: Rotation) -> Rotation:
        """Make the rotations of image positions exact in the dtype of the model. The angles are
        fp32, so in fp64 they would change lengths by 1e-8."""
        cos, sin = rotation
        length = (cos.square() + sin.square()).sqrt().masked_fill(~self.mask[..., None], 1)
        return cos / length, sin / length

    def mask_functions(self, cached: int, total: int) -> tuple[MaskFunction, MaskFunction]:
        """Return what may be attended to in addition to the causal mask, and what must hold.
        `cached` keys precede these positions, of `total` in all."""
        after = total - cached - self.images.shape[1]
        images = F.pad(self.images, (cached, after), value=TEXT)  # [B, total]

        def is_same_image(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = images[batch, query]
            return (own == images[batch, key]) & (own != TEXT)

        def is_text_or_same_image(
            batch: Tensor, head: Tensor, query: Tensor, key: Tensor
        ) -> Tensor:
            own = images[batch, query]
            return (own == images[batch, key]) | (own == TEXT)

        return is_same_image, is_text_or_same_image
