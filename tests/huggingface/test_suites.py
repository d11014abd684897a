"""Our models under the test suites of transformers and peft, next to models of their own.

`pytest -m slow tests/huggingface/test_suites.py -s` prints the counts of every model.
"""

import inspect
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from tests.huggingface import suites
from tests.huggingface.model_testers import (
    IMAGE_TEXT,
    LANGUAGE,
    VISION,
    image_text_case,
    language_case,
    processor_case,
    vision_case,
)
from tests.huggingface.model_testers import with_our_names as known

pytestmark = pytest.mark.slow

NOT_IN_SDIST = (".exporters", ".exporters.test_export", ".generation", ".generation.test_utils")
MODES = ("routed", "shared", "projector")
OURS = ("tokenformer", "transformer", *MODES)
LEFT_OUT = {
    # It sets `config.scale = 0` on any configuration that has the name; ours has a method of it.
    "test_init_weights_can_init_buffers": OURS,
    # It looks for GenerationMixin among the direct bases; ours inherit it through a shared base.
    "test_inherits_generation_mixin": OURS,
}
LEFT_OUT_OF_VISION = {
    # It asks for an nn.Embedding; ViT's own tester replaces it for patch embeddings. See
    # tests/models/test_vision.py::test_input_embeddings_are_the_patches.
    "test_model_get_set_embeddings": (*OURS, "vit"),
}
LEFT_OUT_OF_IMAGE_TEXT = {
    # The vision half alone has a plan for tensor parallelism; a joint model has none.
    "test_tp_plan_matches_params": MODES,
    "test_tied_head_has_a_tp_plan_entry": MODES,
}


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    found = getattr(request.config, "cache", None)
    return Path(found.mkdir("suites")) if found else Path(tempfile.mkdtemp())


@pytest.fixture(scope="module")
def common(request: pytest.FixtureRequest, cache: Path) -> Iterator[Any]:
    """transformers' tests/test_modeling_common.py."""
    suite = suites.Suite.find("transformers", cache)
    suites.needs("parameterized", cache)
    for mark in suite.marks():
        request.config.addinivalue_line("markers", f"{mark}: of the suite of transformers")
    transformers.logging.disable_progress_bar()
    # Some of its tests read the log, whose level `serve` in another test may have changed.
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield known(suite.load("test_modeling_common", NOT_IN_SDIST))
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def left_out(name: str, tests: dict[str, tuple[str, ...]]) -> list[str]:
    return [test for test, models in tests.items() if name in models]


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_model(common: Any, name: str) -> None:
    case = language_case(common, common.GenerationTesterMixin, name)
    outcome = suites.run(case, left_out(name, LEFT_OUT))
    print(f"\n{name} (language): {outcome}")
    assert len(outcome.passed) > 80
    assert name not in OURS or not outcome.failed, str(outcome)


@pytest.mark.parametrize("name", VISION)
def test_vision_model(common: Any, name: str) -> None:
    tests = left_out(name, LEFT_OUT | LEFT_OUT_OF_VISION)
    outcome = suites.run(vision_case(common, name), tests)
    print(f"\n{name} (vision): {outcome}")
    assert len(outcome.passed) > 80
    assert name not in OURS or not outcome.failed, str(outcome)


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_image_text_model(common: Any, name: str) -> None:
    case = image_text_case(common, common.GenerationTesterMixin, name)
    outcome = suites.run(case, left_out(name, LEFT_OUT | LEFT_OUT_OF_IMAGE_TEXT))
    print(f"\n{name} (image-text): {outcome}")
    assert len(outcome.passed) > 80
    assert name not in OURS or not outcome.failed, str(outcome)


@pytest.fixture
def processing(common: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' tests/test_processing_common.py, with a local image for those of the hub."""
    Image.effect_noise((40, 30), 80).convert("RGB").save(picture := tmp_path / "picture.png")
    hub = types.ModuleType("fetch_hub_objects_for_ci")  # not in the sdist
    hub.url_to_local_path = lambda url: str(picture)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, hub.__name__, hub)
    return suites.Suite.find("transformers", cache).load("test_processing_common")


def test_processor(processing: Any) -> None:
    case = processor_case(processing)
    case.setUpClass()
    outcome = suites.run(case)
    case.tearDownClass()
    print(f"\nprocessor: {outcome}")
    assert len(outcome.passed) > 30
    assert not outcome.failed, str(outcome)


def peft_case(common: Any, folder: Path, options: dict[str, Any]) -> type[unittest.TestCase]:
    """A case of those tests of peft's class that take a model's name and an adapter's options."""
    from peft import LoraConfig

    tester = common.TestDecoderModelsTargetParameters
    wanted = ["self", "model_id", "config_cls", "config_kwargs"]

    def call(name: str) -> Any:
        def test(self: unittest.TestCase) -> None:
            torch.manual_seed(0)
            getattr(tester(), name)(str(folder), LoraConfig, options.copy())

        return test

    found = [name for name in dir(tester) if name.startswith("test_")]
    taken = [n for n in found if list(inspect.signature(getattr(tester, n)).parameters) == wanted]
    return type("PeftCase", (unittest.TestCase,), {name: call(name) for name in taken})


PEFT_OPTIONS = {
    "tokenformer": {"target_parameters": ["key_tokens", "value_tokens"], "target_modules": []},
    "transformer": {"target_parameters": ["o.weight"], "target_modules": []},
    "llama": {"target_parameters": ["o_proj.weight"], "target_modules": []},
}


@pytest.mark.parametrize("name", PEFT_OPTIONS)
def test_target_parameters_of_peft(cache: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    suite = suites.Suite.find("peft", cache)
    common = suite.load("test_target_parameters", ["diffusers"])
    config_class, options, classes = LANGUAGE[name]
    torch.manual_seed(0)
    model = classes[-1](config_class(**options))
    with torch.no_grad():  # the published initialization leaves so small a model inert
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    lora = {"task_type": "CAUSAL_LM", "lora_dropout": 0.0, **PEFT_OPTIONS[name]}
    outcome = suites.run(peft_case(common, tmp_path, lora))
    print(f"\n{name} (peft): {outcome}")
    assert len(outcome.passed) > 20
    assert name not in OURS or not outcome.failed, str(outcome)
