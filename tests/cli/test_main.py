"""The command line: help, exit codes, error messages, option syntax."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import error_line, run_command
from tokenformer.cli import COMMANDS, USAGE, load, main
from tokenformer.cli.parser import Arguments, parse

RECIPE = str(Path(__file__).parents[2] / "recipes" / "laptop" / "text.yaml")
HEAVY = "import sys; sys.exit(','.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)], ids=" ".join)
def test_help_answers_without_importing_torch(arguments):
    code = (
        "import sys\nfrom tokenformer.cli import main\n"
        f"try: main({[*arguments, '--help']})\nexcept SystemExit as end: assert not end.code\n"
        + HEAVY
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"imported: {done.stderr}"
    assert "usage: tokenformer" in done.stdout


def test_help_lists_every_command():
    done = run_command("--help")
    for command in COMMANDS:
        assert f"\n    {command} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bogus"], "bogus is not a command; there are adapt, convert, demo,"),
        (["generat"], "generat is not a command; did you mean generate?"),
        (["demo", "--stps", "3"], "--stps is not an option; did you mean --steps?"),
        (["demo", "--stps", "3", "--sed", "4"], "--stps is not an option; did you mean --steps?"),
        (["demo", "--steps", "many"], "steps"),
        (["demo", "--steps", "0"], "--steps 0"),
        (["demo", "--seed", "-1"], "--seed -1"),
        (["inspect", "124m", "--length", "1.5"], "--length 1.5 is not valid; expected int"),
        (["inspect", "124m", "--lengths", "1", "x"], "--lengths x"),
        (["train", "R", "--steps", "3"], "--steps is not an option; did you mean --run.steps?"),
        (["train", "R", "--run.step", "3"], "--run.step is not an option; did you mean --run."),
        (["train", "R", "--run.precision", "x"], "x is not valid; expected fp32 or bf16 or fp16"),
        (["train", "R", "--run.steps", "x"], "train: --run.steps x is not valid; expected int"),
        (["generate", "m", "--max", "3"], "--max is not an option; did you mean --max_new_tokens?"),
        (["generate", "m", "a"], "unexpected argument a"),
        (["generate"], "MODEL is missing: tokenformer generate MODEL --prompt TEXT"),
        (["predict"], "MODEL and IMAGES are missing: tokenformer predict MODEL IMAGE..."),
        (["merge", "a"], "B is missing: tokenformer merge A B --out FOLDER"),
        (["train"], "RECIPE is missing: tokenformer train RECIPE"),
        (["train", "txt"], "no recipe or file txt; did you mean text? `tokenformer train --list`"),
        (["train", "--recipe"], "--recipe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, named, capsys):
    err = error_line([RECIPE if word == "R" else word for word in arguments], capsys)
    assert named in err
    assert err.startswith("tokenformer")


def test_without_a_command_the_help_is_printed(capsys):
    main([])
    out, err = capsys.readouterr()
    assert "usage: tokenformer" in out
    assert err == ""
    assert set(USAGE) == set(COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        "adapt runs/txt --data runs --out new",
        "adapt runs/text --data runs/absent --out new",
        "generate runs/txt --prompt a",
        "generate runs/text --prompts absent",
        "generate runs/text --prompt a --adapter runs/absent",
        "serve runs/text --adapter a=runs/absent",
        "evaluate runs/text --perplexity runs --adapter runs/text",
        "evaluate runs/txt --perplexity runs",
        "evaluate runs/text --perplexity absent",
        "evaluate runs/text --images runs/absent",
        "predict runs/txt runs/text/config.json",
        "predict runs/text absent.png",
        "inspect runs/txt",
        "inspect 125m",
        "grow runs/txt --to 354m --out new",
        "grow runs/text --to runs/txt --out new",
        "prune runs/txt --out new",
        "prune runs/text --data absent --out new",
        "sparsify runs/txt --data runs --out new",
        "sparsify runs/text --data absent --out new",
        "merge runs/txt runs/text --out new",
        "merge runs/text runs/txt --out new",
    ],
)
def test_a_wrong_path_is_refused_before_torch_is_imported(words, refusals):
    code, out, err, imported = refusals[words]
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert imported == []
    assert ("did you mean" in err) == ("txt" in words or "125m" in words)
    assert "runs/txt" not in words or "did you mean runs/text?" in err


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, request):
    """All the commands of the test above in one process, which costs as much as one."""
    here = tmp_path_factory.mktemp("refusals")
    (here / "runs" / "text").mkdir(parents=True)
    (here / "runs" / "text" / "config.json").write_text("{}")
    (here / "runs" / "text" / "tokenizer.json").write_text("{}")
    marks = test_a_wrong_path_is_refused_before_torch_is_imported.pytestmark
    commands = marks[0].args[1]
    code = f"""
