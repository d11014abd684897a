"""The paper scale: commands of recipes, their check, and a small run through torchrun."""

import json
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.catalog import NAMES
from experiments.cluster import GrowthRun, RecipeRun, read_result
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.workspace import ROOT, Workspace

WRITTEN = [name for name in NAMES if (ROOT / "experiments" / name / "__init__.py").exists()]
TINY = RecipeRun(
    "laptop/text",
    (
        ("model.options.hidden_size", 32),
        ("run.steps", 4),
        ("run.validate_every", 2),
        ("run.log_to", []),
        ("stages", "[{steps: 2}, {steps: 2, grow: {sizes: {ffn_tokens: 600}, init: random}}]"),
    ),
    "tiny",
)


def dry_run(names: list[str], out: Path, *options: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(["run", *names, "--scale", "paper", "--dry_run", "--out", str(out), *options])
    return end.value.code


def test_the_command_of_a_run():
    job = RecipeRun("openwebtext/transformer-354m", (("run.steps", 57220), ("run.ema", None)), "t")
    workspace = Workspace(Path("x"))
    folder = job.folder(workspace)
    assert folder.parent == Path("x/runs")
    assert " ".join(job.command(workspace, 8)) == (
        "torchrun --standalone --nproc-per-node 8 -m tokenformer train "
        f"recipes/openwebtext/transformer-354m.yaml --out {folder} --run.steps 57220 --run.ema null"
    )
    other = RecipeRun("openwebtext/transformer-354m", (("run.steps", 99),), "t")
    assert job.folder(workspace) != other.folder(workspace), "runs with other options are apart"
    assert TINY.flops == pytest.approx(RecipeRun("laptop/text", TINY.overrides[:2]).flops, rel=0.1)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_exhibit_passes_the_dry_run(name, tmp_path, capfd):
    out = tmp_path / "out"
    assert dry_run([name], out, "--processes", "8") == 0
    said = capfd.readouterr()
    assert said.err == ""
    kinds = ("--nproc-per-node 8", "computed here", "nothing is left to run")
    assert any(kind in said.out for kind in kinds)
    assert not out.exists(), "nothing is written"


def test_a_recipe_that_is_not_valid_is_reported(tmp_path, monkeypatch, capfd):
    from experiments import progressive_scaling

    digits = RecipeRun("laptop/digits")
    pretrained = RecipeRun("openwebtext/tokenformer-354m")
    jobs = [digits, RecipeRun("laptop/text", (("run.stepz", 3),))]
    for option in (("to", "124m"), ("ffn_tokens", "9000"), ("method", "net2net"), ("too", "9")):
        jobs.append(GrowthRun(pretrained, (option,)))
    exhibit = progressive_scaling.EXHIBIT
    monkeypatch.setattr(
        progressive_scaling,
        "EXHIBIT",
        type(exhibit)(**{**vars(exhibit), "plan": lambda scale, results: jobs}),
    )
    assert dry_run(["progressive_scaling"], tmp_path) == "4 of 7 recipes are not valid"
    said = capfd.readouterr().err
    assert "did you mean --run.steps?" in said
    assert "shrink" in said, "354m does not grow to 124m"
    assert dry_run(["progressive_scaling"], tmp_path, "--processes", "48") != 0, "64 images over 48"


def test_results_of_images(tmp_path):
    from tokenformer import TokenformerVisionConfig

    TokenformerVisionConfig.from_preset("base").save_pretrained(tmp_path / "model")
    rows = [
        {"step": step, "flops": step, "tokens": step, "seconds": 1.0, "loss": 2.0}
        | ({"val_loss": 1.0, "val_accuracy": step / 10} if step % 2 == 0 else {})
        for step in range(1, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_result(tmp_path)
    assert found["accuracy"] == 0.4
    assert found["curve"] == [[2, 2, 0.2], [4, 4, 0.4]]
    assert "perplexity" not in found


@pytest.mark.slow
def test_a_run_through_torchrun(corpus, tmp_path, monkeypatch, capfd):
    from experiments.cluster import launch
    from experiments.progressive_scaling import EXHIBIT

    job = RecipeRun(TINY.recipe, (*TINY.overrides, ("data.corpus", str(corpus))), TINY.label)
    grown = GrowthRun(job, (("ffn_tokens", "700"),))
    options = {name: value for name, value in job.overrides if name != "stages"}
    later = RecipeRun(TINY.recipe, tuple(options.items()), start=grown)
    bad = RecipeRun("laptop/text", (("data.corpus", "absent"), ("run.steps", 1)))
    exhibit = type(EXHIBIT)(**{**vars(EXHIBIT), "plan": lambda scale, results: [bad, later]})
    file = tmp_path / "results.jsonl"
    code = launch({"x": exhibit}, SCALES["paper"], Results(file), tmp_path, False, processes=1)
    assert code == "1 jobs failed"
    said = capfd.readouterr()
    assert "Done: " in said.out, "the output of the run"
    assert "no absent" in said.err
    found = Results(file)[job]
    assert len(found["stage_ends"]) == len(found["stage_perplexities"]) == 2
    assert found["stage_ends"][-1] == found["bits_per_byte"] == found["curve"][-1][-1]
    assert found["perplexity"] == pytest.approx(2 ** found["bits_per_byte"], rel=1e-3), "bytes"
    assert found["flops"] == pytest.approx(job.flops)
    assert (Workspace(tmp_path).model(job) / "config.json").exists()
    assert Results(file)[later]["parameters"] > found["parameters"]
    again = launch({"x": exhibit}, SCALES["paper"], Results(file), tmp_path, False, processes=1)
    assert again == "1 jobs failed"
    assert "running" in capfd.readouterr().out
