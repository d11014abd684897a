"""`tokenformer evaluate --tasks` on real items: the table, and resuming after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.evaluation import copy_first_lines
from tests.support.processes import LIMIT, started
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer
from tokenformer.evaluate.benchmarks import BENCHMARKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The response cache of an evaluation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenformer" / "evaluate"


@pytest.fixture
def folder(tmp_path, make_model):
    ids = {f"{name}_token_id": END_OF_TEXT for name in ("bos", "eos", "pad")}
    shape = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    make_model("tokenformer", **shape, **ids).float().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def data(real_data, tmp_path_factory):
    return copy_first_lines(real_data("eval"), tmp_path_factory.mktemp("eval"), 150)


def evaluate(capsys, *arguments):
    main(["evaluate", *(str(word) for word in arguments)])
    return capsys.readouterr()


def test_the_table_has_the_rows_of_the_paper(folder, data, cache, capsys):
    message = evaluate(capsys, folder, "--tasks", "paper", "--data", data, "--limit", 5)
    lines = message.out.splitlines()
    assert "TokenFormer" in lines[0]
    titles = ["LAMBADA ppl", *(b.title for b in BENCHMARKS.values()), "Average"]
    assert [line[:12].strip() for line in lines[2:]] == titles
    assert message.err == ""
    assert list(cache.iterdir()) == []  # a finished evaluation leaves nothing


def test_json_is_reproducible_and_includes_perplexity(folder, data, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Some words to measure on. " * 9)
    arguments = ["--tasks", "winogrande,piqa,winogrande", "--data", data, "--limit", 6, "--json"]
    first = json.loads(evaluate(capsys, folder, *arguments, "--perplexity", text).out)
    assert first["perplexity"]["tokens"] == 6
    found = {(s["task"], s["metric"]): s for s in first["tasks"]["scores"]}
    assert list(found) == [("winogrande", "acc"), ("piqa", "acc"), ("piqa", "acc_norm")]
    assert {score["items"] for score in found.values()} == {6}
    assert json.loads(evaluate(capsys, folder, *arguments).out)["tasks"] == first["tasks"]


def wait_for_lines(cache, count, process):
    """Wait until `count` batches are cached."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and process.poll() is None:
        for path in cache.glob("*.jsonl"):
            if path.read_bytes().count(b"\n") >= count:
                return path
        time.sleep(0.002)
    raise AssertionError(f"no {count} batches: {process.poll()}")


@pytest.mark.slow
def test_a_killed_evaluation_resumes_to_the_same_result(folder, data, cache, tmp_path, capsys):
    measure = ["--tasks", "winogrande,piqa", "--data", data, "--batch_size", 2, "--json"]
    arguments = [folder, *measure, "--limit", 60]
    words = [str(word) for word in arguments]
    command = [sys.executable, "-m", "tokenformer", "evaluate", *words]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        kept = wait_for_lines(cache, 10, process)
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=LIMIT)
    assert out == b""
    batches = kept.read_bytes().count(b"\n")
    assert 10 <= batches < 120  # killed midway

    # A model that differs in one bit of one weight does not reuse the responses.
    changed = tmp_path / "changed"
    change_one_bit(folder, changed)
    other = evaluate(capsys, changed, *measure, "--limit", 2)
    assert "Resuming" not in other.err
    assert kept.exists()

    resumed = evaluate(capsys, *arguments)
    assert f"Resuming with {batches} cached batches." in resumed.err
    assert not kept.exists()
    unbroken = evaluate(capsys, *arguments)
    assert "Resuming" not in unbroken.err
    assert unbroken.out == resumed.out


def change_one_bit(folder, out):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], weight[0, 0] + 1)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "sciq", "--data", "DATA"], "sciq cannot be read from local files, only"),
        (["--tasks", "piqa", "--data", "EMPTY"], "has no file for piqa: looked for piqa_val.json"),
        (["--tasks", "piqa", "--data", "absent"], "--data: no absent"),
        (["--tasks", "piqa", "--data", "DATA", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--perplexity", "DATA", "--data", "DATA"], "needs --tasks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_input_is_one_line(arguments, named, folder, data, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    places = {"DATA": str(data), "EMPTY": str(tmp_path / "empty")}
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(folder), *(places.get(word, word) for word in arguments)])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.err.count("\n") == 1
    assert named in captured.err


def test_without_lm_eval_the_error_says_what_to_install(folder, data, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(folder), "--tasks", "piqa", "--data", str(data)])
    assert end.value.code == 2
    assert "lm-evaluation-harness: pip install " in capsys.readouterr().err


def test_an_unusable_cache_folder_is_an_error(folder, data, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SystemExit):
        main(["evaluate", str(folder), "--tasks", "piqa", "--data", str(data), "--limit", "1"])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "set XDG_CACHE_HOME to another folder" in message


DEFINITION = """\
task: winogrande_here
include: {stock}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{validation: {rows}}}}}
training_split: null
"""


@pytest.mark.slow
def test_the_command_line_of_lm_eval_gives_the_same(folder, data, tmp_path, capsys):
    """In a separate offline process that only imports tokenformer first."""
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent / "winogrande" / "default.yaml"
    definition = DEFINITION.format(stock=stock, rows=data / "winogrande_dev.jsonl")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "winogrande_here.yaml").write_text(definition)
    start = "import tokenformer; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    options = {
        "--model": "hf",
        "--model_args": f"pretrained={folder}",
        "--tasks": "winogrande_here",
        "--include_path": tmp_path / "tasks",
        "--device": "cpu",
        "--batch_size": 8,
        "--output_path": tmp_path / "results",
    }
    words = [str(word) for option in options.items() for word in option]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", start, *words],
        env=offline,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "results").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]["winogrande_here"]
    message = evaluate(capsys, folder, "--tasks", "winogrande", "--data", data, "--json")
    ours = json.loads(message.out)
    assert [score["items"] for score in ours["tasks"]["scores"]] == [150]
    for score in ours["tasks"]["scores"]:
        assert score["value"] == pytest.approx(100 * theirs[f"{score['metric']},none"])
        assert score["stderr"] == pytest.approx(100 * theirs[f"{score['metric']}_stderr,none"])


@pytest.mark.slow
def test_scores_of_a_trained_model_are_reproducible(real_data, tmp_path, capsys):
    """Train on enwik8 for a minute, then score 300 items of each of the six tasks twice."""
    corpus, run = tmp_path / "enwik8", tmp_path / "run"
    main(["prepare", str(real_data("text/enwik8.gz")), "--out", str(corpus)])
    recipe = str(ROOT / "recipes" / "laptop" / "enwik8.yaml")
    steps = ["--run.steps", "200", "--run.validate_every", "200", "--run.checkpoint_every", "200"]
    main(["train", recipe, "--out", str(run), "--data.corpus", str(corpus), *steps])
    capsys.readouterr()
    arguments = ["--tasks", "paper", "--data", real_data("eval"), "--limit", 300, "--json"]
    first = evaluate(capsys, run / "model", *arguments).out
    assert evaluate(capsys, run / "model", *arguments).out == first
    found = json.loads(first)["tasks"]
    values = {(s["task"], s["metric"]): s["value"] for s in found["scores"]}
    # A model of this size is within four standard errors of chance.
    for task, benchmark in BENCHMARKS.items():
        low, high = benchmark.chance - 14, benchmark.chance + 14
        assert low <= values[task, benchmark.metric] <= high, task
    # But it has learned to spell: a uniform model has a perplexity of 257 ** 5.6 per word.
    assert values["lambada_openai", "perplexity"] < 1e9
