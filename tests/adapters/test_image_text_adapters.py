"""Token adapters on vision-language models: used by images and text, merged into the new tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor

import tokenformer
from tests.support.image_text import (
    SIDE,
    image_run,
    make_joint,
    text_ids,
    train_new_tokens,
)

ALL = ["q", "k", "v", "o", "ffn"]


@pytest.fixture(params=["routed", "shared", "projector"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def inputs() -> dict[str, Tensor]:
    ids = torch.tensor([[*b"a", *image_run(), *b"bc"], [*image_run(), *b"def"]])
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(2, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels}


def adapted_model(mode: str, **options: Any) -> Any:
    joint = train_new_tokens(make_joint(mode))
    config = tokenformer.TokenAdapterConfig(num_tokens=4, target_modules=ALL, **options)
    torch.manual_seed(5)
    return get_peft_model(joint, config).eval()


def adapted_layers(model: Any) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith("token_adapter_keys")]


@pytest.mark.parametrize("norm", ["shared", "own"])
def test_an_untrained_adapter_changes_nothing_and_learns(mode: str, norm: str) -> None:
    wanted = train_new_tokens(make_joint(mode))(**inputs()).logits
    model = adapted_model(mode, norm=norm)
    torch.testing.assert_close(model(**inputs()).logits, wanted, atol=1e-10, rtol=1e-10)
    assert len(adapted_layers(model)) == 10  # of two blocks, none of a frozen encoder
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adam(trained.values(), lr=0.05)
    losses = []
    for _ in range(8):
        losses.append(model(**inputs(), labels=inputs()["input_ids"]).loss)
        losses[-1].backward()
        assert all(p.grad is not None and p.grad.any() for p in trained.values()) or not losses[1:]
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    with model.disable_adapter():
        torch.testing.assert_close(model(**inputs()).logits, wanted, atol=1e-10, rtol=1e-10)


def test_merged_tokens_are_new_tokens(mode: str, tmp_path: Path) -> None:
    model = adapted_model(mode, init="random")
    model.add_adapter(
        "second",
        tokenformer.TokenAdapterConfig(num_tokens=3, target_modules=["ffn"], init="random"),
    )
    model.base_model.set_adapter(["default", "second"])
    model = model.double()
    wanted, text = model(**inputs()).logits, model(text_ids("abc")).logits
    features = model.get_image_features(inputs()["pixel_values"]).pooler_output
    before = model.base_model.model.model.layers[0].ffn.base_layer.key_tokens.clone()
    model.merge_adapter()
    torch.testing.assert_close(model(**inputs()).logits, wanted, atol=1e-10, rtol=1e-10)
    model.unmerge_adapter()
    after = model.base_model.model.model.layers[0].ffn.base_layer.key_tokens
    assert torch.equal(before, after)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = tokenformer.TokenformerForImageTextToText.from_pretrained(tmp_path, dtype="float64")
    for each in (merged, loaded.eval()):
        torch.testing.assert_close(each(**inputs()).logits, wanted, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(each(text_ids("abc")).logits, text, atol=1e-10, rtol=1e-10)
        found = each.get_image_features(inputs()["pixel_values"]).pooler_output
        torch.testing.assert_close(found, features, atol=1e-10, rtol=1e-10)
    if mode == "projector":
        assert loaded.config.tokens("ffn", 0) == 48 + 7
        return
    assert loaded.config.parts("ffn", 0) == (41, 7 + 7, 48)
    assert loaded.config.parts("q", 1) == (20, 7 + 4, 24)
    assert loaded.config.ages("q", 1) == [0] * 27 + [1] * 4 + [0] * 24
    grown, _ = tokenformer.grow(loaded, new_tokens=20, old_rate=0)  # an ordinary joint model
    torch.testing.assert_close(grown(**inputs()).logits, wanted, atol=1e-10, rtol=1e-10)


def test_an_adapter_generates_about_images(mode: str) -> None:
    model = adapted_model(mode, init="random")
    prompt = {**inputs(), "attention_mask": torch.ones_like(inputs()["input_ids"])}
    options = {"max_new_tokens": 6, "do_sample": False}
    cached, whole = (model.generate(**prompt, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)
    merged = model.merge_and_unload()
    assert torch.equal(merged.generate(**prompt, **options), cached)


def test_adapters_by_sample_are_for_text() -> None:
    model = adapted_model("routed")
    ids = text_ids("abc").repeat(2, 1)
    names = ["default", "__base__"]
    with torch.no_grad():
        assert model(input_ids=ids, adapter_names=names).logits.shape == (2, 3, 257)
    with pytest.raises(ValueError, match="adapter_names is for text"):
        model(**inputs(), adapter_names=names)
