import io

from rich.console import Console

from tokenformer.train.progress import progress

ROWS = [
    {"step": step, "tokens": 100.0 * step, "seconds": 0.5 * step, "loss": 5.0 / step, "lr": 1e-3}
    for step in range(1, 41)
]


def shown(terminal: bool) -> str:
    output = io.StringIO()
    with progress(Console(file=output, force_terminal=terminal, width=100), steps=40) as show:
        for row in ROWS:
            show(row)
    return output.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 10
    assert lines[-1] == "step 40/40  loss 0.125  200 tokens/s"
    assert "\x1b" not in "".join(lines)


def test_a_live_bar_on_a_terminal():
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "40/40" in text
    assert "loss 0.125" in text
    assert "200 tokens/s" in text
