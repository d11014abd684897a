"""Install hints and recipes, from a clone and from a wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tokenformer import installation
from tokenformer.installation import install_hint, recipe_folder, required_packages

ROOT = Path(__file__).parent.parent
LIMIT = 600  # seconds


def test_from_a_clone_the_hint_installs_the_clone(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert install_hint("vision") == 'pip install -e ".[vision]"'
    monkeypatch.chdir(tmp_path)
    assert install_hint("vision") == f'pip install -e "{ROOT}[vision]"'


def test_from_a_wheel_the_hint_names_the_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "PACKAGE", tmp_path / "tokenformer")
    assert install_hint("vision") == "pip install 'pillow>=11' 'scikit-learn>=1.5'"
    assert install_hint("serve").startswith("pip install 'transformers[serving]>=")
    assert "triton" in install_hint("gpu"), "also on other systems than Linux"


def test_every_extra_names_packages():
    for extra in ("eval", "serve", "vision", "gpu", "docs", "dev"):
        assert required_packages(extra), extra


@pytest.mark.slow
def test_a_wheel_contains_the_recipes_and_the_page(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--quiet", "--no-deps", "--no-index"]
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, ROOT]
    subprocess.run(build, check=True, timeout=LIMIT)
    [wheel] = wheels.iterdir()
    packed = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    recipes = {path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {"tokenformer" / path for path in recipes} <= packed
    page = {path.relative_to(ROOT) for path in (ROOT / "tokenformer/interpret/page").iterdir()}
    assert {Path("tokenformer/interpret/page/index.html")} < page <= packed

    subprocess.run([*pip, "install", *offline, "--target", target, wheel], check=True)
    # -P keeps the working folder off the path; the target comes before the clone's site-packages.
    environment = {**os.environ, "PYTHONPATH": str(target)}

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        return done.stdout + done.stderr

    listed = run("from tokenformer.cli import main; main(['train', '--list'])")
    assert str(target / "tokenformer" / "recipes") in listed
    assert all(f"    {path.stem}\n" in listed for path in recipes)
    hint = run("from tokenformer.installation import install_hint as hint; print(hint('vision'))")
    assert hint == "pip install 'pillow>=11' 'scikit-learn>=1.5'\n"
    missing = run("from tokenformer.cli import main; main(['train', 'text'])")
    assert missing == (
        "tokenformer train: data.corpus: no data/text; make it with `tokenformer prepare`\n"
    )
    (tmp_path / "data" / "text").mkdir(parents=True)
    found = run("from tokenformer.cli import main; main(['train', 'text'])")
    assert "data/text" in found
    assert "no data/text" not in found, "relative to the working folder"


def test_the_clone_has_its_recipes_at_the_root():
    assert recipe_folder() == ROOT / "recipes"
