"""Processes that save and load checkpoints, for tests/train/checkpoint.

python -m tests.support.checkpoint_worker train WRAPPING RANK RANKS FOLDER
python -m tests.support.checkpoint_worker kill FOLDER ROUNDS
"""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tokenformer.errors import CheckpointError
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint import directory
from tokenformer.train.checkpoint.async_saver import AsyncSaver
from tokenformer.train.export import export

VOCABULARY = 61
LIMIT = 500.0
"""Seconds that anything may take."""
ROWS = 4
UNFINISHED = ".step-*.unfinished-*"
MOST_SAVES = 500
"""Of one process, in case nobody kills it."""


def make_model(seed: int = 0, **options: Any) -> Any:
    from tokenformer import TokenformerConfig, TokenformerForCausalLM

    torch.manual_seed(seed)
    config = TokenformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        qkv_tokens=23,
        output_tokens=20,
        ffn_tokens=45,
        **options,
    )
    return TokenformerForCausalLM(config)


def make_optimizer(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), **options)


def step_once(
    model: Any, optimizer: torch.optim.Optimizer, step: int, rank: int = 0, ranks: int = 1
) -> float:
    """One step on this rank's slice of batch `step`; the loss of the whole batch."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(VOCABULARY, (ROWS, 12), generator=generator)[rank::ranks]
    loss = model(batch, labels=batch).loss
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 / step
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(whole)
    return whole.item() / ranks


def train(wrapping: str, rank: int, ranks: int, folder: Path) -> None:
    """Go on from a checkpoint of step 2 to step 4, saving in the background at step 3."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks
    )
    model: Any = make_model(seed=rank + 5)
    if wrapping == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    mesh = dist.init_device_mesh("cpu", (ranks,))

    path = checkpoint.latest(folder / "one")
    assert path is not None
    average = {name: torch.zeros_like(p.detach()) for name, p in inner(model).named_parameters()}
    state, extra = checkpoint.load(path, model=model, optimizer=optimizer, extra=average)
    assert all(
        extra[name] is not None and extra[name].shape == average[name].shape for name in extra
    )
    checkpoint.save(folder / "again", model=model, optimizer=optimizer, state=state, extra=average)

    # An evaluation leaves FSDP2's outermost parameters gathered: they must be found all the same.
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))
    model.train()
    losses = [step_once(model, optimizer, 3, rank, ranks)]
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))
    # Tensors with fewer rows than ranks leave a rank with nothing.
    odd = {f"odd{n}": distribute_tensor(torch.arange(float(n)), mesh, [Shard(0)]) for n in (1, 3)}
    with AsyncSaver() as saver:
        saver.save(folder / "two", model=model, optimizer=optimizer, state={"step": 3}, extra=odd)
        losses.append(step_once(model, optimizer, 4, rank, ranks))
    export(model, None, folder / "model")
    removed = checkpoint.prune(folder / "two", keep_last=1)
    assert removed == []

    # A file that only one rank may not write is an error on all, and the older checkpoint stays.
    large = {"large": distribute_tensor(torch.ones(1 << 20), mesh, [Shard(0)])}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == ranks - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    errors = [refusal(folder / "two", model, large)]
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    broken = {"broken": torch.tensor([float("nan") if rank == ranks - 1 else 1.0])}
    errors.append(refusal(folder / "two", model, broken))

    # A shard torn under their feet: all ranks pass it over.
    for step in (6, 7):
        torn = checkpoint.save(folder / "torn", model=nn.Linear(1, 1), state={"step": step})
    if rank == 0:
        os.truncate(next(torn.glob("*.safetensors")), 5)
    dist.barrier()
    found = checkpoint.latest(folder / "torn", report=errors.append)
    assert found is not None
    dist.barrier()
    if rank == 0:
        os.truncate(found / "state.json", 5)
    dist.barrier()
    try:
        checkpoint.latest(folder / "torn", report=lambda line: None)
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    result = {
        "losses": losses,
        "errors": errors,
        "state": state,
        "found": found.name,
        "refused": refused,
    }
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def refusal(folder: Path, model: nn.Module, extra: dict[str, Tensor]) -> str:
    try:
        checkpoint.save(folder, model=model, state={"step": 5}, extra=extra)
    except CheckpointError as error:
        return str(error)
    return "saved"


def inner(model: Any) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


class Filled(nn.Module):
    """Parameters that tell the step: 48 MB, so that a save takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(1 << 20)) for _ in range(12)])

    @torch.no_grad()
    def fill(self, step: int) -> "Filled":
        for index, part in enumerate(self.parts):
            part.fill_(step + index)
        return self

    def value(self) -> Tensor:
        return torch.stack([part - index for index, part in enumerate(self.parts)])


def kill(folder: Path, rounds: int) -> None:
    """Time and again a process that keeps saving, killed at a random moment, every other time in
    the first half of a save; the next goes on from the newest whole checkpoint. Prints
    [step found, unfinished folders left]."""
    chance = random.Random(0)
    checkpoint.save(folder, model=Filled().fill(0), state={"step": 0})
    start = time.perf_counter()
    checkpoint.save(folder, model=Filled().fill(1), state={"step": 1})
    duration = time.perf_counter() - start
    for count in range(rounds):
        child = os.fork()
        if child == 0:
            save_on(folder)
        seen = set(folder.glob(UNFINISHED))
        newest = max(directory.steps(folder))
        deadline = time.monotonic() + LIMIT
        while set(folder.glob(UNFINISHED)) <= seen or max(directory.steps(folder)) == newest:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                raise TimeoutError("no second save")
            time.sleep(0.001)  # until it is in its second save at least
        time.sleep(chance.random() * duration * (1.2 if count % 2 else 0.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = len(list(folder.glob(UNFINISHED)))
        model = Filled()
        path = checkpoint.latest(folder)
        assert path is not None
        state, _ = checkpoint.load(path, model=model)
        assert bool((model.value() == state["step"]).all())
        print(json.dumps([state["step"], left]), flush=True)


def save_on(folder: Path) -> NoReturn:
    model = Filled()
    path = checkpoint.latest(folder)
    assert path is not None
    state, _ = checkpoint.load(path, model=model)
    for step in range(state["step"] + 1, state["step"] + 1 + MOST_SAVES):
        checkpoint.save(folder, model=model.fill(step), state={"step": step})
        checkpoint.prune(folder, keep_last=2)
    os._exit(1)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["train", wrapping, rank, ranks, folder]:
            train(wrapping, int(rank), int(ranks), Path(folder))
        case ["kill", folder, rounds]:
            kill(Path(folder), int(rounds))
