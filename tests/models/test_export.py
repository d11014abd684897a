"""Exported models accept other batch sizes and lengths than the example inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import tokenformer
from tests.support.classifiers import make_classifier, random_images

Make = Callable[..., Any]


class Logits(nn.Module):
    """A model that returns a tensor, as tracing wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(*inputs).logits
        return logits


def text(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0  # padding on the right: no query is without a key
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def language_model(make_model: Make, family: str) -> Any:
    return make_model(family, num_hidden_layers=1, use_cache=False).float()


def test_vision_export_with_a_dynamic_batch(family: str) -> None:
    model = make_classifier(family).float()
    shapes = {"pixel_values": {0: Dim("batch")}}
    with torch.no_grad():
        exported = torch.export.export(
            model, (), {"pixel_values": random_images(count=2).float()}, dynamic_shapes=shapes
        )
    for count in (1, 5):
        batch = random_images(count=count).float()
        torch.testing.assert_close(
            exported.module()(pixel_values=batch).logits, model(batch).logits
        )


def test_vision_trace_takes_another_batch(family: str) -> None:
    model = make_classifier(family).float()
    traced = torch.jit.trace(Logits(model), (random_images(count=2).float(),))
    for count in (1, 5):
        batch = random_images(count=count).float()
        torch.testing.assert_close(traced(batch), model(batch).logits)


@pytest.mark.slow
def test_language_export_with_dynamic_batch_and_length(language_model: Any) -> None:
    batch, length = Dim("batch"), Dim("length", max=64)
    shapes = {name: {0: batch, 1: length} for name in text(1, 4)}
    with torch.no_grad():
        exported = torch.export.export(language_model, (), text(2, 9), dynamic_shapes=shapes)
    for inputs in (text(1, 4), text(5, 17)):
        torch.testing.assert_close(
            exported.module()(**inputs).logits, language_model(**inputs).logits
        )


def test_language_trace_takes_another_batch_and_length(language_model: Any) -> None:
    traced = torch.jit.trace(Logits(language_model), tuple(text(2, 9).values()))
    for inputs in (text(1, 4), text(5, 17)):
        torch.testing.assert_close(
            traced(*inputs.values()), language_model(**inputs).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
def test_vision_onnx_with_a_dynamic_batch(family: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported file")
    model = make_classifier(family).float()
    shapes = ({0: Dim("batch")},)
    program = torch.onnx.export(model, (random_images(count=2).float(),), dynamic_shapes=shapes)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    name = session.get_inputs()[0].name
    for count in (1, 5):
        batch = random_images(count=count).float()
        logits = torch.tensor(session.run(None, {name: batch.numpy()})[0])
        torch.testing.assert_close(logits, model(batch).logits.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_language_onnx_with_dynamic_batch_and_length(language_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported file")
    batch, length = Dim("batch"), Dim("length", max=64)
    shapes = {name: {0: batch, 1: length} for name in text(1, 4)}
    program = torch.onnx.export(language_model, (), kwargs=text(2, 9), dynamic_shapes=shapes)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for inputs in (text(1, 4), text(5, 17)):
        found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        torch.testing.assert_close(
            torch.tensor(found[0]),
            language_model(**inputs).logits.detach(),
            rtol=1e-4,
            atol=1e-4,
        )


def test_scripting_is_refused_with_what_to_use_instead(make_model: Make) -> None:
    layer = tokenformer.Pattention(4, 4, 4)
    for module in (layer, nn.Sequential(layer), make_model("tokenformer")):
        with pytest.raises(NotImplementedError, match=r"does not support Pattention; use torch\."):
            torch.jit.script(module)
