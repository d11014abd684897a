"""Checkpoints of several processes, and of killed ones."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_worker import (
    UNFINISHED,
    Filled,
    make_model,
    make_optimizer,
    step_once,
)
from tests.support.checkpoints import assert_same, stored, trained
from tests.support.processes import LIMIT
from tokenformer.train.checkpoint import directory, latest, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).parents[3]


def run_worker(*arguments: object, count: int = 1) -> list[str]:
    """Start `count` processes at once; {rank} in an argument is the number of each."""
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.checkpoint_worker"),
                *(str(argument).format(rank=rank) for argument in arguments),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=LIMIT)
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["fsdp", "ddp"])
def test_one_process_to_two_and_back(tmp_path, wrapping):
    """Two processes go on from the checkpoint of one, and one from that of the two."""
    import transformers

    model, optimizer = trained(2)
    average = {name: 2 * p.detach() for name, p in model.named_parameters()}
    first = save(
        tmp_path / "one", model=model, optimizer=optimizer, state={"step": 2}, extra=average
    )
    unbroken = [step_once(model, optimizer, step) for step in (3, 4)]

    run_worker("train", wrapping, "{rank}", 2, tmp_path, count=2)
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    for rank, result in enumerate(results):
        assert result["state"] == {"step": 2}
        assert result["losses"] == pytest.approx(unbroken, rel=1e-6), rank
        large, broken, *torn = result["errors"]
        assert large.endswith("step-00000005 cannot be written: File too large (rank 1)")
        assert broken == "step 5 is not saved: extra.broken holds a NaN or an infinity (rank 1)"
        assert len(torn) == (rank == 0)  # one reports, all pass it over
        assert result["found"] == "step-00000006"
        assert "no valid checkpoint in" in result["refused"], rank
        assert "choose another --out" in result["refused"]

    # What two processes loaded and saved again is what one had, to the last bit.
    again = make_model(seed=1)
    again_optimizer = make_optimizer(again)
    second = latest(tmp_path / "again")
    assert second is not None
    assert len(list(second.glob("*.safetensors"))) == 2
    _, extra = load(second, model=again, optimizer=again_optimizer)
    assert_same(extra, average)
    back = save(
        tmp_path / "back", model=again, optimizer=again_optimizer, state={"step": 2}, extra=extra
    )
    assert_same(
        {name: tensor for name, tensor in stored(back).items() if not name.startswith("rng")},
        {name: tensor for name, tensor in stored(first).items() if not name.startswith("rng")},
    )

    resumed = make_model(seed=1)
    resumed_optimizer = make_optimizer(resumed)
    assert list(directory.steps(tmp_path / "two")) == [3]
    third = latest(tmp_path / "two")
    assert third is not None
    state, extra = load(third, model=resumed, optimizer=resumed_optimizer)
    assert state == {"step": 3}
    assert_same(extra, {f"odd{n}": torch.arange(float(n)) for n in (1, 3)})
    assert step_once(resumed, resumed_optimizer, 4) == pytest.approx(unbroken[1], rel=1e-6)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(exported) is type(model)
    for one in (resumed, exported):
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rounds", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_inside_saves(tmp_path, rounds):
    (output,) = run_worker("kill", tmp_path, rounds)
    killed = [json.loads(line) for line in output.splitlines()]
    assert len(killed) == rounds
    steps = [step for step, _ in killed]
    assert steps == sorted(set(steps)), "each process got further than the one before"
    # Half of them are aimed inside a save; a machine under load may miss a few.
    assert sum(left > 0 for _, left in killed) >= rounds // 4, killed
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no torn checkpoint, not even one passed over
        path = latest(tmp_path)
    assert path is not None
    save(tmp_path, model=Filled().fill(0), state={"step": steps[-1] + 1})
    assert not list(tmp_path.glob(UNFINISHED))
