"""The study of token adapters: equal parameters, forgetting at equal acquisition, the corpora."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.adapters import (
    FULL,
    LORA,
    METHODS,
    MIDDLE,
    SIZES,
    TOKENS,
    at_acquisition,
    continual_runs,
    find,
    plan,
    report,
)
from experiments.adapters.adapt_run import BASE, AdaptRun, Method
from experiments.adapters.continual import Continual
from experiments.adapters.corpora import questions
from experiments.adapters.image_adapt_run import ImageAdaptRun
from experiments.exhibit import SCALES
from experiments.job import Results

LAPTOP = SCALES["laptop"]


def results_of(rows: dict) -> Results:
    results = Results(Path("/nonexistent"))
    results.rows = rows
    return results


def record() -> Results:
    """Results with made-up losses for every planned job; added tokens forget least."""
    results = Results(Path("/nonexistent"))
    for _ in range(4):  # the plan grows with the results
        for job in plan(LAPTOP, results):
            if isinstance(job, Continual):
                ways = ("base", "its own adapter", "adapter chosen by likelihood")
                ways += ("all adapters merged", "one LoRA through all", "chosen right")
                results.rows[job.key] = {name: dict.fromkeys(ways, 0.5) for name in job.corpora}
            elif isinstance(job, ImageAdaptRun):
                kept = {"kept_accuracy": [0.2, 0.1], "kept_loss": [4.0, 4.5]}
                row = {"accuracy": 0.8, "loss": 1 + job.rate, "trained_parameters": 6144, **kept}
                results.rows[job.key] = row | {"seconds": 1.0}
            elif isinstance(job, AdaptRun):
                lost = 0.1 if job.method.name == "tokens" else 0.4
                results.rows[job.key] = {
                    "loss": 2 + abs(job.rate - 2e-3),
                    "bits_per_byte": 2.0 + 0.01 * job.seed,
                    "kept_bits_per_byte": 2.0 + lost,
                    "kept_at_start": 2.0,
                    "trained_parameters": 20480,
                    "bytes": 80_000,
                    "seconds": 60.0,
                    "curve": [[0, 4.0, 2.0], [100, 3.0, 2.0 + lost / 2], [200, 2.0, 2.0 + lost]],
                }
    return results


def test_methods_train_equally_many_parameters():
    layers, width = BASE.model.layers, BASE.model.width
    ffn = 4 * (BASE.model.tokens or 0)

    def parameters(method: Method) -> int:
        places = len(method.layers)
        if method.name == "lora":
            attention = (BASE.model.tokens or 0) + width
            per_rank = 2 * (ffn + width) + 2 * (places - 1) * attention
            return layers * method.size * per_rank
        return layers * method.size * 2 * width * places

    for name, methods in SIZES.items():
        if name != FULL:
            found = [parameters(method) for method in methods]
            assert found[1:] == pytest.approx([20_480, 81_920], rel=0.31), name
            if all(method.layers == ("ffn",) for method in methods):
                assert found == [5_120, 20_480, 81_920]


def test_forgetting_is_read_where_the_new_loss_is_that_of_lora():
    run = AdaptRun()
    curve = [[0, 4.0, 2.0], [10, 3.0, 2.1], [20, 2.0, 2.5]]
    results = results_of({run.key: {"curve": curve, "kept_at_start": 2.0}})
    assert at_acquisition([run], results, 3.0) == pytest.approx(0.1)
    assert at_acquisition([run], results, 2.5) == pytest.approx(0.3)
    assert at_acquisition([run], results, 4.5) == pytest.approx(0.0)
    assert at_acquisition([run], results, 1.9) is None


def test_shares_and_corpora_use_the_rate_of_the_sweep(tmp_path):
    results = record()
    for name, places in find(LAPTOP, results).items():
        for (share, corpus), runs in places.items():
            assert [run.seed for run in runs] == [0, 1, 2]
            assert {run.corpus for run in runs} == {corpus}
            assert {run.method for run in runs} == {SIZES[name][share]}
            assert {run.rate for run in runs} == {2e-3} or name == FULL
    findings = report(LAPTOP, results)
    assert f"{TOKENS}: 2.010 ± 0.010, forgets +0.100 there" in findings.argument
    assert len(findings.tables[1].rows) == 1 + len(METHODS)
    findings.plots[0].draw(tmp_path / "plot.png")


def test_one_lora_goes_through_all_corpora_with_the_parameters_of_three_adapters():
    _, comparisons = continual_runs(LAPTOP, record())
    assert [job.sequential.seed for job in comparisons] == [0, 1, 2]
    for job in comparisons:
        chain = [job.sequential, job.sequential.after, job.sequential.after.after]
        assert [run.corpus for run in chain[::-1]] == [run.corpus for run in job.adapters]
        assert chain[-1].after is None
        assert job.sequential.method.size == 3 * SIZES[LORA][MIDDLE].size
        assert {run.seed for run in (*chain, *job.adapters)} == {job.sequential.seed}


def test_a_run_that_goes_on_starts_at_the_end_of_the_one_before(workspace):
    base = BASE.reduced()
    workspace.prepare_data({"enwik8", "python", "captions", "questions"})
    base.run(workspace)
    first = replace(AdaptRun(Method("lora", 2), rate=1e-2).reduced(), start=base)
    ended = first.run(workspace)
    again = replace(first, after=first, corpus="python")
    found = again.run(workspace)
    assert found["start_bits_per_byte"] == pytest.approx(ended["bits_per_byte"], abs=1e-4)
    assert found["kept_at_start"] == pytest.approx(ended["kept_bits_per_byte"], abs=1e-4)
    assert found["kept_at_start"] != ended["kept_at_start"]
    assert (workspace.model(again) / "adapter_model.safetensors").exists()


def test_questions_have_the_right_answers(real_data):
    tasks = real_data("eval")
    found = list(questions(tasks))
    assert len(found) == 2376 + 1172 + 1838
    first = json.loads((tasks / "arc_easy_test.jsonl").read_text().splitlines()[0])
    assert found[0]["prompt"] == f"Question: {first['question']}\nAnswer:"
    assert found[0]["completion"] == f" {first['choices'][first['gold']]}\n"


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "adapters", "--scale", "smoke", "--out", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "one LoRA through all" in text
    assert (tmp_path / "images" / "token-adapters.png").exists()
