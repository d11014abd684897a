"""Two language models on the same tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.convert.pretrained.conversion_report import Comparison
from tokenformer.growth.tokens.token_usage import eval_mode

LOGITS_AT_ONCE = 1 << 25


@torch.no_grad()
def compare(source: Any, model: Any, batches: Sequence[Tensor]) -> Comparison:
    """How far `model` is from `source` on batches of token ids [B, T + 1], targets included."""
    tokens, agreed = 0, 0
    losses, divergence, apart, whole = [0.0, 0.0], 0.0, 0.0, 0.0
    with eval_mode(source), eval_mode(model):
        for batch in in_parts(batches, source.config.vocab_size):
            targets = batch[:, 1:].flatten()
            wanted, found = (
                each(input_ids=batch[:, :-1].to(each.device), use_cache=False)
                .logits.flatten(0, 1)
                .cpu()
                .double()
                for each in (source, model)
            )  # [B T, vocabulary]
            for place, logits in enumerate((wanted, found)):
                losses[place] += F.cross_entropy(logits, targets, reduction="sum").item()
            divergence += F.kl_div(
                found.log_softmax(-1), wanted.log_softmax(-1), reduction="sum", log_target=True
            ).item()
            agreed += int((wanted.argmax(-1) == found.argmax(-1)).sum())
            centred = wanted - wanted.mean(-1, keepdim=True)
            apart += (found - found.mean(-1, keepdim=True) - centred).square().sum().item()
            whole += centred.square().sum().item()
            tokens += len(targets)
    return Comparison(
        tokens,
        losses[0] / tokens,
        losses[1] / tokens,
        divergence / tokens,
        agreed / tokens,
        (apart / whole) ** 0.5,
    )


def in_parts(batches: Sequence[Tensor], vocab_size: int) -> Iterator[Tensor]:
    """So many sequences at a time that their logits can be held."""
    for batch in batches:
        yield from batch.split(max(1, LOGITS_AT_ONCE // (batch.shape[1] * vocab_size)))
