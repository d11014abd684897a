"""Runs that adapt a trained model: every method, resuming, several ranks, what is exported."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

from tests.support.adaptation import SHORT, adapt, rows_of, save_base, save_texts, sums, write_rows
from tests.support.processes import run, started, wait_until
from tokenformer import TokenformerForCausalLM, TransformerForCausalLM
from tokenformer.cli import main
from tokenformer.data.batches import fixed_batches
from tokenformer.data.corpus import Corpus
from tokenformer.train.checkpoint import read_document

pytest.importorskip("peft", reason="peft is not installed")
from peft import PeftModel

OPTIONS: dict[str, list[str]] = {
    "tokens": ["--tokens", "3"],
    "own": ["--tokens", "3", "--norm", "own", "--layers", "ffn", "q", "--blocks", "1"],
    "lora": ["--method", "lora", "--rank", "2"],
    "sparse": ["--method", "sparse", "--tokens", "5"],
    "full": ["--method", "full"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two texts, prepared once."""
    folder = tmp_path_factory.mktemp("adapters")
    save_base(folder / "base")
    for text, corpus in zip(save_texts(folder), ("new", "kept"), strict=True):
        main(["prepare", str(text), "--out", str(folder / corpus), "--validation", "0.2"])
    return folder


def words(home: Path, out: Path, name: str = "tokens") -> list[str]:
    data = ["--data", str(home / "new"), "--keep", str(home / "kept")]
    return [str(home / "base"), *data, "--out", str(out), *SHORT, *OPTIONS[name]]


def logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([list(b"def wrap(text, width=70):")])
    with torch.no_grad():
        return model.eval()(ids).logits


def load_base(home: Path) -> Any:
    return TokenformerForCausalLM.from_pretrained(home / "base")


