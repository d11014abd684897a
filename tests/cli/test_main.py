"""The command as users meet it: real processes, exit codes, what is printed where."""

import subprocess
import sys

import pytest

from tokenformer.cli import VERBS, spell_out

HEAVY = "import sys; sys.exit(','.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenformer", *arguments],
        capture_output=True,
        text=True,
        **options,
    )


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS)], ids=" ".join)
def test_help_answers_without_importing_torch(arguments):
    code = (
        "import sys\nfrom tokenformer.cli import main\n"
        f"try: main({[*arguments, '--help']})\nexcept SystemExit as end: assert not end.code\n"
        + HEAVY
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"imported: {done.stderr}"
    assert "usage: tokenformer" in done.stdout


def test_help_lists_every_verb_with_a_line():
    done = run("--help")
    for verb in VERBS:
        assert f"\n    {verb} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "verb"),
        (["bogus"], "bogus"),
        (["demo", "--stps", "3"], "stps is not an option; did you mean steps?"),
        (["demo", "--steps", "many"], "steps"),
        (["demo", "--steps", "0"], "--steps 0"),
        (["demo", "--seed", "-1"], "--seed -1"),
        (["inspect", "124m", "--length", "1.5"], "--length 1.5 is not valid; expected int"),
        (["inspect", "124m", "--lengths", "1", "x"], "--lengths x"),
        (["inspect"], "model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, named):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert done.stderr.startswith("tokenformer")


def test_version():
    import tokenformer

    assert run("--version").stdout.strip().endswith(tokenformer.__version__)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["--json", "124m"], ["--json=true", "124m"]),
        (["124m", "--json=false"], ["124m", "--json=false"]),
        (["--lengths", "1", "2", "--json"], ["--lengths=[1,2]", "--json=true"]),
        (["--lengths", "1,2", "-h"], ["--lengths=[1,2]", "-h"]),
        (["--lengths=5"], ["--lengths=[5]"]),
        (["--lengths", "[1, 2]"], ["--lengths=[1, 2]"]),
        (["--lengths", "-1"], ["--lengths=[-1]"]),
    ],
)
def test_flags_and_lists_may_be_written_as_people_write_them(given, spelled):
    assert spell_out(["inspect", *given]) == ["inspect", *spelled]
