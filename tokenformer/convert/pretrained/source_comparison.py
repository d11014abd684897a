"""Comparing a converted language model with its source on the same tokens."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tokenformer.convert.pretrained.conversion_report import Comparison
from tokenformer.growth.tokens.token_usage import eval_mode

MAX_LOGITS = 1 << 25


@torch.no_grad()
def compare_with_source(
    source: PreTrainedModel, model: PreTrainedModel, batches: Sequence[Tensor]
) -> Comparison:
    """Return the losses and differences on token ids [B, T + 1], targets included."""
    tokens, agreed = 0, 0
    losses, divergence, squared_error, squared_norm = [0.0, 0.0], 0.0, 0.0, 0.0
    with eval_mode(source), eval_mode(model):
        for batch in split_batches(batches, source.config.vocab_size):
            targets = batch[:, 1:].flatten()
            source_logits, our_logits = (
                each(input_ids=batch[:, :-1].to(each.device), use_cache=False)
                .logits.flatten(0, 1)
                .cpu()
                .double()
                for each in (source, model)
            )  # [B T, vocabulary]
            for index, logits in enumerate((source_logits, our_logits)):
                losses[index] += F.cross_entropy(logits, targets, reduction="sum").item()
            divergence += F.kl_div(
                our_logits.log_softmax(-1),
                source_logits.log_softmax(-1),
                reduction="sum",
                log_target=True,
            ).item()
            agreed += int((source_logits.argmax(-1) == our_logits.argmax(-1)).sum())
            centred = source_logits - source_logits.mean(-1, keepdim=True)
            squared_error += (
                (our_logits - our_logits.mean(-1, keepdim=True) - centred).square().sum().item()
            )
            squared_norm += centred.square().sum().item()
            tokens += len(targets)
    return Comparison(
        tokens,
        losses[0] / tokens,
        losses[1] / tokens,
        divergence / tokens,
        agreed / tokens,
        (squared_error / squared_norm) ** 0.5,
    )


def split_batches(batches: Sequence[Tensor], vocab_size: int) -> Iterator[Tensor]:
    """Split batches so that their logits fit in `MAX_LOGITS`."""
    for batch in batches:
        yield from batch.split(max(1, MAX_LOGITS // (batch.shape[1] * vocab_size)))
