"""The configuration records which growth added each token."""

import json

import pytest
import torch

import tokenformer
from tests.support.growth import trained_tokenformer
from tokenformer.growth.model_folder import grow_folder

PLACE = ("ffn", 1)


@pytest.fixture
def model(make_config):
    return trained_tokenformer(make_config)[0]


def test_every_growth_adds_one_and_the_record_survives_saving(model, tmp_path):
    assert model.config.token_ages is None
    assert model.config.ages(*PLACE) == [0] * 96
    once, _ = tokenformer.grow(model, ffn_tokens=[96, 100])
    assert once.config.ages("ffn", 0) == [0] * 96
    once.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["token_ages"] == {"ffn": [None, [[96, 0], [4, 1]]]}
    again = tokenformer.TokenformerForCausalLM.from_pretrained(tmp_path)
    assert again.config.growths == 1
    twice, _ = tokenformer.grow(again, ffn_tokens=[98, 101])
    assert twice.config.ages(*PLACE) == [0] * 96 + [1] * 4 + [2]
    assert twice.config.ages("ffn", 0) == [0] * 96 + [2] * 2, "a growth has one number everywhere"


def test_growth_on_disk_records_the_same(model, tmp_path):
    model.save_pretrained(tmp_path / "small")
    grow_folder(tmp_path / "small", tmp_path / "grown", ffn_tokens=100, init="random")
    stored = tokenformer.TokenformerConfig.from_pretrained(tmp_path / "grown")
    assert stored.token_ages == tokenformer.grow(model, ffn_tokens=100)[0].config.token_ages


def test_the_first_copy_of_a_cloned_token_is_the_old_one(model):
    grown, _ = tokenformer.grow(model, ffn_tokens=200, init="clone")
    assert grown.config.ages(*PLACE) == [0] * 96 + [1] * 104


def test_pruned_tokens_keep_their_age(model):
    grown, _ = tokenformer.grow(model, ffn_tokens=120, init="random")
    batches = [torch.randint(20, (4, 24)) for _ in range(4)]
    smaller, report = tokenformer.prune(grown, batches, keep=0.5)
    rows = report.mappings["model.layers.1.ffn.key_tokens"].rows.tolist()
    assert smaller.config.ages(*PLACE) == [int(row >= 96) for row in rows]


def test_tokens_of_a_merged_adapter_count_as_one_more_growth(model):
    peft = pytest.importorskip("peft")
    grown, _ = tokenformer.grow(model, ffn_tokens=100)
    adapter = tokenformer.TokenAdapterConfig(num_tokens=3, target_modules=["ffn"])
    merged = peft.get_peft_model(grown, adapter).merge_and_unload()
    assert merged.config.ages(*PLACE) == [0] * 96 + [1] * 4 + [2] * 3


def test_ages_that_do_not_fit_are_refused(make_config):
    with pytest.raises(ValueError, match="has growths for 3 tokens; the layer has 44"):
        make_config("tokenformer", token_ages={"ffn": [[[3, 0]], None]})
