"""Pruning vision-language models: each part by the rows that use it, against direct computation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenformer
from tests.support.image_text import (
    SIDE,
    image_run,
    make_halves,
    make_joint,
    text_ids,
    train_new_tokens,
)
from tokenformer.growth.probe import output_change
from tokenformer.growth.tokens.token_set import token_layers
from tokenformer.ops import THETAS

LAYER, PLACE = "model.layers.1.attention.q", ("q", 1)


@pytest.fixture(params=["routed", "shared"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def batches(count: int = 6, rows: int = 1, seed: int = 3) -> list[dict[str, Tensor]]:
    """Text with one image and with two, `rows` of them in a batch."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        images = 1 + number % 2
        ids = torch.tensor([[*image_run(), *b"words"] * images] * rows)
        is_text = (ids >= ord("a")) & (ids <= ord("z"))
        ids[is_text] = torch.randint(97, 123, (int(is_text.sum()),), generator=generator)
        pixels = torch.randn(rows * images, 3, SIDE, SIDE, generator=generator).double()
        made.append({"input_ids": ids, "pixel_values": pixels})
    return made


@torch.no_grad()
def logits(model: Any, given: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([model(**batch).logits.flatten(0, 1) for batch in given])  # [R, vocab]


def distance(model: Any, smaller: Any, seed: int = 9) -> float:
    was, became = (logits(each, batches(4, 8, seed)) for each in (model, smaller))
    return float((became - was).square().mean() / was.square().mean())


def test_unused_tokens_are_dropped_exactly(mode: str) -> None:
    """Untrained new tokens, and tokens of each half whose keys are zero."""
    joint = make_joint(mode)
    with torch.no_grad():
        layer = joint.get_submodule(LAYER)
        layer.key_tokens[:3] = 0
        layer.key_tokens[-2:] = 0
        joint.get_submodule("model.layers.0.ffn").key_tokens[:41] = 0  # all of vision
    smaller, report = tokenformer.prune(joint)
    assert report.exact
    assert smaller.config.parts(*PLACE) == (17, 0, 22)
    assert smaller.config.parts("ffn", 0) == (1, 0, 48)
    assert smaller.config.new_tokens == 0
    torch.testing.assert_close(
        logits(smaller, batches()), logits(joint, batches()), atol=1e-9, rtol=1e-9
    )
    report = tokenformer.prune(smaller)[1]
    assert report.parameters_after == report.parameters_before


def rows_and_weights(joint: Any, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The values, squared scores and weights of a routed layer for image or text rows."""
    layer, seen = joint.get_submodule(LAYER), []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    logits(joint, batches())
    hook.remove()
    chosen = torch.cat([x.flatten(0, -2)[getattr(rows, kind)] for x, rows in seen])
    keys, values, scale = layer.vision_token_set() if kind == "image" else layer.token_set()
    scores = chosen @ keys.T
    weights = THETAS[layer.theta](scores, scale, layer.approximate, layer.eps)
    return values, scores.square(), weights


def test_each_modality_keeps_what_contributes_on_its_rows() -> None:
    joint = train_new_tokens(make_joint("routed"))
    smaller, report = tokenformer.prune(joint, batches(), keep=0.5, refit=False)
    assert not report.exact
    assert smaller.config.parts(*PLACE) == (10, 4, 12)
    layer, kept = joint.get_submodule(LAYER), smaller.get_submodule(LAYER)
    worth, counts = torch.zeros(layer.num_tokens, dtype=torch.float64), {}
    places = {"image": slice(0, 27), "text": slice(20, None)}
    for kind, rows in places.items():
        values, _, weights = rows_and_weights(joint, kind)
        worth[rows] += weights.square().sum(0) * values.square().sum(1)
        counts[kind] = len(weights)
    wanted = []
    for start, stop, number in ((0, 20, 10), (20, 27, 4), (27, 51, 12)):
        divisor = torch.ones(stop - start)  # within a part, all tokens see the same rows
        best = (worth[start:stop] / divisor).argsort(descending=True)[:number]
        wanted += sorted((start + best).tolist())
    assert torch.equal(kept.key_tokens, layer.key_tokens[wanted])
    assert torch.equal(kept.value_tokens, layer.value_tokens[wanted])
    for kind, before, after in (
        ("image", layer.vision_scale_tokens, kept.vision_scale_tokens),
        ("text", layer.scale_tokens, kept.scale_tokens),
    ):
        _, mass, _ = rows_and_weights(joint, kind)
        start = places[kind].start
        inside = [row - start for row in wanted if 0 <= row - start < mass.shape[1]]
        share = (mass[:, inside].sum(1) / mass.sum(1)).mean()
        assert after == pytest.approx(before * share.item(), rel=1e-9)


def test_chosen_parts_lose_tokens_and_the_others_none(mode: str) -> None:
    joint = train_new_tokens(make_joint(mode))
    smaller, _ = tokenformer.prune(joint, batches(), keep=0.4, parts=["new"])
    assert smaller.config.parts(*PLACE) == (20, 3, 24)
    before, after = joint.get_submodule(LAYER), smaller.get_submodule(LAYER)
    rows = [*range(20), *range(27, 51)]
    assert torch.equal(before.key_tokens[rows], after.key_tokens[[*range(20), *range(23, 47)]])
    language, _ = tokenformer.prune(joint, batches(), keep=0.4, parts=("language",))
    assert language.config.parts(*PLACE) == (20, 7, 10)
    if mode == "routed":  # image rows do not see what text has lost
        pixels = batches()[0]["pixel_values"]
        was, became = (
            model.get_image_features(pixels).last_hidden_state for model in (joint, language)
        )
        torch.testing.assert_close(became, was, atol=1e-9, rtol=1e-9)


def test_fitted_values_approximate_better(mode: str) -> None:
    joint = train_new_tokens(make_joint(mode))
    data = batches(4, 20)
    errors = {
        refit: distance(joint, tokenformer.prune(joint, data, keep=0.8, refit=refit)[0])
        for refit in (True, False)
    }
    assert errors[True] < 0.7 * errors[False]
    frozen = distance(joint, tokenformer.prune(joint, data, keep=0.8, scale="frozen")[0])
    assert errors[True] < frozen


def test_new_and_frozen_tokens_keep_their_values() -> None:
    joint = train_new_tokens(make_joint("routed", language_rate=0))
    smaller, _ = tokenformer.prune(joint, batches(4, 10), keep=0.8)
    for name, (place, layer) in token_layers(smaller).items():
        vision, new, _ = smaller.config.parts(*place)
        old = joint.get_submodule(name)
        known = {tuple(row.tolist()) for row in old.value_tokens}
        kept = [tuple(row.tolist()) in known for row in layer.value_tokens]
        assert all(kept[vision:])
        assert not any(kept[:vision])
        assert smaller.config.row_rates(*place) == [1.0] * (vision + new) + [0.0] * (
            layer.num_tokens - vision - new
        )


def test_a_pruned_model_is_an_ordinary_one(mode: str, tmp_path: Path) -> None:
    joint = train_new_tokens(make_joint(mode))
    smaller, report = tokenformer.prune(joint, batches(), keep=0.5)
    assert "fewer" not in str(report)
    assert report.parameters_after == smaller.num_parameters()
    smaller.save_pretrained(tmp_path)
    loaded = tokenformer.TokenformerForImageTextToText.from_pretrained(tmp_path, dtype="float64")
    assert torch.equal(logits(loaded.eval(), batches()), logits(smaller, batches()))
    report = tokenformer.grow(smaller, new_tokens=9)[1]
    assert report.max_output_change < 1e-9
    ids = text_ids("abc")
    assert torch.equal(
        smaller.generate(ids, max_new_tokens=4, do_sample=False),
        loaded.generate(ids, max_new_tokens=4, do_sample=False),
    )


def test_what_cannot_be_pruned_is_refused_by_name() -> None:
    joint = train_new_tokens(make_joint("routed"))
    text = [{"input_ids": text_ids("only text")}, text_ids("and ids")]
    only = tokenformer.prune(joint, text, keep=0.5, parts=["language"])[0]
    assert only.config.parts(*PLACE) == (20, 7, 12)
    for options, message in (
        ({"batches": text, "keep": 0.5}, "no rows of image"),
        ({"batches": text, "keep": 0.5, "parts": ["new"]}, "no rows of image"),
        ({"keep": 0.5}, "batches is missing"),
        ({"keep": 1.5}, "keep=1.5 must be above 0|share=1.5"),
        ({"keep": 0.5, "parts": ["tail"]}, "choose from vision, new, language"),
        ({"ffn_tokens": 20}, "pruned by keep and parts, not by ffn_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenformer.prune(joint, **options)
    with pytest.raises(ValueError, match="prune the language model, then join them again"):
        tokenformer.prune(make_joint("projector"), keep=0.5)
    with pytest.raises(ValueError, match="is for a vision-language model"):
        tokenformer.prune(make_halves()[1], parts=["new"])


def test_the_report_measures_with_images(mode: str) -> None:
    """Tokens that only images use in a routed layer do not change text alone."""
    joint = train_new_tokens(make_joint(mode))
    smaller, report = tokenformer.prune(joint, batches(), keep=0.25, parts=["vision"])
    was, became = (logits(each, batches(2)) for each in (joint, smaller))
    change = (became - was).abs().max() / was.abs().max()
    assert report.max_output_change is not None
    assert report.max_output_change > 0.1 * change > 0
    grown, report = tokenformer.grow(joint, new_tokens=9)
    assert report.max_output_change is not None
    assert report.max_output_change < 1e-12
    joint.get_submodule("model.layers.0.ffn").key_tokens.data[0].normal_()  # of vision
    assert output_change(grown, joint, seed=0) > 1e-6


def test_the_report_of_a_model_whose_placeholder_has_an_embedding(mode: str) -> None:
    joint = make_joint(mode, image_token_id=7)
    report = tokenformer.prune(joint)[1]
    assert report.max_output_change is not None
    assert report.max_output_change < 1e-9
