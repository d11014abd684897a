"""How much of a text a model takes at once: the rule by which batch sizes are chosen."""

from typing import Any

import torch

LOGIT_BYTES = 1 << 28
GPU_SHARE = 16
"""Of a GPU's memory, one part in so many may hold logits."""
TOKENS_AT_ONCE = 1 << 13
GPU_TOKENS_AT_ONCE = 1 << 15
"""More tokens than these gain nothing."""


def tokens_at_once(model: Any) -> int:
    """Tokens of a forward pass, by the memory of their logits; the same at every call."""
    most, memory = TOKENS_AT_ONCE, LOGIT_BYTES
    if model.device.type == "cuda":
        properties = torch.cuda.get_device_properties(model.device)
        most, memory = GPU_TOKENS_AT_ONCE, properties.total_memory // GPU_SHARE
    vocab_size = model.config.get_text_config().vocab_size
    return max(1, min(most, memory // (4 * vocab_size)))
