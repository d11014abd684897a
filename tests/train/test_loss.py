"""The chunked loss is the plain one, value and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer.train.loss import chunked_cross_entropy


def plain(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ embedding.T).flatten(0, -2), labels.flatten(), reduction="sum")


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 12, dtype=dtype, requires_grad=True)
    embedding = torch.randn(29, 12, dtype=dtype, requires_grad=True)
    labels = torch.randint(29, (3, 7))
    labels[1, :4] = -100
    return hidden, embedding, labels


@pytest.mark.parametrize("rows", [1, 4, 7, 21, 100, None])
def test_equals_the_plain_loss_whatever_the_chunk(rows):
    hidden, embedding, labels = draw()
    ours = chunked_cross_entropy(hidden, embedding, labels, chunk_rows=rows)
    expected = plain(hidden, embedding, labels)
    torch.testing.assert_close(ours, expected)
    gradients = torch.autograd.grad(0.25 * ours, [hidden, embedding])
    torch.testing.assert_close(gradients, torch.autograd.grad(0.25 * expected, [hidden, embedding]))


@pytest.mark.parametrize("rows", [4, 7, None])
def test_weights_scale_the_loss_of_each_row(rows):
    hidden, embedding, labels = draw()
    weights = torch.rand(3, 7, dtype=torch.float64)
    ours = chunked_cross_entropy(hidden, embedding, labels, weights=weights, chunk_rows=rows)
    logits = (hidden @ embedding.T).flatten(0, -2)
    each = F.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = (each * weights.flatten()).sum()
    torch.testing.assert_close(ours, expected)
    gradients = torch.autograd.grad(ours, [hidden, embedding])
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [hidden, embedding]))


def test_without_rows_the_loss_is_zero():
    hidden, embedding, labels = draw()
    none = labels[:0]
    loss = chunked_cross_entropy(hidden[:0], embedding, none)
    assert loss == 0
    assert not torch.autograd.grad(loss, embedding)[0].any()


def test_gradcheck():
    hidden, embedding, labels = draw()
    assert torch.autograd.gradcheck(
        lambda h, e: chunked_cross_entropy(h, e, labels, chunk_rows=5), (hidden, embedding)
    )


def test_a_frozen_embedding_gets_no_gradient():
    hidden, embedding, labels = draw()
    embedding.requires_grad_(False)
    chunked_cross_entropy(hidden, embedding, labels).backward()
    assert embedding.grad is None
    assert hidden.grad.abs().max() > 0


def test_autocast_rounds_the_products_and_nothing_else():
    hidden, embedding, labels = draw(torch.float32)
    exact = plain(hidden, embedding, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = chunked_cross_entropy(hidden, embedding, labels)
    assert rounded.dtype == torch.float32
    assert rounded != exact
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0)
    rounded.backward()
    assert embedding.grad.dtype == torch.float32


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[1e4, 0.0]], requires_grad=True)
    loss = chunked_cross_entropy(hidden, torch.eye(2), torch.tensor([1]))
    assert loss.item() == 1e4
    loss.backward()
    assert hidden.grad.isfinite().all()


def test_no_row_counts():
    hidden, embedding, labels = draw()
    loss = chunked_cross_entropy(hidden, embedding, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == 0


def test_shapes_that_do_not_go_together_are_named():
    hidden, embedding, labels = draw()
    with pytest.raises(ValueError, match=r"hidden \(3, 7, 12\) and labels \(3, 6\)"):
        chunked_cross_entropy(hidden, embedding, labels[:, :6])
