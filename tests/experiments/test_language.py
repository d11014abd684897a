"""The job that trains a language model: its recipe, its stages, what it starts from and reports."""

import json
from dataclasses import replace

import pytest

from experiments.job import Results
from experiments.language import Growth, LanguageRun, Model, reached, steps_for
from experiments.runner import run_jobs
from tokenformer.train.stages import plan

SMALL, LARGE = Model(tokens=8, width=32), Model(tokens=16, width=32)
TINY = LanguageRun(
    SMALL, (4,), corpus="python", length=16, batch=2, validations=2, validation_sequences=2
)


def test_a_transformer_has_as_many_parameters_as_the_tokenformer():
    for tokens in (16, 64, 152):
        ours, theirs = (Model(family, tokens) for family in ("tokenformer", "transformer"))
        assert theirs.parameters == pytest.approx(ours.parameters, rel=0.01)


def test_steps_for_a_budget():
    steps = steps_for(1e12, LARGE)
    assert LanguageRun(LARGE, (steps,)).flops == pytest.approx(1e12, rel=0.01)


def test_schedules_of_the_stages(workspace):
    run = LanguageRun(SMALL, (100, 60), (Growth(LARGE),), warmup=20, decay=0.5)
    first, second = plan(run.recipe(workspace))
    assert (first.schedule.kind, first.schedule.warmup_steps) == ("constant", 20)
    assert (second.schedule.kind, second.schedule.warmup_steps) == ("wsd", 0)
    again = plan(replace(run, every_stage=True, schedule="cosine").recipe(workspace))
    assert [s.schedule.kind for s in again] == ["cosine", "cosine"]
    assert [s.schedule.warmup_steps for s in again] == [20, 15], "at most a quarter of a stage"


def test_a_run_reports_its_losses_and_keeps_its_model(workspace):
    grown = replace(TINY, steps=(2, 2), growth=(Growth(LARGE),))
    result = grown.run(workspace)
    assert result["parameters"] == LARGE.parameters
    assert [point[0] for point in result["curve"]] == [0, 1, 2, 3, 4]
    assert result["curve"][-1][-1] == pytest.approx(result["bits_per_byte"])
    assert result["stage_ends"][-1] == pytest.approx(result["bits_per_byte"], abs=1e-5)
    assert result["flops"] == grown.flops
    assert (workspace.model(grown) / "model.safetensors").exists()
    assert not workspace.work(grown).exists()


def test_a_run_starts_from_the_grown_model_of_another(workspace):
    """Zero keys keep the function, so the loss before the first step is the last one of the start;
    the other corpus is measured at both ends."""
    source = replace(TINY, steps=(3,), seed=1)
    later = replace(
        TINY,
        steps=(2,),
        growth=(Growth(LARGE, "zero"),),
        start=source,
        corpus="python",
        remember="enwik8",
        seed=1,
    )
    assert later.models == [LARGE]
    assert later.with_seed(5).start.seed == 5
    results = Results(workspace.folder / "results.jsonl")
    outcome = run_jobs(lambda results: [later], results, workspace, 1, print)
    assert not outcome.failed
    before, after = results[source], results[later]
    assert after["start_bits_per_byte"] == pytest.approx(before["bits_per_byte"], abs=1e-5)
    assert after["parameters"] == LARGE.parameters
    other = replace(later, growth=(Growth(LARGE, "random"),))
    assert other.run(workspace)["remembered"][0] != pytest.approx(after["remembered"][0], abs=1e-4)


def test_a_growth_that_was_killed_is_repeated(workspace, monkeypatch):
    from tokenformer.train import model_growth

    def kill(source, out, options, batches):
        out.mkdir(parents=True)
        (out / "config.json").write_text("{")
        raise KeyboardInterrupt

    source = replace(TINY, steps=(2,), seed=2)
    later = replace(source, growth=(Growth(LARGE),), start=source)
    source.run(workspace)
    with monkeypatch.context() as patched:
        patched.setattr(model_growth, "grow_model_folder", kill)
        with pytest.raises(KeyboardInterrupt):
            later.run(workspace)
    assert later.run(workspace)["parameters"] == LARGE.parameters


def test_a_transformer_grows_by_a_method_with_its_options(workspace):
    narrow = Model("transformer", None, width=16, heads=2)
    source = replace(TINY, model=narrow, steps=(2,), rate_law="none")
    growth = Growth(replace(narrow, width=32, heads=4), method="hypercloning", noise=0.1)
    source.run(workspace)
    result = replace(source, start=source, growth=(growth,)).run(workspace)
    assert result["parameters"] == growth.to.parameters
    assert json.loads(replace(source, growth=(growth,)).key)["growth"][0]["noise"] == 0.1


def test_the_compute_at_which_a_curve_reaches_a_loss():
    curve = [[0, 0, 8.0], [1, 100, 4.0], [2, 10_000, 2.0], [3, 20_000, 1.9]]
    assert reached(curve, 3.0) == pytest.approx(1000), "half way in the logarithm of the compute"
    assert reached(curve, 1.0) is None
    assert reached(curve, 5.0) == 100
