"""Every Python block and every `tokenformer` command in README and docs works as printed."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tokenformer
from tests.support.processes import LIMIT, started
from tokenformer.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The whole demo belongs to the tests marked slow; here what takes long runs for a few steps.
SHORTENED = {"demo": ["--steps", "2"], "serve": ["--port", "0"], "train": ["--max_steps", "2"]}
PROCESSES = {"serve", "prepare"}
"""One ends by a signal, the other starts processes of its own."""


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands(page: Path) -> list[list[str]]:
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("tokenformer ")]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=page_name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, str(page), "exec"), {"__name__": "docs"})
    assert code  # reached: every assertion in the page held


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=page_name)
def test_commands_run(page, tmp_path, real_data, monkeypatch, capsys):
    """In order, in one folder that stands for a clone, with a folder `my-texts` of one's own and
    one `eval` of benchmarks."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(ROOT / "docs", tmp_path / "my-texts")
    if any("--tasks" in words for words in commands(page)):
        (tmp_path / "eval").symlink_to(real_data("eval"))
    monkeypatch.chdir(tmp_path)
    for words in commands(page):
        arguments = words[1:] + SHORTENED.get(words[1], [])
        if "--tasks" in words:
            arguments += ["--limit", "2"]
        errors = in_a_process(arguments) if words[1] in PROCESSES else here(arguments, capsys)
        assert errors is None, f"{' '.join(words)}\n{errors}"


def here(arguments: list[str], capsys) -> str | None:
    """What was said if it failed. Starting Python and torch anew costs more than most commands."""
    try:
        main(arguments)
    except SystemExit as end:
        return capsys.readouterr().err if end.code else None
    return None


def in_a_process(arguments: list[str]) -> str | None:
    command = [sys.executable, "-m", "tokenformer", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, text=True, **pipes) as process:
        if arguments[0] == "serve" and process.stdout.readline():  # it is there; else it has failed
            process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=LIMIT)[1]
    return errors if process.returncode else None


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_site_navigation_lists_every_page_once():
    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [page for value in values for page in pages(value)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    existing = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(existing)


def test_api_reference_lists_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: tokenformer\.(?:[\w.]+\.)?(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(tokenformer.__all__)


def test_docs_state_the_presets_as_they_are():
    """The size table in models.md, row by row, against the models."""
    import torch

    from tokenformer import TokenformerConfig, TokenformerForCausalLM
    from tokenformer.models.presets import TOKENFORMER_PRESETS

    text = (ROOT / "docs" / "guides" / "models.md").read_text()
    rows = dict(re.findall(r"^\| ([\w.-]+) \|(?: \d+ \|){5} ([\d,]+) \|$", text, re.MULTILINE))
    assert rows.keys() == TOKENFORMER_PRESETS.keys()
    for name, printed in rows.items():
        with torch.device("meta"):
            model = TokenformerForCausalLM(TokenformerConfig.from_preset(name))
        assert model.num_parameters() == int(printed.replace(",", "")), name
