"""Kill one or both of two ranks that train together over gloo. The survivor must end with an error
instead of waiting, and a resumed pair must give the results of an uninterrupted one."""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

from tests.campaign.kills import judge, random_fault
from tests.campaign.moments import PHASES, watched
from tests.campaign.processes import Around, Child, Ended
from tests.campaign.runs import Reference, start
from tests.campaign.trials import Outcome

COUNT = 2
TIMEOUT = 30
"""Seconds that gloo waits for a peer that never came; torch's default is half an hour."""
PATIENCE = 120.0
"""Seconds after which a survivor counts as hanging; several timeouts may add up."""
MOST_KILLS = 3
TARGETS = ("rank 0", "rank 1", "both ranks")
RANK_1_PHASES = ("step", "checkpoint tensors", "checkpoint fsync", "start", "load")
"""Phases of rank 1; rank 0 alone writes the rest."""


class RankKills:
    name = "rank_kills"

    def __init__(self, wanted: int, references: list[Reference]) -> None:
        self.wanted, self.references = wanted, references

    def planned(self) -> int:
        return 4 * self.wanted + 4

    def trial(self, index: int, chance: random.Random, place: Path) -> Outcome:
        reference = self.references[index % len(self.references)]
        run, log = place / "run", place / "log"
        phases: list[str] = []
        for kill in range(chance.randint(1, MOST_KILLS)):
            target = chance.choice(TARGETS)
            ends = attempt(reference, run, log, target, chance, first=kill == 0)
            if any(ended.overrun for ended in ends):
                return Outcome(False, "survivor hangs", [*phases, target], tell(ends))
            if all(ended.code == 0 for ended in ends):
                return judge(ends[0], run, reference, phases)
            if not any(ended.killed for ended in ends):
                return Outcome(False, "not resumed", phases, tell(ends))
            if any(ended.code == 0 for ended in ends) and not is_over(run, reference):
                return Outcome(False, "survivor ends as if whole", [*phases, target], tell(ends))
            phases.append(target)
        last = [child.end() for child in start_ranks(reference.recipe, run, log, {}, COUNT)]
        return judge(max(last, key=lambda ended: ended.code != 0), run, reference, phases)


def attempt(
    reference: Reference, run: Path, log: Path, target: str, chance: random.Random, *, first: bool
) -> list[Ended]:
    """Train with two ranks; kill the target in a random phase, or both at a random moment."""
    if target == "both ranks":
        children = start_ranks(reference.recipe, run, log, {}, COUNT)
        children[0].wait(chance.uniform(0.0, reference.seconds))
        for child in children:
            child.kill()
        return [child.end() for child in children]
    rank = TARGETS.index(target)
    phases = [p for p in (RANK_1_PHASES if rank else PHASES) if reference.counts.get(p)]
    phase = chance.choice([p for p in phases if not (first and p == "load")])
    fault = random_fault(phase, reference.counts[phase], chance, first=first)
    around = partial(watched, run, fault)
    return [child.end() for child in start_ranks(reference.recipe, run, log, {rank: around}, COUNT)]


def start_ranks(
    recipe: Path, run: Path, log: Path, around: dict[int, Around], count: int
) -> list[Child]:
    """Start a process per rank, with the environment of torchrun."""
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = []
    for rank in range(count):
        child = start(
            recipe,
            run,
            log.with_name(f"{log.name}-rank-{rank}"),
            around=partial(impatient, around.get(rank, nullcontext)),
            environment={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        child.limits.seconds = PATIENCE
        children.append(child)
    return children


@contextmanager
def impatient(around: Around) -> Iterator[None]:
    """Use a short timeout for ranks that never join; a rank that dies is noticed at once."""
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=TIMEOUT)
    with around():
        yield


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_over(run: Path, reference: Reference) -> bool:
    """Return whether all steps were trained; rank 0 alone does what follows."""
    last = max((reference.run / "checkpoints").iterdir()).name
    return (run / "checkpoints" / last).exists()


def tell(ends: list[Ended]) -> str:
    return "; ".join(f"rank {rank} {ended.describe()}" for rank, ended in enumerate(ends))
