"""Mistakes in recipe files and run records are reported in one line with file and line number."""

import time
from pathlib import Path

import pytest

from tokenformer.train.recipe import RecipeError, check_recipe, read_mapping

RECIPE = """\
model:
  preset: 124m
data: {corpus: data/text, length: 32}
optimizer:
  learning_rate: 1e-3
  betas: [0.9, 0.95]
  rates: {"*.key_tokens": 0.5}
schedule: {kind: wsd}
run:
  steps: 10
  ema: null
  compile: false
  log_to: [tensorboard]
stages:
  - steps: 5
  - steps: 5
    grow: {to: 354m, sizes: {}}
max_steps: 3
"""


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        check_recipe(path)
    return str(error.value)


def test_a_recipe_without_mistakes_is_taken(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    check_recipe(tmp_path / "r.yaml")
    anchors = "schedule: &s {kind: wsd}\nstages:\n  - {steps: 1, schedule: *s}\n"
    (tmp_path / "r.yaml").write_text(anchors)
    check_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("  steps: 10", "  stepz: 10", "line 10: run.stepz is not an option; did you mean run.st"),
        ("schedule:", "shedule:", "line 8: shedule is not an option; did you mean schedule?"),
        ("  steps: 10", "  learning_rate: 1", "line 10: run.learning_rate is not an option; did yo"
         "u mean optimizer.learning_rate?"),
        ("  steps: 10", "  steps: many", "line 10: run.steps is 'many'; expected a whole number"),
        ("1e-3", "fast", "line 5: optimizer.learning_rate is 'fast'; expected a number"),
        ("kind: wsd", "kind: wds", "line 8: schedule.kind is 'wds'; expected one of cosine, const"),
        ("ema: null", "ema: yes please", "line 11: run.ema is 'yes please'; expected a number or"),
        ("compile: false", "compile: 2", "line 12: run.compile is '2'; expected true or false"),
        ("to: 354m", "too: 354m", "line 17: stages[1].grow.too is not an option; did you mean sta"),
        ("  ema: null", "  steps: 11", "line 11: run.steps is given twice"),
        ("  steps: 10", "  steps: [10", "line 11: not valid YAML: "),
        ("  steps: 10", "\tsteps: 10", "line 10: not valid YAML: found character '\\t'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_file_and_line(tmp_path, right, wrong, message):
    assert right in RECIPE
    path = tmp_path / "r.yaml"
    said = refused(path, RECIPE.replace(right, wrong, 1))
    assert said.startswith(f"{path}, {message}")
    assert "\n" not in said


def test_what_is_no_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    assert "must hold sections such as model" in refused(path, "- a\n")
    assert "must hold sections such as model" in refused(path, "")
    assert "is larger than 256 kB" in refused(path, "#" * 300_000)
    assert "is nested too deeply" in refused(path, "[" * 5000)
    path.write_bytes(b"model: \xff")
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        check_recipe(path)
    with pytest.raises(RecipeError, match=r"no .*r\.yml; did you mean .*r\.yaml\?"):
        check_recipe(tmp_path / "r.yml")
    with pytest.raises(RecipeError, match="is a folder; name a YAML file"):
        check_recipe(tmp_path)


def test_a_small_file_that_expands_to_gigabytes_is_refused_at_once(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    for text in ("\n".join(lines), "run: &r {steps: *r}"):
        start = time.monotonic()
        assert "expands to more than 20,000 values" in refused(tmp_path / "r.yaml", text)
        assert time.monotonic() - start < 10
        with pytest.raises(RecipeError, match="expands to more than"):
            read_mapping(tmp_path / "r.yaml")
