"""`tokenformer train NAME` and `--list`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import error_line
from tokenformer.cli import recipes
from tokenformer.cli.recipes import find_recipe, recipe_list
from tokenformer.errors import InputError

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "recipes" / "laptop" / "text.yaml"


def test_a_name_is_a_recipe_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("text", "laptop/text"):
        assert find_recipe(name) == TEXT
    (tmp_path / "text").mkdir()
    assert find_recipe("text") == TEXT, "a folder is not a recipe"
    (tmp_path / "growth").write_text("run: {steps: 3}")
    assert find_recipe("growth") == Path("growth"), "a file comes first"


def test_every_recipe_has_a_unique_name():
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert find_recipe(path.stem) == path


@pytest.mark.parametrize("path", ["absent.yaml", "folder/absent", "./absent", "~/absent"])
def test_a_path_stays_a_path(path):
    assert find_recipe(path).name == Path(path).name


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match=r"no recipe or file grwth; did you mean growth\?"):
        find_recipe("grwth")
    with pytest.raises(InputError, match="no recipe or file xyzzy; `tokenformer train --list`"):
        find_recipe("xyzzy")


def test_an_ambiguous_name_is_refused(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.yaml").touch()
    monkeypatch.setattr(recipes, "recipe_folder", lambda: tmp_path)
    with pytest.raises(InputError, match="several recipes; give a/text or b/text"):
        find_recipe("text")
    assert find_recipe("b/text") == tmp_path / "b" / "text.yaml"


def test_list_prints_claim_and_cost_without_torch():
    code = (
        "import sys\nfrom tokenformer.cli import main\n"
        "try: main(['train', '--list'])\nexcept SystemExit as end: assert not end.code\n"
        "sys.exit(','.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == recipe_list()
    claim, cost = (line.split(maxsplit=2)[2] for line in TEXT.read_text().splitlines()[:2])
    assert f"    text\n        {claim}\n        Cost: {cost}\n" in done.stdout


def test_a_recipe_by_name_sets_the_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    err = error_line(["train", "text", "--run.steps", 3], capsys)
    assert "data.corpus: no data/text" in err
    assert list(tmp_path.iterdir()) == []
