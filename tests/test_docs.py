"""Every Python block and every `tokenformer` command in README and docs runs; links resolve."""

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
OTHER_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("*/README.md")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Commands that take long run for a few steps here; a slow test runs the whole demo.
SHORTENED = {
    "adapt": ["--steps", "2"],
    "demo": ["--steps", "2"],
    "explore": ["--sequences", "8", "--length", "64", "--port", "0"],
    "serve": ["--port", "0"],
    "train": ["--max_steps", "2"],
}
SUBPROCESSES = {"serve", "prepare"}
"""Run in a new process: one is ended by a signal, the other starts processes."""


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
    assert code
    exec(compile(code, str(page), "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=page_name)
def test_commands_run(page, tmp_path, real_data, monkeypatch, capsys):
    """The commands run in order, in a folder with the recipes of a clone, texts and benchmarks."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(ROOT / "docs", tmp_path / "my-texts")
    if any("--tasks" in command for command in commands(page)):
        (tmp_path / "eval").symlink_to(real_data("eval"))
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        arguments = command[1:] + SHORTENED.get(command[1], [])
        if "--tasks" in command:
            arguments += ["--limit", "2"]
        in_subprocess = command[1] in SUBPROCESSES or "--serve" in command
        error = run_process(arguments) if in_subprocess else run_here(arguments, capsys)
        assert error is None, f"{' '.join(command)}\n{error}"


def run_here(arguments: list[str], capsys) -> str | None:
    """Run a command in this process, which saves importing torch, and return its error if any."""
    try:
        main(arguments)
    except SystemExit as end:
        return capsys.readouterr().err if end.code else None
    return None


def run_process(arguments: list[str]) -> str | None:
    """Run a command in a new process and return its error if any."""
    command = [sys.executable, "-m", "tokenformer", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, text=True, **pipes) as process:
        serves = arguments[0] == "serve" or "--serve" in arguments
        if serves and process.stdout.readline():  # the server is up
            process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=LIMIT)[1]
    return error if process.returncode else None


def test_links_between_pages_resolve():
    for page in [*PAGES, *OTHER_PAGES]:
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
    from tokenformer import interpret

    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: tokenformer\.(?:[\w.]+\.)?(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted([*tokenformer.__all__, *interpret.__all__])


def test_size_table_matches_the_presets():
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
