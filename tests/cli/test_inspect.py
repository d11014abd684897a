"""`tokenformer inspect` as a user runs it: a process, its two streams and its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tokenformer.cli import main
from tokenformer.models.accounting import count_parameters, forward_flops, matching_transformer
from tokenformer.models.configuration import TokenformerConfig, TransformerConfig

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "accounting.md"
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenformer", "inspect", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_tables_and_plot(tmp_path: Path) -> None:
    done = run("354m", "--plot", "flops.png", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for message in (
        "354,190,848",
        "356,305,664",
        "width 1408",
        "65,536",
        "AdamW moments",
        "flops.png",
    ):
        assert message in done.stdout
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert "\n".join(lines) in DOCS.read_text(encoding="utf-8")  # its worked example
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "…" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["flops.png"]
    with Image.open(tmp_path / "flops.png") as image:
        image.load()
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50


def test_json_of_a_folder(tmp_path: Path) -> None:
    config = TokenformerConfig(**SMALL, ffn_tokens=[30, 70])
    config.save_pretrained(tmp_path / "model")
    options = ("--lengths", "[16, 64]", "--batch_size", "3", "--length", "32", "--json")
    done = run("model", *options, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    for family, expected in (
        ("tokenformer", config),
        ("transformer", matching_transformer(config)),
    ):
        message = report[family]
        total = sum(count_parameters(expected).values())
        assert message["parameters"] == {**count_parameters(expected), "total": total}
        assert [row["length"] for row in message["flops_by_length"]] == [16, 64]
        for row in [*message["flops_by_length"], message["flops"]]:
            forward = forward_flops(expected, row["length"])
            assert row["forward"] == {**forward, "total": sum(forward.values())}
            assert row["training"]["total"] == 3 * row["forward"]["total"]
        memory = message["memory_bytes"]
        assert memory["state"]["total"] == 16 * total
        assert memory["total"] == memory["state"]["total"] + memory["activations"]["total"]
    assert (report["batch_size"], report["length"], report["plot"]) == (3, 32, None)


def test_bad_preset_in_a_process(tmp_path: Path) -> None:
    done = run("355m", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for message in ("355m", "did you mean 354m?", "124m", "1.5b", "transformer-1.4b"):
        assert message in done.stderr


def test_transformer_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["inspect", "transformer-124m", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert "tokenformer" not in report
    assert report["transformer"]["parameters"]["total"] == 123_569_664
    TransformerConfig(**SMALL, mlp="swiglu").save_pretrained(tmp_path)
    main(["inspect", str(tmp_path)])
    assert "ratio" not in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["PDF", "svg"])
def test_other_plot_formats(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"flops.{suffix}"
    file.write_text("an older figure")
    main(["inspect", "124m", "--lengths", "[1]", "--plot", str(file), "--json"])
    assert json.loads(capsys.readouterr().out)["plot"] == str(file)
    starts = {"PDF": b"%PDF-", "svg": b"<?xml"}
    assert file.read_bytes().startswith(starts[suffix])
    assert list(tmp_path.iterdir()) == [file]


CONFIG_FILES: dict[str, tuple[str, list[str]]] = {
    "broken": ("{", ["not JSON"]),
    "binary": ("\x00\x01", ["not JSON"]),
    "nested": ("[" * 100_000, ["not JSON"]),
    "a list": ("[1]", ["config.json is not a model's configuration", "no JSON object"]),
    "no type": ("{}", ["model_type", "tokenformer", "tokenformer_transformer"]),
    "another type": ('{"model_type": "llama"}', ["'llama'", "tokenformer_transformer"]),
    "odd type": ('{"model_type": ["tokenformer"]}', ["model_type", "tokenformer_transformer"]),
    "bad value": ('{"model_type": "tokenformer", "hidden_size": "64"}', ["hidden_size"]),
    "bad shape": ('{"model_type": "tokenformer", "num_attention_heads": 7}', ["multiple"]),
    "bad scales": ('{"model_type": "tokenformer", "scale_tokens": 3}', ["config.json"]),
}


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *arguments])
    assert stopped.value.code == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.splitlines()) == 1
    return streams.err


@pytest.mark.parametrize("case", CONFIG_FILES)
def test_bad_config_files(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = CONFIG_FILES[case]
    (tmp_path / "config.json").write_text(content)
    line = refusal([str(tmp_path)], capsys)
    assert all(part in line for part in message), line


def test_a_misspelled_key_of_config_json_is_warned_of(tmp_path: Path) -> None:
    """Tools annotate config.json with keys of their own, so it loads; a near miss is named."""
    (tmp_path / "config.json").write_text('{"model_type": "tokenformer", "vocab_sise": 64}')
    done = run(".", folder=tmp_path)
    assert done.returncode == 0
    assert "vocab_sise=64 has no effect; the option is vocab_size=" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "[1024, 0]"], "lengths"),
        (["--lengths", "[-1]"], "lengths"),
        (["--lengths", "[]"], "lengths"),
        (["--lengths", "[many]"], "lengths"),
        (["--lengths", "[1e400]"], "lengths"),
        (["--batch_size", "0"], "batch_size"),
        (["--length", "-5"], "length"),
        (["--plot", "FOLDER/flops.bmp"], ".png, .pdf, .svg"),
        (["--plot", "FOLDER/flops"], ".png, .pdf, .svg"),
        (["--plot", "FOLDER/missing/flops.png"], "folder that does not exist"),
        (["--plot", "FOLDER/folder.png"], "is a folder"),
        (["--plot", "FOLDER/" + "x" * 300 + ".png"], "cannot be written"),
    ],
)
def test_bad_options(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    options = [option.replace("FOLDER", str(tmp_path)) for option in options]
    assert message in refusal(["124m", *options], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_folder_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no config.json" in refusal([str(tmp_path)], capsys)
    assert "neither a preset nor a folder" in refusal(["x" * 5000], capsys)
    (tmp_path / "config.json").mkdir()
    assert "has no config.json" in refusal([str(tmp_path)], capsys)


def test_nothing_a_config_names_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "tokenformer", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    main(["inspect", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["tokenformer"]["width"] == 768
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "family", "parameters"),
    [
        ("base-match", "tokenformer", 86_447_848),
        ("Large", "tokenformer", 404_670_440),
        ("transformer-base", "transformer", 86_447_848),
    ],
)
def test_an_image_classifier_by_its_preset(name, family, parameters, capsys):
    main(["inspect", name, "--json"])
    found = json.loads(capsys.readouterr().out)[family]
    assert found["parameters"]["total"] == parameters
    assert found["memory_bytes"]["state"]["total"] == 16 * parameters
    forward = found["flops"]["forward"]
    assert forward["ffn"] == 2 * found["parameters"]["ffn"] * 197, "every weight, every position"
    main(["inspect", name])
    printed = capsys.readouterr().out
    assert f"{parameters:,}" in printed
    assert "patches of 16 x 16" in printed
    with pytest.raises(SystemExit):
        main(["inspect", name, "--length", "9"])
    assert f"--length does not apply: {name} is an image classifier" in capsys.readouterr().err


def test_routed_tokens_are_counted_in_total_and_active(tmp_path: Path) -> None:
    config = TokenformerConfig(**SMALL, ffn_tokens=320, active_groups={"ffn": 2})
    config.save_pretrained(tmp_path)
    found = json.loads(run(str(tmp_path), "--json", folder=tmp_path).stdout)["tokenformer"]
    skipped = 2 * 2 * 32 * (320 - 64)
    totals = {kind: found[kind]["total"] for kind in ("parameters", "active_parameters")}
    assert totals["parameters"] - totals["active_parameters"] == skipped
    lines = run(str(tmp_path), folder=tmp_path).stdout.splitlines()
    active = next(line.split() for line in lines if line.startswith("active per token"))
    assert active[3] == f"{totals['active_parameters']:,}"


def test_vision_language_models(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenformer import TokenformerImageTextConfig
    from tokenformer.models.accounting import count_parameters, image_text_training_flops

    main(["inspect", "base+124m", "--json"])
    found = json.loads(capsys.readouterr().out)["tokenformer"]
    config = TokenformerImageTextConfig.from_preset("base+124m")
    assert found["parameters"]["total"] == sum(count_parameters(config).values())
    training = image_text_training_flops(config, found["flops"]["length"])
    assert found["flops"]["training"]["total"] == sum(training.values())
    assert found["tokens"]["ffn"][0] == [3072, 64, 2304]
    main(["inspect", "base+124m", "--length", "64"])
    printed = capsys.readouterr().out
    assert "an image and 64 tokens of text" in printed
    assert "243,458,304" in printed
    assert "--plot does not apply" in refusal(["base+124m", "--plot", "x.png"], capsys)
