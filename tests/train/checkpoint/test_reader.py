"""Checkpoints are saved and loaded, and refused if they do not fit."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn

from tests.support.checkpoint_worker import make_model, make_optimizer, step_once
from tests.support.checkpoints import assert_json_same, assert_same, stored, trained
from tokenformer.errors import CheckpointError
from tokenformer.train.checkpoint import load, save
from tokenformer.train.export import export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class TestRoundTrip:
    @pytest.mark.parametrize("fused", [True, False])
    def test_everything_comes_back_to_the_last_bit(self, tmp_path, fused):
        model, optimizer = trained(fused=fused)
        extra = {"ema": torch.randn(5, 3), "count": torch.tensor(2**40 + 1)}
        state = {"step": 2, "tokens": 96, "schedule": {"name": "cosine", "peak": 0.1 + 0.2}}
        random.gauss(0, 1)
        np.random.standard_normal()
        path = save(tmp_path, model=model, optimizer=optimizer, state=state, extra=extra)
        drawn = [torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]

        other = make_model(seed=1)
        other_optimizer = make_optimizer(other, fused=fused)
        found, found_extra = load(path, model=other, optimizer=other_optimizer)
        assert found == state
        again = [torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]
        assert again == drawn
        assert_same(found_extra, extra)
        assert_same(other.state_dict(), model.state_dict())
        for mine, theirs in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert_same(optimizer.state[mine[1]], other_optimizer.state[theirs[1]])
            assert other_optimizer.state[theirs[1]]["step"] == 2
        for mine, theirs in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
            assert {**mine, "params": 0} == {**theirs, "params": 0}
            assert theirs["lr"] == 3e-3 / 2

    @pytest.mark.parametrize("fused", [True, False])
    def test_going_on_equals_the_unbroken_run(self, tmp_path, fused):
        model, optimizer = trained(fused=fused)
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        unbroken = [step_once(model, optimizer, step) for step in range(3, 7)]
        other = make_model(seed=1)
        other_optimizer = make_optimizer(other, fused=fused)
        load(path, model=other, optimizer=other_optimizer)
        assert [step_once(other, other_optimizer, step) for step in range(3, 7)] == unbroken
        assert_same(other.state_dict(), model.state_dict())

    def test_going_back_in_the_same_objects(self, tmp_path):
        model, optimizer = make_model(), None
        optimizer = make_optimizer(model)
        before = save(tmp_path, model=model, optimizer=optimizer, state={"step": 0})
        first = [step_once(model, optimizer, step) for step in (1, 2)]
        load(before, model=model, optimizer=optimizer)
        assert not optimizer.state
        assert [step_once(model, optimizer, step) for step in (1, 2)] == first

    def test_a_tied_tensor_is_stored_once(self, tmp_path):
        model, optimizer = trained()
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        assert "model.lm_head.weight" in {f"model.{name}" for name in model.state_dict()}
        names = stored(path).keys()
        assert "model.model.embed_tokens.weight" in names
        assert not [name for name in names if "lm_head" in name]
        untied = make_model(tie_word_embeddings=False)
        with pytest.raises(CheckpointError, match=r"it lacks model\.lm_head\.weight"):
            load(path, model=untied)

    def test_plain_safetensors_reads_it(self, tmp_path):
        model, optimizer = trained()
        tensors = stored(save(tmp_path, model=model, optimizer=optimizer, state={"step": 2}))
        assert torch.equal(tensors["model.model.norm.weight"], model.model.norm.weight)
        moment = optimizer.state[model.model.norm.weight]["exp_avg"]
        assert torch.equal(tensors["optimizer.model.norm.weight.exp_avg"], moment)
        assert torch.equal(tensors["rng.cpu"], torch.get_rng_state()[None])

    def test_nothing_in_it_is_a_pickle(self, tmp_path):
        model, optimizer = trained()
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        kinds = {file.suffix for file in path.iterdir()}
        assert kinds == {".json", ".safetensors"}

    def test_torch_writes_the_same_and_reads_it(self, tmp_path):
        model, optimizer = trained()
        ours = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        tensors = stored(ours)
        theirs = tmp_path / "theirs"
        writer = dcp.HuggingFaceStorageWriter(str(theirs), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=True)
        (file,) = theirs.iterdir()
        assert_same(stored(theirs), tensors)
        with safe_open(file, "pt") as one, safe_open(ours / file.name, "pt") as other:
            assert_json_same(one.metadata(), other.metadata())
        empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        dcp.load(empty, storage_reader=dcp.HuggingFaceStorageReader(str(ours)), no_dist=True)
        assert_same(empty, tensors)

    def test_transposed_shared_and_empty_tensors(self, tmp_path):
        whole = torch.randn(4, 6)
        extra = {
            "transposed": whole.T,
            "rows": whole[1:3],
            "same": whole.view(-1),
            "empty": torch.empty(0, 3),
            "half": torch.randn(3).half(),
            "flag": torch.tensor([True, False]),
        }
        _, found = load(
            save(tmp_path, model=nn.Linear(2, 2), state={"step": 0}, extra=extra),
            model=nn.Linear(2, 2),
        )
        assert_same(found, extra)

    def test_compiled_and_checkpointed_models_have_plain_names(self, tmp_path):
        model = make_model()
        compiled: Any = torch.compile(model)
        optimizer = make_optimizer(compiled)
        path = save(tmp_path, model=compiled, optimizer=optimizer, state={"step": 0})
        load(path, model=model)
        assert not [name for name in stored(path) if "_orig_mod" in name]

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adagrad(p, lr=0.1),
            lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
            lambda p: torch.optim.Adafactor(p, lr=0.1),
        ],
        ids=["sgd", "adagrad", "adamw-tensor-lr", "adafactor"],
    )
    def test_other_optimizers(self, tmp_path, make):
        def run(model: Any, optimizer: Any, steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(2, 3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        model = nn.Linear(3, 4)
        optimizer = make(model.parameters())
        run(model, optimizer, 2)
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        other = nn.Linear(3, 4)
        other_optimizer = make(other.parameters())
        load(path, model=other, optimizer=other_optimizer)
        run(model, optimizer, 2)
        run(other, other_optimizer, 2)
        assert_same(other.state_dict(), model.state_dict())


class TestRefusals:
    def test_a_nan_is_never_saved(self, tmp_path):
        model, optimizer = trained()
        good = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        optimizer.state[model.model.norm.weight]["exp_avg"][3] = float("nan")
        with pytest.raises(
            CheckpointError, match=r"optimizer\.model\.norm\.weight\.exp_avg holds a"
        ):
            save(tmp_path, model=model, optimizer=optimizer, state={"step": 3})
        with torch.no_grad():
            model.model.norm.bias[0] = float("-inf")
        with pytest.raises(CheckpointError, match=r"model\.model\.norm\.bias holds a NaN"):
            save(tmp_path, model=model, state={"step": 3})
        with pytest.raises(CheckpointError, match=r"model\.model\.norm\.bias holds a NaN"):
            export(model, None, tmp_path / "model")
        assert list(tmp_path.iterdir()) == [good]

    def test_large_finite_numbers_are_no_infinity(self, tmp_path):
        largest = torch.full((4,), torch.finfo(torch.float32).max)
        path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 0}, extra={"largest": largest})
        assert torch.equal(load(path, model=nn.Linear(1, 1))[1]["largest"], largest)

    @pytest.mark.parametrize("step", [None, -1, 1.0, True, "7"])
    def test_a_state_needs_a_step(self, tmp_path, step):
        with pytest.raises(CheckpointError, match="needs a step from 0 up"):
            save(tmp_path, model=nn.Linear(1, 1), state={"step": step})

    @pytest.mark.parametrize("value", [float("nan"), torch.ones(2), {1, 2}])
    def test_a_state_is_json(self, tmp_path, value):
        with pytest.raises(CheckpointError, match="not JSON"):
            save(tmp_path, model=nn.Linear(1, 1), state={"step": 0, "x": value})
        assert not list(tmp_path.iterdir())

    def test_what_does_not_fit_is_named_and_nothing_touched(self, tmp_path):
        model, optimizer = trained()
        path = save(tmp_path, model=model, optimizer=optimizer, state={"step": 2})
        larger = make_model(max_position_embeddings=8, positions="learned")
        before = {name: tensor.clone() for name, tensor in larger.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"it lacks model\.model\.positions"):
            load(path, model=larger)
        assert_same(larger.state_dict(), before)
        with pytest.raises(CheckpointError, match=r"torch\.float32 there and torch\.float64 here"):
            load(path, model=make_model().double())
        with pytest.raises(CheckpointError, match=r"weight is \[2, 3\] there and \[3, 2\] here"):
            load(
                save(tmp_path / "a", model=nn.Linear(3, 2), state={"step": 0}),
                model=nn.Linear(2, 3),
            )
        with pytest.raises(CheckpointError, match=r"its model\.bias has no place"):
            load(tmp_path / "a" / "step-00000000", model=nn.Linear(3, 2, bias=False))
        with pytest.raises(CheckpointError, match="no optimizer state"):
            load(
                tmp_path / "a" / "step-00000000",
                model=(other := nn.Linear(3, 2)),
                optimizer=torch.optim.SGD(other.parameters()),
            )
        with pytest.raises(CheckpointError, match="mixes parameters of the saved groups"):
            load(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
        with pytest.raises(CheckpointError, match=r"it lacks extra\.ema"):
            load(path, model=model, extra={"ema": torch.zeros(1)})

    def test_an_optimizer_of_another_model(self, tmp_path):
        other = torch.optim.SGD(nn.Linear(2, 3).parameters())
        with pytest.raises(CheckpointError, match=r"shape \(3, 2\) that is not the model's"):
            save(tmp_path, model=nn.Linear(2, 3), optimizer=other, state={"step": 0})
