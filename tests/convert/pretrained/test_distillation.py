"""Distillation: the loss is the divergence, and training brings it down."""

import numpy as np
import pytest
import torch

from tokenformer.convert.pretrained.distillation import DivergenceLoss, distill_model
from tokenformer.convert.pretrained.from_transformer import from_transformer


def test_the_loss_is_the_divergence_summed_over_tokens(make_source, batches):
    source = make_source("llama")
    model, report = from_transformer(source, batches)
    loss = sum(DivergenceLoss(model, source)(batch).item() for batch in batches)
    tokens = sum(batch[:, 1:].numel() for batch in batches)
    assert loss / tokens == pytest.approx(report.comparison.divergence, rel=1e-3)


def test_the_source_is_neither_trained_nor_part_of_what_is(make_source, batches):
    source = make_source("llama")
    model, _ = from_transformer(source, batches)
    loss = DivergenceLoss(model, source)
    assert len(list(loss.parameters())) == len(list(model.parameters()))
    loss(batches[0]).backward()
    assert all(parameter.grad is None for parameter in source.parameters())


def test_a_short_run_brings_a_fitted_model_closer(make_source, batches):
    source = make_source("llama").float()
    model, _ = from_transformer(source, batches)
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    tokens = np.concatenate([batch.flatten().numpy() for batch in batches])
    rows = distill_model(model, source, tokens, tokens, steps=40, length=32, learning_rate=1e-3)
    divergences = [row["val_loss"] for row in rows if "val_loss" in row]
    assert len(rows) == 40
    assert divergences[-1] < 0.7 * divergences[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())
