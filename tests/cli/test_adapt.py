"""`tokenformer adapt`: data in every form, the table at the end, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.adaptation import (
    SHORT,
    adapt,
    rows_of,
    save_base,
    save_texts,
    sums,
    write_rows,
)
from tests.support.commands import error_line
from tokenformer.cli import main
from tokenformer.data.corpus import Corpus

pytest.importorskip("peft", reason="peft is not installed")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapt")
    save_base(folder / "base")
    save_base(folder / "transformer", kind="transformer")
    save_texts(folder)
    write_rows(folder / "sums.jsonl", sums(30))
    chats = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        for row in sums(30)
    ]
    write_rows(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    return folder


def test_texts_are_prepared_once_and_the_table_ends_the_run(
    home: Path, tmp_path: Path, capsys: Any
) -> None:
    given = [home / "base", "--data", home / "new.txt", "--keep", home / "kept.txt"]
    given += ["--out", tmp_path / "run", *SHORT]
    adapt(*given)
    out = capsys.readouterr().out
    assert "held out" in out
    assert "new data, bits per byte" in out
    assert "kept data, loss" in out
    first = rows_of(tmp_path / "run")[0]
    assert f"{first['val_loss']:.4f}" in out
    assert "trained parameters" in out
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert {"data", "keep", "adapter", "checkpoints", "metrics.jsonl"} <= {p.name for p in files}
    adapt(*given)
    again = capsys.readouterr().out
    assert "is finished" in again
    assert again[again.index("held out") :] == out[out.index("held out") :]
    assert {path: path.stat().st_mtime_ns for path in files} == files


@pytest.mark.parametrize("kind", ["sums", "chats"])
def test_examples_and_the_result_as_json(
    kind: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    data = home / f"{kind}.jsonl"
    run = tmp_path / "run"
    keep = ["--keep", home / "kept.txt"] if kind == "chats" else []
    adapt(home / "base", "--data", data, *keep, "--out", run, *SHORT, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "tokens"
    assert found["data"]["source"] == str(data)
    rows = rows_of(run)
    assert found["data"]["before"] == {"loss": rows[0]["val_loss"], "bpb": rows[0]["val_bpb"]}
    assert found["data"]["after"]["loss"] == rows[-1]["val_loss"] != rows[0]["val_loss"]
    assert found["trained_parameters"] == 2 * 32 * (16 + 16)
    assert found["bytes"] == (run / "adapter" / "adapter_model.safetensors").stat().st_size
    assert found["steps"] == 6
    assert ("keep" in found) == bool(keep)
    template = run / "data" / "tokenizer" / "chat_template.jinja"
    assert template.exists() == (kind == "chats")
    assert "examples" in Corpus(run / "data").index["splits"]["train"]


@pytest.mark.parametrize("method", ["tokens", "lora", "sparse"])
def test_a_sparse_base_routes_as_before(
    method: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    """The load of its routers is not balanced while something else trains."""
    base = save_base(tmp_path / "base", group_size=6, active_groups={"ffn": 2}, router="centroid")
    run = tmp_path / "run"
    options = ["--share", "0.25"] if method == "sparse" else []
    given = [base, "--data", home / "new.txt", "--keep", home / "kept.txt", "--method", method]
    adapt(*given, *options, "--out", run, *SHORT)
    assert "dead_groups" not in rows_of(run)[-1]
    capsys.readouterr()
    said = ["--prompt", "def ", "--greedy", "--max_new_tokens", "12"]
    if method == "sparse":
        before, after = (load_file(each / "model.safetensors") for each in (base, run / "model"))
        biases = [name for name in before if name.endswith("router.bias")]
        assert len(biases) == 2
        assert all(torch.equal(before[name], after[name]) for name in biases)
        return
    main(["generate", str(base), "--adapter", str(run), *said])
    assert len(capsys.readouterr().out) > 0
    main(
        ["evaluate", str(base), "--adapter", str(run), "--perplexity", str(run / "data"), "--json"]
    )
    found = json.loads(capsys.readouterr().out)["perplexity"]["bits_per_byte"]
    assert found == pytest.approx(rows_of(run)[-1]["val_bpb"], rel=0.05)


def test_examples_that_are_too_long_are_counted(home: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [*sums(20), *({"prompt": "x" * 90, "completion": "y"} for _ in range(10))]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    adapt(home / "base", "--data", file, "--out", tmp_path / "run", *SHORT)
    count = Corpus(tmp_path / "run" / "data").index["splits"]["train"]["examples"]["count"]
    said = capsys.readouterr().out
    assert f" of {count} examples are longer than 32 tokens and lose the start" in said


def test_the_length_fits_the_data(home: Path, tmp_path: Path, capsys: Any) -> None:
    """The model has a context of 64, the held-out part of this text is shorter."""
    text = tmp_path / "short.txt"
    text.write_text("a line of text\n" * 40)
    adapt(home / "base", "--data", text, "--out", tmp_path / "run", "--steps", "1")
    held_out = Corpus(tmp_path / "run" / "data").split("validation")
    record = (tmp_path / "run" / "config.yaml").read_text()
    assert f"length: {len(held_out) - 1}\n" in record
    adapt(home / "base", "--data", text, "--out", tmp_path / "run", "--steps", "1")
    assert "is finished" in capsys.readouterr().out


def test_a_damaged_record(home: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text("model: 3")
    given = [home / "base", "--data", home / "new.txt", "--out", tmp_path]
    assert f"adapt: {tmp_path}/config.yaml is damaged" in error_line(["adapt", *given], capsys)


def test_the_same_text_may_be_new_and_kept(home: Path, tmp_path: Path) -> None:
    text = home / "new.txt"
    adapt(home / "base", "--data", text, "--keep", text, "--out", tmp_path / "run", *SHORT)
    for row in rows_of(tmp_path / "run"):
        assert row.get("keep_loss") == row.get("val_loss")


def test_changed_options_need_override(home: Path, tmp_path: Path, capsys: Any) -> None:
    given = [home / "base", "--data", home / "new.txt", "--out", tmp_path / "run", *SHORT]
    adapt(*given)
    said = error_line(["adapt", *given, "--learning_rate", "0.5"], capsys)
    assert "optimizer.learning_rate 0.003 -> 0.5" in said
    adapt(*given, "--steps", "8", "--override")
    assert rows_of(tmp_path / "run")[-1]["step"] == 8
    said = error_line(["adapt", *given, "--steps", "9", "--tokens", "5", "--override"], capsys)
    assert "adapter.tokens 32 -> 5" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--rank", "0"], "rank=0 must be at least 1"),
        (["--method", "bitfit"], "expected tokens or lora or full or sparse"),
        (["--layers", "ffn", "mlp"], "layers: 'mlp' is unknown; choose from ffn, q, k, v, o"),
        (["--blocks", "0", "7"], "no block 7; there are 0 to 1"),
        (["--norm", "none"], "expected shared or own"),
        (["--method", "sparse"], "method=sparse needs keep=DATA"),
        (["--share", "1.5"], "share=1.5 must be above 0 and at most 1"),
        (["--alpha", "-1"], "alpha=-1.0 must be above 0"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--data", "nowhere.txt"], "no nowhere.txt (pass a file"),
        (["--keep", "./nowhere"], "--keep: no "),
        (["--length", "9999999"], "one sequence needs"),
    ],
)
def test_bad_options(
    options: list[str], message: str, home: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    given = [home / "base", "--data", home / "new.txt", "--out", run]
    assert message in error_line(["adapt", *given, *options], capsys)
    assert not (run / "config.yaml").exists()
    assert not (run / "adapter").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no text"),
        ('{"question": "a"}\n', "has no field 'text'"),
        ('{"prompt": "a", "completion": ""}\n', "line 1: the completion is empty"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt"\n', "line 2 is not JSON"),
        ('{"prompt": "a", "completion": "b"}\n', "has no split validation"),
    ],
)
def test_bad_rows(text: str, message: str, home: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    given = [home / "base", "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "run"]
    assert message in error_line(["adapt", *given], capsys)
    assert not (tmp_path / "run").exists() or "validation" in message


def test_missing_arguments_and_models(home: Path, tmp_path: Path, capsys: Any) -> None:
    assert "--data is missing" in error_line(["adapt", home / "base"], capsys)
    assert "--out is missing" in error_line(["adapt", home / "base", "--data", "x"], capsys)
    given = ["--data", home / "new.txt", "--out", tmp_path / "run"]
    assert "no ./absent" in error_line(["adapt", "./absent", *given], capsys)
    said = error_line(["adapt", home / "transformer", *given], capsys)
    assert "--method tokens trains parameter tokens, and" in said
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    assert "is a gpt2 model; adapt trains" in error_line(["adapt", other, *given], capsys)
    assert not (tmp_path / "run").exists()


def test_an_occupied_folder(home: Path, tmp_path: Path, capsys: Any) -> None:
    data = ["--data", home / "new.txt"]
    said = error_line(["adapt", home / "base", *data, "--out", home / "transformer"], capsys)
    assert "holds a model or an adapter" in said
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in error_line(["adapt", home / "base", *data, "--out", file], capsys)
    (tmp_path / "other" / "adapter").mkdir(parents=True)
    said = error_line(["adapt", home / "base", *data, "--out", tmp_path / "other"], capsys)
    assert "adapter and is not a run" in said
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["adapter"]


def test_a_corpus_of_another_tokenizer(home: Path, tmp_path: Path, capsys: Any) -> None:
    options = ["--tokenizer", "bpe", "--vocab_size", "257"]
    corpus = tmp_path / "corpus"
    main(["prepare", str(home / "new.txt"), "--out", str(corpus), *options])
    given = [home / "base", "--out", tmp_path / "run", *SHORT]
    said = error_line(["adapt", *given, "--data", corpus], capsys)
    assert "other token ids than the model's tokenizer" in said
    said = error_line(["adapt", *given, "--data", home / "new.txt", "--keep", corpus], capsys)
    assert "other token ids than the model's tokenizer" in said
