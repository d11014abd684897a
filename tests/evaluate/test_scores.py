"""Scores as a table beside the paper's models, and as JSON."""

import json
import math

import pytest

from tokenformer.evaluate.benchmarks import BENCHMARKS
from tokenformer.evaluate.scores import Score, Scores


def measured():
    accuracies = [(task, b.metric, 10.0 * i) for i, (task, b) in enumerate(BENCHMARKS.items(), 1)]
    scores = [Score(task, metric, value, 1.0, 300) for task, metric, value in accuracies]
    scores.insert(0, Score("lambada_openai", "perplexity", 12.5, 0.25, 300))
    other = {"acc": "acc_norm", "acc_norm": "acc"}
    return [*scores, *(Score(task, other[m], 99.0, 1.0, 300) for task, m, _ in accuracies)]


def test_the_table_has_the_metrics_and_figures_of_the_paper():
    lines = str(Scores(150_000_000, measured())).splitlines()
    assert "TokenFormer" in lines[0]
    assert lines[1].split() == ["items", "model", "chance", "130M", "160M", "130M", "150M"]
    rows = {line[:12].strip(): line[12:].split() for line in lines[2:]}
    assert rows["LAMBADA ppl"][:3] == ["300", "12.50", "±"]
    assert rows["LAMBADA ppl"][-1] == "16.38"
    assert rows["HellaSwag"] == ["300", "20.0", "±", "1.0", "25.0", "31.7", "30.3", "35.3", "35.5"]
    assert [row[1] for row in list(rows.values())[1:7]] == [f"{10 * i}.0" for i in range(1, 7)]
    # The standard error of the mean of six is 1 / sqrt(6).
    assert rows["Average"] == ["35.0", "±", "0.4", "29.2", "40.1", "41.2", "44.7", "44.7"]
    assert "99.0" not in str(lines)


def test_no_average_of_some_tasks_and_a_row_for_any_other_task():
    some = [s for s in measured() if s.task != "piqa"] + [Score("sciq", "acc", 71.0, None, 1000)]
    scores = Scores(2_000_000_000, some, truncated=3)
    assert scores.average is None
    lines = str(scores).splitlines()
    assert lines[-2].split() == ["sciq", "acc", "1,000", "71.0", "-", *"-------"]
    assert lines[-1].startswith("3 requests were longer than the model's context")
    assert max(map(len, lines)) <= 100


def test_a_huge_perplexity_is_in_scientific_notation():
    scores = [Score("lambada_openai", "perplexity", 7.2e17, 4.5e20, 20)]
    assert "7.2e+17 ± 4.5e+20" in str(Scores(1, scores))


def test_json_has_all_metrics_and_the_rows_of_the_paper():
    facts = Scores(150_000_000, measured()).asdict()
    assert len(facts["scores"]) == 13
    assert facts["average"]["value"] == pytest.approx(35.0)
    ours = next(row for row in facts["paper"] if row["name"] == "TokenFormer-150M")
    assert ours["hellaswag"] == 35.5
    assert ours["pile_perplexity"] == 10.45


def test_json_has_null_for_nan_and_infinity():
    scores = [Score("lambada_openai", "perplexity", math.nan, math.inf, 20)]
    kept = json.loads(json.dumps(Scores(1, scores).asdict(), allow_nan=False))["scores"]
    assert kept == [
        {
            "task": "lambada_openai",
            "metric": "perplexity",
            "value": None,
            "stderr": None,
            "items": 20,
        }
    ]
