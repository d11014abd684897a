import io
import re
import time

import pytest
import torch
from rich.console import Console

from tokenformer.train.matmul_peak import matmul_peak
from tokenformer.train.progress_display import Describer, progress

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
    describe({"step": 2, "tokens": 20, "seconds": 11, "loss": 3.0, "val_loss": 2.9, "val_bpb": 2.5})
    text = describe({"step": 3, "tokens": 30, "seconds": 11.5, "loss": 1.0})
    assert text == ["loss 2.000", "held-out loss 2.900", "20 tokens/s", "2.500 bits/byte"]


@pytest.mark.parametrize("measured", [{"val_bpb": 2.137}, {"val_accuracy": 0.933}])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_bar_step_and_time_left_stay_on_the_line_after_a_validation(width, measured):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None)
    steps, speed = 100_000, 123_456
    with progress(console, steps, 1e12, details=True, done=50_000) as show:
        for step in range(50_001, 50_020):
            row = {"step": step, "tokens": speed * step, "seconds": step, "loss": 1.48, "lr": 1e-3}
            show({**row, "flops": 10 * speed * step, "val_loss": 1.502, **measured})
            time.sleep(0.05)  # the display is drawn ten times a second
    lines = [
        re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", line)
        for line in re.split(r"[\r\n]", output.getvalue())
    ]
    drawn = [line for line in lines if "50019/100000" in line]
    assert drawn, "the bar, the step and the rest are on one line"
    assert all(len(line) <= width for line in lines)
    bar, text = drawn[-1].split("50019/100000")
    assert len(bar) >= 6
    assert bar.startswith("━")
    assert re.search(r"\d+:\d\d:\d\d$", text.rstrip()), "the time left"
    assert "loss 1.480" in text
    assert ("held-out loss 1.502" in text) == (width >= 80)
    assert ("bits/byte" in text or "right" in text) == (width == 200)


def test_redirected_lines_are_not_wrapped():
    output = io.StringIO()
    row = {"step": 1, "tokens": 1e6, "seconds": 1.0, "loss": 1.48, "lr": 1e-3, "flops": 1e9}
    with progress(Console(file=output, width=80), 1, 1e12, details=True) as show:
        show({**row, "val_loss": 1.502, "val_bpb": 2.137})
    (line,) = output.getvalue().splitlines()
    assert len(line) > 80
    assert "loss 1.480  held-out loss 1.502  1,000,000 tokens/s  2.137 bits/byte" in line


def test_the_peak_is_shown_only_where_it_is_right():
    row = {"step": 1, "tokens": 100, "seconds": 1.0, "loss": 1.0, "lr": 1e-3, "flops": 337}
    for peak, message in ((674, ["50% of matmul peak"]), (100, []), (None, [])):
        shown = Describer(peak=peak, details=True)(row)
        assert [part for part in shown if "peak" in part] == message
    cpu = torch.device("cpu")
    for half in (torch.float16, torch.bfloat16):
        start = time.perf_counter()
        assert matmul_peak(cpu, half) is None
        assert time.perf_counter() - start < 1
    peak = matmul_peak(cpu, torch.float32)
    assert peak is None or peak > 1e8
