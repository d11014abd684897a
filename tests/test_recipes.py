"""Every recipe loads, describes a valid model, and starts with its claim, cost and command."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tokenformer import TokenformerImageTextConfig
from tokenformer.cli import COMMANDS, load
from tokenformer.cli.parser import parse
from tokenformer.models.model_classes import build_on_meta
from tokenformer.train.image_workload import IMAGE_FAMILIES
from tokenformer.train.options import DataOptions, ModelOptions
from tokenformer.train.text_workload import TEXT_FAMILIES

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_recipe(path: Path) -> None:
    head = path.read_text().splitlines()[:5]
    topics = ("# Claim", "# Cost", "# Expect", "# Data", "# Command")
    assert all(line.startswith(topic) for line, topic in zip(head, topics, strict=True))
    assert str(path.relative_to(ROOT)) in head[-1]

    options = SimpleNamespace(**parse("train", load(COMMANDS["train"]), [str(path)], ""))
    assert options.run.steps == yaml.safe_load(path.read_text())["run"]["steps"]
    assert options.schedule.warmup_steps < options.run.steps

    model: ModelOptions = options.model
    # What a run reads from its data; a preset has the size of its images.
    given = {"vocab_size": 257}
    if options.data.images is not None:
        given = {} if model.preset else {"image_size": 28, "num_channels": 1}
    given |= model.options
    config_class = config_class_of(options.data, model.family)
    config = config_class.from_preset(model.preset, **given) if model.preset else None
    assert build_on_meta(config or config_class(**given)).num_parameters() > 90_000


def config_class_of(data: DataOptions, family: str) -> type:
    if data.image_text is not None:
        return TokenformerImageTextConfig
    return (TEXT_FAMILIES if data.images is None else IMAGE_FAMILIES)[family]


def test_there_are_recipes():
    assert len(RECIPES) >= 18
