"""The measured number of threads."""

import pytest
import torch

from tests.support.training import finish, losses, make_loop, make_run
from tokenformer.train import run as run_module
from tokenformer.train.thread_count import cores, fastest, fastest_thread_count


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.97}, 1),  # not worth a second core
        ({1: 1.0, 2: 0.6, 4: 0.58, 8: 2.0}, 2),
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4),
    ],
)
def test_more_threads_must_pay(seconds, best):
    assert fastest(seconds) == best


def test_measuring_changes_nothing(seed):
    """The losses after it are those without it, bit for bit at the same thread count."""
    plain, measured = make_loop(steps=3), make_loop(steps=3)
    torch.manual_seed(1)
    expected = [row["loss"] for row in plain.steps()]
    torch.manual_seed(1)
    before = torch.get_num_threads()
    assert 1 <= fastest_thread_count(measured) <= cores()
    assert torch.get_num_threads() == before
    assert [row["loss"] for row in measured.steps()] == expected


def test_a_run_measures_once_and_keeps_the_number(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "fastest_thread_count", lambda loop: 3)
    reports: list[str] = []
    stopping = make_run(corpus, tmp_path / "run", reports, threads="auto", checkpoint_every=2)

    def stop_at_two(row: dict) -> None:
        if row["step"] == 2:
            stopping.stop_signal = 15

    with pytest.raises(run_module.StoppedError):
        stopping.train(stop_at_two)
    assert "Training with 3 threads, the fastest" in reports
    torch.set_num_threads(1)
    monkeypatch.setattr(run_module, "fastest_thread_count", lambda loop: pytest.fail("again"))
    resumed = make_run(corpus, tmp_path / "run", reports, threads="auto", checkpoint_every=2)
    assert torch.get_num_threads() == 3
    resumed.train(lambda row: None)
    assert not any("threads, this process uses" in line for line in reports)


@pytest.mark.slow
def test_on_the_command_line(recipe, tmp_path):
    for threads in ("auto", "2"):
        out = tmp_path / threads
        done = finish(recipe, out, "--run.threads", threads)
        assert done.returncode == 0, done.stderr
        assert len(losses(out)) == 24
    bad = finish(recipe, tmp_path / "bad", "--run.threads", "0")
    assert bad.returncode == 2
    assert "threads=0 must be at least 1" in bad.stderr
