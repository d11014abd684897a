"""Patch embedding: images to tokens, with a class token and learned positions.

embed = PatchEmbedding(image_size=224, patch_size=16, num_channels=3, hidden_size=768)
tokens = embed(images)      # [B, 3, 224, 224] -> [B, 197, 768]
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """One token per patch. Positions are learned for one image size and interpolated for others."""

    class_token: nn.Parameter | None  # [d]
    positions: nn.Parameter  # [1 + G * G, d], or without a class token [G * G, d]

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_channels: int,
        hidden_size: int,
        *,
        class_token: bool = True,
    ) -> None:
        super().__init__()
        self.patch_size, self.num_channels = patch_size, num_channels
        self.grid_size = image_size // patch_size
        self.project = nn.Conv2d(num_channels, hidden_size, patch_size, stride=patch_size)
        self.register_parameter(
            "class_token", nn.Parameter(torch.empty(hidden_size)) if class_token else None
        )
        count = int(class_token) + self.grid_size**2
        self.positions = nn.Parameter(torch.empty(count, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.positions, std=std)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=std)

    def forward(self, images: Tensor) -> Tensor:
        self._check(images)
        patches = self.project(images)  # [B, d, H / p, W / p]
        height, width = patches.shape[-2:]
        tokens = patches.flatten(2).transpose(1, 2)  # [B, T, d]
        if self.class_token is not None:
            first = self.class_token.expand(tokens.shape[0], 1, -1)  # [B, 1, d]
            tokens = torch.cat((first, tokens), dim=1)
        return tokens + self._positions_for(height, width)

    def _positions_for(self, height: int, width: int) -> Tensor:
        """Return the learned positions, interpolated to a grid of another size."""
        side = self.grid_size
        if (height, width) == (side, side):
            return self.positions
        first, grid = self.positions[: -(side**2)], self.positions[-(side**2) :]
        square = grid.T.unflatten(1, (side, side))  # [d, G, G]
        resized = F.interpolate(
            square.unsqueeze(0).float(), (height, width), mode="bicubic", antialias=True
        )
        return torch.cat((first, resized[0].flatten(1).T.to(first)))

    def _check(self, images: Tensor) -> None:
        shape, side = tuple(images.shape), self.patch_size
        if images.ndim != 4 or shape[1] != self.num_channels:
            wanted = f"[B, {self.num_channels}, H, W]"
            raise ValueError(f"images have shape {shape}; it must be {wanted}")
        if shape[2] % side or shape[3] % side or not shape[2] * shape[3]:
            raise ValueError(
                f"images of {shape[2]} x {shape[3]} cannot be cut into patches of {side} x {side}"
            )
