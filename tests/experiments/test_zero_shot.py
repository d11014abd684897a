"""Zero-shot accuracy: the comparison is fair, and its statistics are right."""

import math
from pathlib import Path
from typing import Any

import pytest

from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.workspace import Workspace
from experiments.zero_shot import (
    CHANCE,
    COMPARED,
    FAMILIES,
    HUB,
    RATES,
    Estimate,
    Found,
    evaluations,
    judge,
    plan,
    report,
    tuned,
)
from experiments.zero_shot.evaluation import Items, ZeroShot, copy_lines, right_answers
from tests.support.evaluation import copy_first_lines, items
from tokenformer.evaluate.benchmarks import BENCHMARKS
from tokenformer.evaluate.paper_tables import ZERO_SHOT

LAPTOP = SCALES["laptop"]


def task_rows(bits: list[float], accuracy: float) -> dict[str, Any]:
    row = {"items": len(bits), "accuracy": accuracy, "error": 2.0, "bytes": 10, "bits": bits}
    return {task: dict(row) for task in BENCHMARKS}


def made_up_results(folder: Path) -> Results:
    """Results of all jobs. The middle learning rate is best, and the TokenFormer needs 1, 2 and 3
    bits less for the three right answers of each task."""
    results = Results(folder / "results.jsonl")
    results.add(Items(), {"items": 200})
    for family in FAMILIES:
        middle = RATES[family][1]
        for run in tuned(family, LAPTOP, results).sweep:
            loss = abs(math.log(run.rate / middle))
            results.add(run, {"loss": loss, "bits_per_byte": 2.0, "seconds": 1})
    for family, bits in (("TokenFormer", [9.0, 18.0, 27.0]), ("Transformer", [10.0, 20.0, 30.0])):
        for place, job in enumerate(evaluations(family, LAPTOP, results)):
            shifted = [value + place - 1 for value in bits]
            tasks = task_rows(shifted, CHANCE + place)
            row = {"accuracy": CHANCE + place, "error": 1.0, "lambada_perplexity": [50.0, 5.0]}
            results.add(job.trained, {"loss": 0.0, "bits_per_byte": 2.0, "seconds": 1})
            results.add(job, {**row, "tasks": tasks, "seconds": 1})
    return results


def test_models_have_equal_parameters_compute_and_data(tmp_path):
    ours, theirs = (FAMILIES[family] for family in FAMILIES)
    assert ours.parameters == theirs.parameters
    assert ours.training_flops(256) == theirs.training_flops(256)
    none = Results(tmp_path / "results.jsonl")
    runs = [run for family in FAMILIES for run in tuned(family, LAPTOP, none).sweep]
    assert len({(run.steps, run.batch, run.length, run.seed, run.corpus) for run in runs}) == 1
    assert len(runs) == 6


def test_the_best_rate_of_every_family_is_evaluated_with_all_seeds(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    assert not any(isinstance(job, ZeroShot) for job in plan(LAPTOP, results))
    named = {name for job in plan(LAPTOP, results) for name in job.data}
    assert named == {"enwik8", "zero-shot"}, "missing data is noticed before anything is trained"
    results = made_up_results(tmp_path)
    jobs = [job for job in plan(LAPTOP, results) if isinstance(job, ZeroShot)]
    assert [(job.trained.rate, job.trained.seed) for job in jobs] == [
        (rate, seed) for rate in (8e-3, 4e-3) for seed in (0, 1, 2)
    ]
    assert results.has_all(plan(LAPTOP, results))


def test_differences_are_paired_by_item(tmp_path):
    found = Found(LAPTOP, made_up_results(tmp_path))
    assert found.right_answers("Transformer", ["piqa"]).values == (5.7, 6.0, 6.3)
    assert found.bits_by_item("Transformer", "piqa") == [10, 20, 30], "the mean over the seeds"
    # Differences of -1, -2 and -3 bits: a sum of -6 with a variance of 3 * 1, for 10 bytes.
    one, six = found.difference(["piqa"]), found.difference(BENCHMARKS)
    assert one.value == six.value == pytest.approx(-0.6)
    assert one.error == pytest.approx(math.sqrt(3) / 10)
    assert six.error == pytest.approx(one.error / math.sqrt(6))
    assert found.accuracy("TokenFormer") == Estimate(CHANCE + 1, 1.0)


def test_models_at_chance_have_no_verdict(tmp_path):
    guessing, better = Estimate(CHANCE + 1, 1.0), Estimate(CHANCE + 5, 1.0)
    assert judge(guessing, guessing) == "not at this scale"
    assert judge(better, guessing) == judge(better, better) == "holds"
    assert judge(guessing, better) == "does not hold"
    findings = report(LAPTOP, made_up_results(tmp_path))
    assert findings.verdict == "not at this scale"
    assert "-0.600" in findings.argument
    assert "fewer bits in 3 of 3 seeds" in findings.argument
    findings.plots[0].draw(tmp_path / "plot.png")


def test_right_answers_are_those_of_the_items(real_data, tmp_path):
    """A model that needs a bit more for every later request shows which ones are counted."""
    from tokenformer.evaluate.tasks import load_tasks

    data = copy_first_lines(real_data("eval"), tmp_path, 5)
    for name, task in load_tasks(list(BENCHMARKS), data).items():
        (scored,) = task["tasks"].values()
        scored.build_all_requests(limit=5)
        for place, request in enumerate(scored.instances):
            request.resps.append((-place * math.log(2), False))
        by_hand = items(name, data, 5)
        places, answers, first = [], [], 0
        for item in by_hand:
            places.append(first + item.gold)
            answers.append(item.requests[item.gold])
            first += len(item.requests)
        bits, size = right_answers(scored)
        assert bits == pytest.approx(places)
        # WinoGrande has a context that ends in a space.
        spaces = [len(context) - len(context.rstrip()) for context, _ in answers]
        assert size == sum(len(answer.encode()) for _, answer in answers) + sum(spaces)


def test_the_first_items_are_those_of_the_real_files(real_data, tmp_path):
    copy_lines(real_data("eval"), tmp_path, 3)
    for path in real_data("eval").iterdir():
        lines = (tmp_path / path.name).read_text().splitlines()
        assert lines == path.read_text().splitlines()[:3]


def test_every_model_with_a_command_is_in_the_paper():
    names = {f"{model.name}-{model.size}" for model in ZERO_SHOT}
    assert HUB.keys() <= names
    assert {name for name in names - HUB.keys() if not name.startswith("Hybrid H3")} == set()
    assert [round(model.average, 1) for model in COMPARED.values()] == [44.7, 41.2]


@pytest.mark.slow
def test_smoke_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENFORMER_DATA", str(tmp_path / "none"))
    main(["run", "zero_shot", "--scale", "smoke", "--out", str(tmp_path)])
    assert "## Zero-shot accuracy" in (tmp_path / "report.md").read_text()
    results = Results(tmp_path / "results.jsonl")
    for family in FAMILIES:
        (job,) = evaluations(family, SCALES["smoke"], results)
        row = results[job]
        assert row["tasks"].keys() == BENCHMARKS.keys()
        assert all(len(task["bits"]) == 3 for task in row["tasks"].values())
        assert row["truncated"] > 0, "a model sees no more than the length of its training"
        assert not Workspace(tmp_path).work(job).exists()
