"""Next-token cross-entropy in chunks, without holding all logits at once.

With a vocabulary of 50,000 the logits of a few thousand tokens are the largest tensor of a small
model's training step, and autograd keeps two more of that size. Here the forward pass computes the
logits of a chunk of rows and uses their gradient at once. No chunk is computed twice, and the
backward pass needs only the gradients of the hidden states and of the output embedding.
"""

from typing import Any

import torch
from torch import Tensor

from tokenformer.ops.theta import accumulation_dtype

IGNORED = -100
CHUNK_BYTES = 32 * 2**20


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        embedding: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        rows: int,
    ) -> Tensor:
        """Map hidden [N, d], embedding [V, d], labels [N] and weights [N] to the summed loss, in
        fp32 or wider."""
        needs_hidden, needs_embedding = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        embedding_grad = torch.zeros_like(embedding) if needs_embedding else None
        wide = accumulation_dtype(hidden.dtype)
        total = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows]  # [R, d]
            wanted = labels[start : start + rows]  # [R]
            counted = wanted != IGNORED
            index = wanted.masked_fill(~counted, 0)[:, None]  # [R, 1]
            logits = (part @ embedding.T).to(wide)  # [R, V]
            normaliser = torch.logsumexp(logits, dim=-1)  # [R]
            losses = normaliser - logits.gather(1, index)[:, 0]
            weight = None if weights is None else weights[start : start + rows].to(wide)  # [R]
            total += (losses if weight is None else losses * weight)[counted].sum()
            if not (needs_hidden or needs_embedding):
                continue
            # The gradient of the logits, softmax minus one at the label, in the logits' own memory.
            gradient = logits.sub_(normaliser[:, None]).exp_()
            gradient.scatter_add_(1, index, -torch.ones_like(index, dtype=gradient.dtype))
            gradient.mul_(counted[:, None] if weight is None else (counted * weight)[:, None])
            gradient = gradient.to(part.dtype)
            if hidden_grad is not None:
                torch.mm(gradient, embedding, out=hidden_grad[start : start + rows])
            if embedding_grad is not None:
                embedding_grad.addmm_(gradient.T, part)
        ctx.save_for_backward(hidden_grad, embedding_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if grad is None else grad * upstream[0].to(grad.dtype)
            for grad in ctx.saved_tensors
        ]
        return scaled[0], scaled[1], None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    embedding: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the summed cross-entropy of the logits hidden @ embedding.T, in nats, fp32 or wider.

    Args:
        hidden: final hidden states `[..., d]`.
        embedding: the output embedding `[vocabulary, d]`.
        labels: target tokens `[...]`; -100 is ignored.
        weights: factors on the losses `[...]`, by default 1.
        chunk_rows: rows per chunk; by default as many as fit 32 MiB of logits.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} do not match"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        narrow = torch.get_autocast_dtype(hidden.device.type)
        hidden, embedding = hidden.to(narrow), embedding.to(narrow)
    if chunk_rows is None:
        chunk_rows = max(16, CHUNK_BYTES // (4 * embedding.shape[0]))
    return _ChunkedCrossEntropy.apply(
        hidden.flatten(0, -2),
        embedding,
        labels.flatten(),
        None if weights is None else weights.flatten(),
        chunk_rows,
    )
