import io

import pytest
from rich.console import Console

from tokenformer.train.progress import Describer, progress

ROWS = [
    {"step": step, "tokens": 100.0 * step, "seconds": 0.5 * step, "loss": 5.0 / step, "lr": 1e-3}
    for step in range(1, 41)
]


def shown(terminal: bool, steps: int = 40) -> str:
    output = io.StringIO()
    with progress(Console(file=output, force_terminal=terminal, width=100), steps=steps) as show:
        for row in ROWS[:steps]:
            show(row)
    return output.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 10
    mean_loss = sum(5.0 / step for step in range(1, 41)) / 40
    assert lines[-1] == f"step 40/40  loss {mean_loss:.3f}  200 tokens/s"
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (10, 10), (15, 10), (39, 10)])
def test_never_more_than_ten_lines_and_the_last_step_among_them(steps, lines):
    printed = shown(terminal=False, steps=steps).splitlines()
    assert len(printed) == lines
    assert printed[-1].startswith(f"step {steps}/{steps} ")


def test_a_live_bar_on_a_terminal():
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "40/40" in text
    assert "loss 0.535" in text
    assert "200 tokens/s" in text


def test_speed_and_loss_are_those_of_the_last_steps():
    describe = Describer(window=2)
    describe({"step": 1, "tokens": 10, "seconds": 10, "loss": 9.0})
    describe({"step": 2, "tokens": 20, "seconds": 11, "loss": 3.0, "val_bpb": 2.5})
    text = describe({"step": 3, "tokens": 30, "seconds": 11.5, "loss": 1.0})
    assert text == "loss 2.000  held out 2.500 bits/byte  20 tokens/s"
