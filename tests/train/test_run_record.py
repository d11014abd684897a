"""Options that a run may change once it has begun, and their record."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenformer.train.options import GrowthOptions, Recipe, RunOptions, StageOptions
from tokenformer.train.recipe import CONFIG, RecipeError
from tokenformer.train.run_record import (
    HISTORY,
    Record,
    flat,
    is_moved,
    newest_step,
    plain,
    same_path,
)
from tokenformer.train.stages import shortened


def recorded(folder: Path, recipe: Recipe) -> Record:
    Record(folder).write(recipe, 0)
    return Record(folder)


def with_options(recipe: Recipe, section: str, **options: Any) -> Recipe:
    return replace(recipe, **{section: replace(getattr(recipe, section), **options)})


BASE = Recipe(run=RunOptions(steps=10))
WHOLE = "model: {}\ndata: {}\noptimizer: {}\nschedule: {}\nrun: {steps: 9}\n"


def test_changes_are_named_and_refused_unless_told(tmp_path):
    record = recorded(tmp_path, BASE)
    assert record.check(BASE, 5) == []
    faster = with_options(BASE, "optimizer", learning_rate=0.5)
    with pytest.raises(RecipeError) as error:
        record.check(faster, 5)
    said = str(error.value)
    assert "at step 5 with other options: optimizer.learning_rate 0.0006 -> 0.5" in said
    assert "--override changes them from step 5 on" in said
    assert [str(change) for change in record.check(faster, 5, override=True)] == [
        "optimizer.learning_rate 0.0006 -> 0.5"
    ]
    assert record.check(faster, 0), "nothing is trained yet"


def test_what_is_reported_and_how_it_is_computed_changes_freely(tmp_path):
    record = recorded(tmp_path, BASE)
    free = with_options(
        BASE, "run", checkpoint_every=3, keep_last=9, log_to=[], micro_batch_size=2, on_spike="skip"
    )
    assert len(record.check(free, 5)) == 5


@pytest.mark.parametrize("override", [False, True])
def test_the_model_stays_the_model(tmp_path, override):
    model = with_options(BASE, "model", options={"hidden_size": 32, "num_hidden_layers": 2})
    record = recorded(tmp_path, model)
    wider = with_options(BASE, "model", options={"hidden_size": 64, "num_hidden_layers": 2})
    with pytest.raises(RecipeError, match=r"cannot change model\.options\.hidden_size 32 -> 64;"):
        record.check(wider, 5, override)
    longer = with_options(model, "data", length=512)
    with pytest.raises(RecipeError, match=r"cannot change data\.length 256 -> 512; name another"):
        record.check(longer, 5, override)


def test_a_run_at_its_end_keeps_its_record(tmp_path):
    record = recorded(tmp_path, BASE)
    assert record.check(shortened(BASE, 6), 10) == []
    assert record.check(shortened(BASE, 6), 10, override=True) == []
    faster = with_options(BASE, "optimizer", learning_rate=0.5)
    with pytest.raises(RecipeError, match=r"was not trained with these options: optimizer\.lear"):
        record.check(faster, 10)
    assert record.check(faster, 10, override=True) == [], "nothing to apply it to"
    longer = with_options(BASE, "run", steps=20)
    with pytest.raises(RecipeError, match=r"run\.steps 10 -> 20; --override"):
        record.check(longer, 10)
    assert [str(c) for c in record.check(longer, 10, override=True)] == ["run.steps 10 -> 20"]


def test_the_record_says_from_which_step_what_held(tmp_path):
    recorded(tmp_path, BASE)
    assert not (tmp_path / HISTORY).exists()
    faster = with_options(BASE, "optimizer", learning_rate=0.5)
    Record(tmp_path).write(faster, 5)
    Record(tmp_path).write(faster, 5)
    longer = with_options(faster, "run", steps=20)
    Record(tmp_path).write(longer, 10)
    expected = plain(asdict(longer))
    del expected["adapter"]  # a run without one has no such section
    assert yaml.safe_load((tmp_path / CONFIG).read_text()) == expected
    learning_rate = {"optimizer.learning_rate": {"before": 0.0006, "after": 0.5}}
    steps = {"run.steps": {"before": 10, "after": 20}}
    assert yaml.safe_load((tmp_path / HISTORY).read_text()) == {
        "changes": [
            {"from_step": 5, "options": learning_rate},
            {"from_step": 10, "options": steps},
        ]
    }
    # A newer checkpoint was lost: the steps after 8 are made again, with the steps of now.
    Record(tmp_path).write(longer, 8)
    rows = yaml.safe_load((tmp_path / HISTORY).read_text())["changes"]
    assert [row["from_step"] for row in rows] == [5, 8]
    Record(tmp_path).write(BASE, 0)  # begun anew
    assert not (tmp_path / HISTORY).exists()


def test_an_older_record_lacks_options_and_that_is_no_change(tmp_path):
    values = plain(asdict(BASE))
    for section, name in (("run", "ema"), ("data", "workers"), ("model", "start_from")):
        del values[section][name]
    del values["augmentation"], values["stages"]
    (tmp_path / CONFIG).write_text(yaml.safe_dump(values))
    assert Record(tmp_path).check(BASE, 5) == []
    averaged = with_options(BASE, "run", ema=0.9)
    with pytest.raises(RecipeError, match=r"with other options: run\.ema none -> 0\.9;"):
        Record(tmp_path).check(averaged, 5)
    Record(tmp_path).write(averaged, 5)
    (row,) = yaml.safe_load((tmp_path / HISTORY).read_text())["changes"]
    assert row["options"] == {"run.ema": {"before": None, "after": 0.9}}


def test_an_older_record_lacks_options_of_stages(tmp_path):
    stages = [StageOptions(steps=4), StageOptions(steps=4, grow=GrowthOptions(to="1b"))]
    recipe = replace(BASE, stages=stages)
    values = plain(asdict(recipe))
    del values["stages"][0]["rates"], values["stages"][1]["grow"]["old_rate"]
    (tmp_path / CONFIG).write_text(yaml.safe_dump(values))
    assert Record(tmp_path).check(recipe, 3) == []
    slower = replace(stages[1], grow=GrowthOptions(to="1b", old_rate=0.5))
    with pytest.raises(RecipeError, match=r"stages\[1\]\.grow\.old_rate none -> 0\.5"):
        Record(tmp_path).check(replace(recipe, stages=[stages[0], slower]), 3)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, {"*.key_tokens": 0.5}, r"none -> \{'\*\.key_tokens': 0\.5\}"),
        ({"*.key_tokens": 0.5}, None, r"\{'\*\.key_tokens': 0\.5\} -> none"),
        ({"*.key_tokens": 0.5}, {}, r"\.\*\.key_tokens 0\.5 -> none"),
        ({"*.norm": 1.0}, {"*.norm": 1.0, "*.key_tokens": 0.5}, r"key_tokens none -> 0\.5"),
    ],
)
def test_rates_of_a_stage_that_come_or_go_are_a_change(tmp_path, before, after, message):
    def staged(rates: dict[str, float] | None) -> Recipe:
        return replace(BASE, stages=[StageOptions(steps=8, rates=rates)])

    record = recorded(tmp_path, staged(before))
    assert record.check(staged(before), 3) == []
    with pytest.raises(RecipeError, match=rf"stages\[0\]\.rates ?.*{message}"):
        record.check(staged(after), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {options: {hidden", "line 1: not valid YAML"),
        ("- a\n", "holds no sections"),
        ("", "holds no sections"),
        ("model: {}\ndata: {}\n", "has no section optimizer"),
        (f"{WHOLE}stages:\n- steps: 3\n- ", "stage 2 is incomplete"),
        (f"{WHOLE}stages:\n- steps: 3\n- ste", "stage 2 is incomplete"),
        (f"{WHOLE}stages:\n- steps:", "stage 1 is incomplete"),
        (f"{WHOLE}stages:\n- steps: 3\n  grow: x", "stage 1 is incomplete"),
        (f"{WHOLE}stages:\n- grow: null", "stage 1 is incomplete"),
        (f"{WHOLE}stages:", "its stages are no list"),
        (f"{WHOLE}augmentation:", "augmentation holds no options"),
        (WHOLE.replace("steps: 9", "seed: 0"), "run.steps is no number"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, text, message):
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(RecipeError) as error:
        Record(tmp_path)
    assert str(tmp_path / CONFIG) in str(error.value)
    assert message in str(error.value)
    assert "; restore it, or name another --out" in str(error.value)


def test_stages_that_are_over_do_not_change(tmp_path):
    grow = GrowthOptions(sizes={"ffn_tokens": 64})
    stages = [StageOptions(steps=4), StageOptions(steps=4, grow=grow)]
    recipe = replace(BASE, stages=stages)
    record = recorded(tmp_path, recipe)
    assert record.steps == 8
    first = replace(recipe, stages=[replace(stages[0], steps=6), stages[1]])
    second = replace(recipe, stages=[stages[0], replace(stages[1], steps=6)])
    other = replace(stages[1], grow=replace(grow, sizes={"ffn_tokens": 99}))
    grown = replace(recipe, stages=[stages[0], other])
    third = replace(recipe, stages=[*stages, StageOptions(steps=4, grow=grow)])
    assert record.check(first, 3, override=True)
    assert record.check(grown, 4, override=True), "it has not grown yet"
    for changed, step in ((first, 4), (first, 6), (grown, 5)):
        with pytest.raises(RecipeError, match=r"cannot change stages\[\d\]"):
            record.check(changed, step, override=True)
    assert record.check(second, 6, override=True)
    assert record.check(second, 8, override=True), "the last stage can be extended"
    assert [str(c) for c in record.check(third, 8, override=True)] == ["stages 2 -> 3"]
    assert record.check(shortened(recipe, 4), 8) == []
    assert flat(plain(asdict(shortened(recipe, 4))))["stages[1].schedule.warmup_steps"] == 0


def test_a_moved_corpus_is_the_same_corpus(tmp_path):
    here, there = tmp_path / "a" / "text", tmp_path / "b" / "text"
    there.mkdir(parents=True)
    assert is_moved(str(here), str(there)), "the old one is gone"
    assert same_path("data/text", "/anywhere/data/text"), "an older record"
    here.mkdir(parents=True)
    assert not is_moved(str(here), str(there))
    assert not same_path(str(here), str(there))
    assert not same_path(None, str(there))
    assert not is_moved(None, str(there))
    record = recorded(tmp_path / "run", with_options(BASE, "data", corpus=str(here)))
    moved = with_options(BASE, "data", corpus=str(there))
    with pytest.raises(RecipeError, match=r"other options: data\.corpus"):
        record.check(moved, 5)
    here.rmdir()
    assert record.check(moved, 5)[0].name == "data.corpus"


def test_a_relative_path_of_an_older_record_is_no_change(tmp_path):
    record = recorded(tmp_path, with_options(BASE, "data", corpus="data/text"))
    assert record.check(with_options(BASE, "data", corpus="/anywhere/data/text"), 5) == []


def test_what_a_run_started_from_stays(tmp_path):
    folder, other = tmp_path / "runA", tmp_path / "runB"
    record = recorded(tmp_path / "run", with_options(BASE, "model", start_from=f"{folder}/model"))
    for same in (f"{folder}/model", f"{folder}", "runA", "runA/model"):
        assert record.check(with_options(BASE, "model", start_from=same), 5) == []
    for changed in (f"{other}/model", f"{other}", "runB", "model", None):
        with pytest.raises(RecipeError, match=r"cannot change model\.start_from"):
            record.check(with_options(BASE, "model", start_from=changed), 5, override=True)


def test_the_newest_step_is_read_off_the_names(tmp_path):
    assert newest_step(tmp_path) == 0
    for name in ("step-00000005", "step-00000010", ".step-00000015.unfinished-ab", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_step(tmp_path) == 10
