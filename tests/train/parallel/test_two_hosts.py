"""Training on two hosts, simulated by network namespaces with torchrun in each."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import LIMIT
from tests.support.training import close, finish, losses

ADDRESSES = ("10.211.77.1", "10.211.77.2")
OPTIONS = ["--run.steps", "300", "--run.checkpoint_every", "20", "--run.validate_every", "100"]
OPTIONS += ["--optimizer.learning_rate", "0.001"]

HEARTBEAT, MISSED_BEATS = 2, 3  # seconds; after so many missed ones a host counts as dead


class Host:
    """A network namespace with one address."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.agents: list[subprocess.Popen[str]] = []

    def launch(self, recipe: Path, out: Path, log: Path) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        launcher += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "run"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29511"]
        # Both namespaces have the name of this machine: say which of them keeps the rendezvous.
        is_host = int(self.address == ADDRESSES[0])
        beat = f"keep_alive_interval={HEARTBEAT},keep_alive_max_attempt={MISSED_BEATS}"
        launcher += ["--rdzv-conf", f"is_host={is_host},{beat}"]
        job = ["-m", "tokenformer", "train", str(recipe), "--out", str(out), *OPTIONS]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
        # Otherwise a host that comes back waits in vain for the address of a store that the others
        # have agreed on before (torch 2.13, dynamic_rendezvous.py); see docs/guides/training.md.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with log.open("a") as file:
            agent = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *launcher, "--local-addr", self.address, *job],
                stdout=file,
                stderr=file,
                text=True,
                env=environment,
            )
        self.agents.append(agent)
        return agent

    def kill(self) -> None:
        """Power off: the agent first, then whatever else runs there."""
        for agent in self.agents:
            agent.kill()
            agent.wait(timeout=LIMIT)
        pids = run("ip", "netns", "pids", self.name).stdout.split()
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=LIMIT)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` to make network namespaces")
    names = [f"tokenformer-{os.getpid()}-{letter}" for letter in "ab"]
    made: list[Host] = []
    try:
        try:
            for name, address in zip(names, ADDRESSES, strict=True):
                run("ip", "netns", "add", name)
                made.append(Host(name, address))
                run("ip", "-n", name, "link", "set", "lo", "up")
            cable = ["link", "add", "cable", "netns", names[0], "type", "veth"]
            run("ip", *cable, "peer", "name", "cable", "netns", names[1])
            for host in made:
                run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
                run("ip", "-n", host.name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine permits no network namespaces: {error.stderr.strip()}")
        yield made
    finally:
        for host in made:
            host.kill()
            run("ip", "netns", "delete", host.name)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_host_that_dies_and_comes_back_leaves_the_run_as_if_nothing_was(recipe, tmp_path, hosts):
    alone = tmp_path / "alone"
    assert finish(recipe, alone, *OPTIONS).returncode == 0

    out = tmp_path / "together"
    logs = [tmp_path / f"{host.name}.log" for host in hosts]
    first = hosts[0].launch(recipe, out, logs[0])
    hosts[1].launch(recipe, out, logs[1])
    checkpoints = out / "checkpoints"
    try:
        wait_for(lambda: len([*checkpoints.glob("step-*")]) > 0, LIMIT, "checkpoint")
        hosts[1].kill()
        assert first.poll() is None, "the other host's agent lives on"
        assert not (out / "loss.png").exists(), "the run was not over yet"
        # A host takes longer to come back than the others to notice that it is gone.
        time.sleep(2.5 * HEARTBEAT * MISSED_BEATS)
        second = hosts[1].launch(recipe, out, logs[1])
        for agent in (first, second):
            assert agent.wait(timeout=LIMIT) == 0
    except AssertionError:
        sys.stderr.write("\n".join(log.read_text()[-3000:] for log in logs))
        raise
    found, expected = losses(out), losses(alone)
    # Two ranks add in another order than one process; over hundreds of steps that adds up.
    assert close(found[:20], expected[:20])
    assert [row[0] for row in found] == [row[0] for row in expected]
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], abs=5e-3)
    begun = "".join(log.read_text() for log in logs).count("the run is in")
    assert begun >= 2, "the job was started again"
    assert (out / "model" / "config.json").exists()
