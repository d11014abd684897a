"""Growing, pruning and merging image classifiers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenformer
from tests.support.classifiers import make_classifier, random_images
from tokenformer.cli import main
from tokenformer.growth.tokens.token_counts import token_counts

TOKENS = {"qkv_tokens": 8, "output_tokens": 8, "ffn_tokens": 24}
LARGER = {"qkv_tokens": 24, "output_tokens": 16, "ffn_tokens": 48}


def small(**options: Any) -> Any:
    return make_classifier("tokenformer", **{**TOKENS, **options})


@pytest.mark.parametrize("init", ["zero", "clone"])
def test_growth_is_exact(init: str) -> None:
    model = small()
    grown, report = tokenformer.grow(model, init=init, **LARGER)
    assert type(grown) is type(model)
    assert grown.num_parameters() == report.parameters_after > model.num_parameters()
    assert report.max_output_change < 1e-12
    torch.testing.assert_close(grown(random_images()).logits, model(random_images()).logits)


def test_random_growth_moves_the_output():
    _, report = tokenformer.grow(small(), init="random", **LARGER)
    assert report.max_output_change > 1e-3


def test_growth_to_a_preset():
    config = tokenformer.TokenformerVisionConfig
    with torch.device("meta"):
        base = tokenformer.TokenformerForImageClassification(config.from_preset("base-match"))
    from tokenformer.growth.tokens.token_counts import target_token_counts

    assert target_token_counts(base.config, "base", {}) == token_counts(config.from_preset("base"))
    with pytest.raises(ValueError, match="cannot change hidden_size from 768 to 1024"):
        target_token_counts(base.config, "large", {})
    with pytest.raises(ValueError, match="preset '354m' is unknown; choose one of base-match"):
        target_token_counts(base.config, "354m", {})


def test_the_optimizer_goes_on():
    """A step of the old model and a step of the grown one move the old tokens alike."""
    labels = torch.tensor([0, 1, 2])
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(of: Any, by: torch.optim.Optimizer) -> None:
        by.zero_grad()
        of(random_images(), labels=labels).loss.backward()
        by.step()

    step(model, optimizer)
    grown, report = tokenformer.grow(model, **LARGER)
    carried = tokenformer.grow_optimizer(optimizer, report)
    step(model, optimizer)
    step(grown, carried)
    old = model.model.layers[1].ffn.value_tokens
    torch.testing.assert_close(grown.model.layers[1].ffn.value_tokens[: len(old)], old)
    torch.testing.assert_close(grown.classifier.weight, model.classifier.weight)


def test_idle_tokens_are_pruned_unseen_and_others_by_images():
    model = small()
    grown, _ = tokenformer.grow(model, **LARGER)
    back, report = tokenformer.prune(grown)
    assert report.exact
    assert token_counts(back.config) == token_counts(model.config)
    torch.testing.assert_close(back(random_images()).logits, model(random_images()).logits)

    def change(smaller: Any) -> Tensor:
        return (
            (smaller(random_images(count=64)).logits - model(random_images(count=64)).logits)
            .square()
            .mean()
        )

    half, _ = tokenformer.prune(model, [random_images(count=64)], keep=0.5)
    unfitted, _ = tokenformer.prune(model, [random_images(count=64)], keep=0.5, refit=False)
    assert half.num_parameters() < model.num_parameters()
    assert change(half) < change(unfitted)
    for batches in ([torch.zeros(2, 3)], [torch.zeros(2, 2, 12, 12).long()]):
        with pytest.raises(ValueError, match=r"batches must be images \[B, C, H, W\]"):
            tokenformer.prune(model, batches, keep=0.5)


def test_joined_with_itself_it_is_itself():
    model = small()
    joined, _ = tokenformer.merge(model, model)
    torch.testing.assert_close(joined(random_images()).logits, model(random_images()).logits)
    with pytest.raises(ValueError, match="num_labels 5 and 6"):
        tokenformer.merge(model, small(num_classes=6))


def test_a_language_model_cannot_be_joined(make_model: Any) -> None:
    with pytest.raises(ValueError, match="give two models of the same class"):
        tokenformer.merge(small(), make_model("tokenformer"))


def test_prefixes_are_models():
    shorter, _ = tokenformer.take_prefix(small(), 0.5)
    assert set(token_counts(shorter.config).values()) == {4, 12}
    assert shorter(random_images()).logits.shape == (3, 5)


def test_a_vision_transformer_is_refused():
    with pytest.raises(
        TypeError, match="only a TransformerForCausalLM grows by net2net, not a TransformerForImage"
    ):
        tokenformer.grow(make_classifier("transformer"), hidden_size=32)


def test_growth_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small().float()
    model.save_pretrained(tmp_path / "small")
    tokenformer.TokenformerImageProcessor.for_size(12, 1).save_pretrained(tmp_path / "small")
    tokens = [f"--{name}={count}" for name, count in LARGER.items()]
    main(["grow", str(tmp_path / "small"), *tokens, "--out", str(tmp_path / "large")])
    assert "Saved to" in capsys.readouterr().out
    assert (tmp_path / "large" / "preprocessor_config.json").exists()
    grown = tokenformer.TokenformerForImageClassification.from_pretrained(tmp_path / "large")
    torch.testing.assert_close(
        grown(random_images().float()).logits, model(random_images().float()).logits
    )
    in_memory, _ = tokenformer.grow(model, **LARGER)
    for name, tensor in in_memory.state_dict().items():
        assert torch.equal(tensor, grown.state_dict()[name]), name