import contextlib, io, json, sys
from tokenformer.cli import main
found = {{}}
for words in {commands!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words.split())
            code = 0
        except SystemExit as end:
            code = end.code
    heavy = sorted({{"torch", "transformers", "numpy"}} & set(sys.modules))
    found[words] = code, out.getvalue(), err.getvalue(), heavy
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=here, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_version():
    import tokenformer

    assert run_command("--version").stdout.strip().endswith(tokenformer.__version__)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["--json", "124m"], ["--json=true", "124m"]),
        (["124m", "--json=false"], ["124m", "--json=false"]),
        (["124m", "--json", "true"], ["124m", "--json=true"]),
        (["--json", "False", "124m"], ["--json=false", "124m"]),
        (["--lengths", "1", "2", "--json"], ["--lengths=[1,2]", "--json=true"]),
        (["--lengths", "1,2", "-h"], ["--lengths=[1,2]", "-h"]),
        (["--lengths=5"], ["--lengths=[5]"]),
        (["--lengths", "[1, 2]"], ["--lengths=[1, 2]"]),
        (["--lengths", "-1"], ["--lengths=[-1]"]),
        (["--lengths", "1", "--json", "--lengths=2"], ["--lengths=[1,2]", "--json=true"]),
    ],
)
def test_flags_and_lists_may_be_written_as_people_write_them(given, spelled):
    assert Arguments(load(COMMANDS["inspect"]), given).words == spelled


def test_lists_of_text_are_quoted_and_may_be_repeated():
    given = [
        "--adapter=a=x: y",
        "model",
        "--adapter",
        "#b",
        "--port",
        "0",
        "--adapter=null",
        "--allowed_hosts",
        "a,b",
    ]
    parsed = parse("serve", load(COMMANDS["serve"]), given, "")
    assert list(parsed["adapter"]) == ["a=x: y", "#b", "null"]
    assert list(parsed["allowed_hosts"]) == ["a", "b"]
    assert parsed["port"] == 0


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["--run.compile", "--max_steps", "2"], ["--run.compile=true", "--max_steps", "2"]),
        (["--augmentation.flip", "false"], ["--augmentation.flip=false"]),
        (["--run.steps", "2"], ["--run.steps", "2"]),
    ],
)
def test_flags_in_sections_need_no_value(given, spelled):
    assert Arguments(load(COMMANDS["train"]), given).words == spelled


def test_help_shows_flags_without_values_and_no_null():
    text = run_command("generate", "--help").stdout
    assert "\n  --json " in text
    assert "true,false" not in text
    assert "null" not in text
    assert "--max_new_tokens MAX_NEW_TOKENS" in text
    assert "(type: float, default: 0.8)" in " ".join(text.split())


@pytest.mark.parametrize(
    "words",
    [
        "generate LONG --prompt a",
        "generate MODEL --prompts LONG",
        "evaluate LONG --perplexity MODEL",
        "evaluate MODEL --perplexity LONG",
        "evaluate MODEL --tasks piqa --data LONG",
        "evaluate MODEL --images LONG/a",
        "evaluate MODEL --images digits --confusion LONG/a",
        "predict MODEL LONG",
        "inspect LONG/a/b",
        "grow ./LONG --to 354m --out new",
        "grow LONG/a --to 354m --out new",
        "grow MODEL --to ./LONG --out new",
        "prune ./LONG --out new",
        "merge ./LONG MODEL --out new",
        "train LONG",
        "train R --out LONG",
        "train R --data.corpus LONG",
        "train R --data.corpus LONG/a",
        "train R --data.images ./LONG --data.corpus null",
        "train R --data.images LONG/a --data.corpus null",
        "train R --data.corpus MODEL --model.start_from LONG",
        "prepare ./LONG --out new",
        "serve ./LONG",
        "convert ./LONG --out new",
    ],
)
def test_a_name_too_long_for_any_file_is_refused_in_a_line(words, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = {"model_type": "own", "architectures": []}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    named = {"LONG": "x" * 300, "MODEL": "model"}
    spelled = [RECIPE if word == "R" else word for word in words.split()]
    for name, value in named.items():
        spelled = [word.replace(name, value) for word in spelled]
    with pytest.raises(SystemExit) as end:
        main(spelled)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
