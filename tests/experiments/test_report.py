"""The catalog, the command and the report page."""

from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.catalog import BEYOND, NAMES, PAPER, STUDIES, load_exhibit
from experiments.exhibit import SCALES, Table, complete
from experiments.job import Results
from experiments.report import MACHINE, PAGE, PUBLISHED, anchor, page_text, publish, study_text
from experiments.workspace import ROOT, missing_data

LAPTOP = SCALES["laptop"]


def test_every_folder_is_in_the_catalog():
    folders = {path.parent.name for path in (ROOT / "experiments").glob("*/__init__.py")}
    assert folders == set(NAMES)
    readme = (ROOT / "experiments" / "README.md").read_text()
    assert all(f"({name}/__init__.py)" in readme for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_exhibit_says_what_it_claims_and_plans_jobs(name):
    exhibit = load_exhibit(name)
    for text in (exhibit.title, exhibit.source, exhibit.claim, exhibit.setting):
        assert text.strip()
    jobs = exhibit.plan(LAPTOP, Results(Path("/nonexistent")))
    assert jobs
    assert len({job.key for job in jobs}) >= len(jobs) / 3, "seeds repeat a run of the sweep"
    smoke = exhibit.plan(SCALES["smoke"], Results(Path("/nonexistent")))
    assert sum(job.flops for job in smoke) <= 1e11


def test_the_published_page_is_made_of_the_published_results():
    """The page and its plots come from experiments/results.jsonl; nothing is typed in."""
    results = Results(PUBLISHED)
    exhibits = {name: load_exhibit(name) for name in (*PAPER, *BEYOND)}
    finished = {n: e for n, e in exhibits.items() if complete(e, LAPTOP, results)}
    assert finished
    findings = {name: exhibit.report(LAPTOP, results) for name, exhibit in finished.items()}
    text = page_text(finished, findings, LAPTOP, results, "../images/paper", MACHINE)
    assert PAGE.read_text() == text
    for found in findings.values():
        for plot in found.plots:
            assert (ROOT / "docs" / "images" / "paper" / plot.name).exists()


@pytest.mark.parametrize("name", [name for name in STUDIES if load_exhibit(name).page])
def test_the_page_of_a_study_is_made_of_the_published_results(name):
    results, study = Results(PUBLISHED), load_exhibit(name)
    page = PAGE.with_name(study.page)
    assert page.exists() == complete(study, LAPTOP, results)
    if page.exists():
        findings = study.report(LAPTOP, results)
        assert page.read_text() == study_text(name, study, findings, LAPTOP, results)
        for plot in findings.plots:
            assert (ROOT / "docs" / "images" / plot.name).exists()


def test_publishing_adds_rows_and_replaces_those_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.report.PUBLISHED", tmp_path / "published.jsonl")
    results = Results(tmp_path / "results.jsonl")
    results.rows = {"a": {"key": "a", "loss": 1.0}}
    publish(results)
    results.rows = {"a": {"key": "a", "loss": 2.0}, "b": {"key": "b", "loss": 3.0}}
    publish(results)
    published = Results(tmp_path / "published.jsonl").rows
    assert {key: row["loss"] for key, row in published.items()} == {"a": 2.0, "b": 3.0}


def test_publishing_one_exhibit_keeps_the_others_on_the_page(tmp_path, monkeypatch, capsys):
    table = load_exhibit("parameter_table")
    published = Results(tmp_path / "published.jsonl")
    for job in table.plan(LAPTOP, published):
        published.add(job, job.run(None))
    monkeypatch.setattr("experiments.report.PUBLISHED", published.file)
    monkeypatch.setattr("experiments.report.PAGE", tmp_path / "paper.md")
    monkeypatch.setattr("experiments.report.IMAGES", tmp_path / "images" / "paper")
    main(["report", "theta_ablation", "--publish", "--out", str(tmp_path / "out")])
    assert "theta_ablation is not finished" in capsys.readouterr().out
    assert f"## {table.title}" in (tmp_path / "paper.md").read_text()


def test_a_table_is_markdown():
    table = Table([["model", "loss"], ["ours", "2.0"]], "Losses.")
    assert table.markdown().splitlines() == [
        "Losses.",
        "",
        "| model | loss |",
        "| --- | --- |",
        "| ours | 2.0 |",
    ]
    assert anchor("FLOPs, and length") == "flops-and-length"


def test_the_list_names_every_exhibit(capsys):
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "thetas"], "no exhibit thetas; choose from"),
        (["run", "--workers", "0"], "--workers 0 must be at least 1"),
        (["report", "--publish", "--scale", "smoke"], "--publish is for the scale laptop"),
        (["report", "--scale", "paper"], "invalid choice: 'paper'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_data_skips_an_exhibit_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TOKENFORMER_DATA", str(tmp_path))
    assert missing_data({"enwik8", "python"}) == ["enwik8: TOKENFORMER_DATA has no text/enwik8.gz"]
    main(["run", STUDIES[0], "--out", str(tmp_path / "out")])
    assert f"skipping {STUDIES[0]}: enwik8" in capsys.readouterr().out