def held_out_loss(model: Any, corpus: Path) -> float:
    """The mean loss on the held-out samples of a run with SHORT, computed apart from runs."""
    split = Corpus(corpus).split("validation")
    (batch,) = fixed_batches(split, batch_size=6, length=32, count=1)
    with torch.no_grad():
        logits = model.eval()(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


@pytest.fixture(scope="module", params=OPTIONS)
def finished(
    request: Any, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A run of every method, and the name of the method."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    adapt(*words(home, out, request.param), "--learning_rate", "0.01")
    return request.param, out


class TestEveryMethod:
    def test_the_loss_of_the_base_is_measured_first(
        self, finished: tuple[str, Path], home: Path
    ) -> None:
        rows = rows_of(finished[1])
        assert [row["step"] for row in rows] == list(range(7))
        measured = [row for row in rows if "val_loss" in row]
        assert [row["step"] for row in measured] == [0, 2, 4, 6]
        assert {"keep_loss", "keep_bpb", "val_bpb"} <= rows[0].keys()
        base = load_base(home)
        for name, corpus in (("val_loss", "new"), ("keep_loss", "kept")):
            assert rows[0][name] == pytest.approx(held_out_loss(base, home / corpus), rel=1e-6)
        assert measured[-1]["val_loss"] < measured[0]["val_loss"]

    def test_the_base_stays_as_it_was(self, finished: tuple[str, Path], home: Path) -> None:
        name, out = finished
        base = load_file(home / "base" / "model.safetensors")
        if name in ("tokens", "own", "lora"):
            model = PeftModel.from_pretrained(load_base(home), out / "adapter")
            assert not (out / "model").exists()
            with model.disable_adapter():
                assert torch.equal(logits(model), logits(load_base(home)))
            assert not torch.equal(logits(model), logits(load_base(home)))
            return
        assert not (out / "adapter").exists()
        after = load_file(out / "model" / "model.safetensors")
        changed = {n for n in base if not torch.equal(base[n], after[n])}
        if name == "full":
            assert changed == {*base}
            return
        assert changed == {
            f"model.layers.{b}.ffn.{p}_tokens" for b in (0, 1) for p in ("key", "value")
        }
        for tensor in changed:
            rows = (base[tensor] != after[tensor]).any(1)
            assert rows.sum() == 5  # of 24; the others are equal to the last bit
        config = json.loads((out / "model" / "config.json").read_text())
        assert config.get("token_rates") is None

    def test_a_checkpoint_holds_what_trains(self, finished: tuple[str, Path]) -> None:
        name, out = finished
        document = read_document(out / "checkpoints" / "step-00000006")
        trained = [n for group in document["optimizer"] for n in group["parameters"]]
        (shard,) = (out / "checkpoints" / "step-00000006").glob("*.safetensors")
        held = {n.removeprefix("model.") for n in load_file(shard) if n.startswith("model.")}
        assert held == {*trained}
        marks = {"tokens": "token_adapter_", "own": "token_adapter_", "lora": "lora_"}
        assert all(marks.get(name, "") in n for n in held)
        assert document["state"]["base"] is None or name != "full"

    def test_what_was_exported_is_what_was_trained(
        self, finished: tuple[str, Path], home: Path
    ) -> None:
        name, out = finished
        if name in ("tokens", "own", "lora"):
            exported = PeftModel.from_pretrained(load_base(home), out / "adapter")
        else:
            exported = TokenformerForCausalLM.from_pretrained(out / "model")
        last = rows_of(out)[-1]
        for measure, corpus in (("val_loss", "new"), ("keep_loss", "kept")):
            loss = held_out_loss(exported, home / corpus)
            assert last[measure] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", ["tokens", pytest.param("lora", marks=pytest.mark.slow), "sparse"])
def test_resumed_from_an_earlier_checkpoint_a_run_ends_the_same(
    name: str, home: Path, tmp_path: Path
) -> None:
    whole = words(home, tmp_path / "run", name)
    adapt(*whole)
    folder = tmp_path / "run"
    expected = rows_of(folder)
    exported = list(folder.glob("*/*model.safetensors"))
    weights = [path.read_bytes() for path in exported]
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    shutil.rmtree(exported[0].parent)
    adapt(*whole)
    assert rows_of(folder) == expected
    assert [path.read_bytes() for path in exported] == weights


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(home: Path, tmp_path: Path) -> None:
    """SIGKILL, once before the first checkpoint and once after it."""
    long = ["--steps", "60", "--validate_every", "20", "--checkpoint_every", "15"]
    adapt(*words(home, tmp_path / "whole"), *long)
    expected = rows_of(tmp_path / "whole")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "tokenformer", "adapt", *words(home, out), *long]
    for step in (5, 40):
        with started(command) as process:
            assert wait_until(lambda step=step: last_step(out) >= step, process)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        assert last_step(out) < 60
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "Resuming from step" in done.stdout
    assert rows_of(out) == expected
    tensors = "adapter/adapter_model.safetensors"
    assert (out / tensors).read_bytes() == (tmp_path / "whole" / tensors).read_bytes()


def last_step(out: Path) -> int:
    rows = rows_of(out) if (out / "metrics.jsonl").exists() else []
    return max((row["step"] for row in rows), default=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"),
    [("tokens", "ddp"), ("tokens", "fsdp"), ("lora", "fsdp"), ("sparse", "ddp")],
)
def test_two_ranks_train_what_one_does(
    name: str, parallel: str, home: Path, tmp_path: Path
) -> None:
    """Prepared by rank 0; the run of two ranks is finished by one."""
    text, _ = save_texts(tmp_path)
    given = words(home, tmp_path / "one", name)
    given[given.index(str(home / "new"))] = str(text)
    adapt(*given)
    two = [str(tmp_path / "two") if word == str(tmp_path / "one") else word for word in given]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "--standalone", "-m", "tokenformer", "adapt", *two]
    done = run([*command, "--parallel", parallel], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held out") == 1
    expected, found = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for measure in ours.keys() & {"loss", "val_loss", "keep_loss"}:
            assert ours[measure] == pytest.approx(theirs[measure], rel=1e-4)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000006")
    adapt(*two)
    final, whole = rows_of(tmp_path / "two")[-1], expected[-1]
    assert final["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)


class TestRecipes:
    def recipe(self, home: Path, tmp_path: Path, **adapter: Any) -> Path:
        path = tmp_path / "recipe.yaml"
        sections = {
            "model": {"start_from": str(home / "base")},
            "data": {"corpus": str(home / "new"), "length": 32},
            "schedule": {"warmup_steps": 1},
            "run": {
                "steps": 4,
                "batch_size": 4,
                "validate_every": 2,
                "checkpoint_every": 2,
                "log_to": [],
            },
            "adapter": adapter,
        }
        path.write_text(yaml.safe_dump(sections))
        return path

    def test_the_record_of_a_run_is_a_recipe(self, home: Path, tmp_path: Path) -> None:
        adapt(*words(home, tmp_path / "run"))
        main(["train", str(tmp_path / "run" / "config.yaml"), "--out", str(tmp_path / "again")])
        assert rows_of(tmp_path / "again") == rows_of(tmp_path / "run")

    def test_train_takes_the_section(self, home: Path, tmp_path: Path) -> None:
        recipe = self.recipe(home, tmp_path, method="tokens", tokens=2, keep=str(home / "kept"))
        main(["train", str(recipe), "--out", str(tmp_path / "run")])
        assert (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
        record = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert record["adapter"]["tokens"] == 2

    def test_train_takes_examples(self, home: Path, tmp_path: Path) -> None:
        file = write_rows(tmp_path / "sums.jsonl", sums(30))
        main(["prepare", str(file), "--out", str(tmp_path / "sums")])
        recipe = self.recipe(home, tmp_path)
        corpus = ["--data.corpus", str(tmp_path / "sums")]
        main(["train", str(recipe), "--out", str(tmp_path / "run"), *corpus])
        assert "val_loss" in rows_of(tmp_path / "run")[-1]
        record = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert "adapter" not in record  # as before there were adapters

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--adapter.method", "tokens", "--run.nested", "[0.5,1]"], "run.nested cannot be com"),
            (
                ["--adapter.method", "tokens", "--model.start_from", "null"],
                "name it in model.start_",
            ),
            (["--adapter.keep", "x"], "adapter.keep=x needs adapter.method"),
            (
                ["--adapter.method", "tokens", "--adapter.keep", "nowhere"],
                "adapter.keep: no nowhere",
            ),
            (["--adapter.method", "sparse"], "method=sparse needs keep=DATA"),
            (["--adapter.layers", "[ffn,w]"], "layers: 'w' is unknown; choose from ffn, q"),
            (["--adapter.method", "tokens", "--dry_run"], "--dry_run estimates the training of"),
            (
                ["--adapter.method", "tokens", "--adapter.blocks", "[2]"],
                "no block 2; there are 0 to 1",
            ),
        ],
    )
    def test_options_that_do_not_fit(
        self, options: list[str], message: str, home: Path, tmp_path: Path, capsys: Any
    ) -> None:
        recipe = self.recipe(home, tmp_path)
        with pytest.raises(SystemExit) as end:
            main(["train", str(recipe), "--out", str(tmp_path / "run"), *options])
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_ema_averages_only_what_trains(home: Path, tmp_path: Path) -> None:
    recipe = TestRecipes().recipe(home, tmp_path, method="tokens", tokens=2)
    main(["train", str(recipe), "--out", str(tmp_path / "run"), "--run.ema", "0.9"])
    (shard,) = (tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.safetensors")
    averages = [name for name in load_file(shard) if name.startswith("extra.ema.")]
    assert len(averages) == 4
    assert all("token_adapter" in name for name in averages)


@pytest.mark.parametrize("finished", ["tokens"], indirect=True)
@pytest.mark.parametrize("command", ["convert", "grow"])
def test_a_checkpoint_without_its_base_is_no_model(
    command: str, finished: tuple[str, Path], tmp_path: Path, capsys: Any
) -> None:
    _, out = finished
    options = ["--ffn_tokens", "48"] if command == "grow" else []
    path = str(out / "checkpoints" / "step-00000006")
    with pytest.raises(SystemExit):
        main([command, path, "--out", str(tmp_path / "out"), *options])
    assert "holds only what was trained on a frozen base" in capsys.readouterr().err


def test_another_base_is_refused(home: Path, tmp_path: Path, capsys: Any) -> None:
    base = shutil.copytree(home / "base", tmp_path / "base")
    given = words(home, tmp_path / "run")
    given[0] = str(base)
    adapt(*given)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    before = sorted((tmp_path / "run").rglob("*"))
    shutil.rmtree(base)
    save_base(base, seed=1)
    with pytest.raises(SystemExit) as end:
        adapt(*given)
    assert end.value.code == 2
    assert "the run adapts a model with the weights" in capsys.readouterr().err
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_transformer(name: str, home: Path, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", kind="transformer")
    given = words(home, tmp_path / "run", name)
    given[0] = str(base)
    adapt(*given)
    if name == "full":
        TransformerForCausalLM.from_pretrained(tmp_path / "run" / "model")
        return
    model = TransformerForCausalLM.from_pretrained(base)
    before = logits(model)
    adapted = PeftModel.from_pretrained(model, tmp_path / "run" / "adapter")
    assert not torch.equal(logits(adapted), before)


def test_a_quantized_base(home: Path, tmp_path: Path, capsys: Any) -> None:
    from tokenformer import TokenQuantization

    folder = shutil.copytree(home / "base", tmp_path / "base")
    options = {"quantization_config": TokenQuantization(8)}
    TokenformerForCausalLM.from_pretrained(home / "base", **options).save_pretrained(folder)
    given = words(home, tmp_path / "run")
    given[0] = str(folder)
    adapt(*given)
    rows = [row["val_loss"] for row in rows_of(tmp_path / "run") if "val_loss" in row]
    assert rows[-1] < rows[0]
    given = words(home, tmp_path / "other", "lora")
    given[0] = str(folder)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        adapt(*given)
    assert (
        "adapter.method=lora cannot train a quantized model; use tokens" in capsys.readouterr().err
    )
