"""Time functions in interleaved rounds and report them relative to a limit and to baselines.

A benchmark is a generator of rows. `run` prints the rows as they come and the scaling exponent of
every swept axis, and writes a section of the results file (`results.py`). A row is a flat dict:
`case` describes what was measured, `name` is the implementation.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import Row, machine, results_path, write_section

Columns = dict[str, Callable[[Row], str]]
"""Maps a title to the function that formats its cell."""

CASE_WIDTH, NAME_WIDTH, MIN_CELL_WIDTH = 32, 22, 11


def time_interleaved(
    functions: dict[str, Callable[[], Any]],
    rounds: int,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of every function in every round.

    The functions take turns, because load on a shared machine varies over time. `before` runs
    before each call and is not timed. The first round is a warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(rounds + 1):
        for name, function in functions.items():
            before()
            seconds = seconds_of(function)
            if round_number:
                times[name].append(seconds)
    return times


def seconds_of(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratio(over: list[float], under: list[float]) -> tuple[float, float]:
    """Return the median of `over / under` within a round and its interquartile range."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    if len(ratios) == 1:
        return ratios[0], 0.0
    low, _, high = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), high - low


def compare(
    times: dict[str, list[float]], limit: str, work: float = 1.0, against: tuple[str, ...] = ()
) -> dict[str, Row]:
    """Return a row per function: median seconds, share of the limit's speed, and the speedup over
    each baseline in `against`. A call does the work of `work` calls of the limit."""
    rows = {}
    for name, seconds in times.items():
        if name == limit:
            continue
        share, spread = ratio(times[limit], seconds)
        row = {"name": name, "seconds": statistics.median(seconds)}
        row |= {"share": work * share, "share_spread": work * spread}
        for baseline in against:
            speedup, spread = ratio(times[baseline], seconds)
            row |= {f"times_{baseline}": speedup, f"times_{baseline}_spread": spread}
        rows[name] = row
    return rows


def with_spread(key: str, digits: int = 2) -> Callable[[Row], str]:
    """Format a ratio as median ± interquartile range."""

    def cell(row: Row) -> str:
        if key not in row:
            return ""
        return f"{row[key]:.{digits}f} ± {row[f'{key}_spread']:.{digits}f}"

    return cell


def number(key: str, form: str = ".2f", unit: int | float = 1) -> Callable[[Row], str]:
    """Format a number in units of `unit`."""

    def cell(row: Row) -> str:
        if key not in row:
            return ""
        return format(row[key] if unit == 1 else row[key] / unit, form)

    return cell


def scaling_exponents(rows: list[Row], axes: tuple[str, ...], cost: str) -> list[Row]:
    """Fit the exponent of `cost` along each axis, over rows that differ in that axis only."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for axis in axes:
        for row in rows:
            if axis in row and row.get(cost, 0) > 0:
                others = (other for other in axes if other in row and other != axis)
                fixed = tuple((other, row[other]) for other in others)
                groups.setdefault((axis, row["name"], row.get("what"), fixed), []).append(row)
    exponents = []
    for (axis, name, what, fixed), same in groups.items():
        points = sorted((row[axis], row[cost]) for row in same)
        if points[0][0] == points[-1][0]:
            continue
        line = {"name": name, "over": axis, "from": points[0][0], "to": points[-1][0]}
        line |= {"cost": cost, "power": power(points), "fixed": dict(fixed)}
        exponents.append(line if what is None else {**line, "what": what})
    return exponents


def power(points: list[tuple[float, float]]) -> float:
    """Return p of the least-squares fit c x^p, in log space."""
    x = [math.log(a) for a, _ in points]
    y = [math.log(b) for _, b in points]
    return statistics.linear_regression(x, y).slope


def progress(text: str) -> None:
    """Print to stderr; stdout may be read by a program."""
    print(f"... {text}", file=sys.stderr, flush=True)


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the shared options, described by the first line of `doc`."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="longer sweeps, more rounds")
    parser.add_argument("--rounds", type=int, help="rounds to take medians over")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--out", type=Path, help="results file (default: the one of this machine and version)"
    )
    return parser


def run(
    name: str,
    measure: Callable[[argparse.Namespace], Iterator[Row]],
    columns: Columns,
    options: argparse.Namespace,
    *,
    axes: tuple[str, ...] = (),
    cost: str = "seconds",
) -> None:
    """Run a benchmark, print its table and write its section of the results file."""
    about, start = machine(), time.perf_counter()
    if not options.json:
        print(f"{name}: {about['cpu']}, {about['threads']} threads, torch {about['torch']}, fp32\n")
        titles = "".join(f"{title:>{width(title)}}" for title in columns)
        print(f"{'':<{CASE_WIDTH}}{'':<{NAME_WIDTH}}{titles}")
    rows: list[Row] = []
    for row in measure(options):
        rows.append(row)
        if not options.json:
            print(table_line(row, columns, repeated=rows[-2:-1]), flush=True)
    exponents = scaling_exponents(rows, axes, cost)
    section = {"seconds": round(time.perf_counter() - start, 1), "rows": rows}
    section |= {"scaling": exponents} if exponents else {}
    path = options.out or results_path()
    write_section(path, name, section)
    if options.json:
        print(json.dumps({"machine": about, name: section}, indent=2))
        return
    print_scaling(exponents)
    print(f"\n{section['seconds']:.0f} s; saved in {path.name}\n")


def width(title: str) -> int:
    return 3 + max(len(title), MIN_CELL_WIDTH)


def table_line(row: Row, columns: Columns, repeated: list[Row]) -> str:
    """Format a row; the case is printed only in the first of its rows."""
    case = "" if any(row["case"] == last["case"] for last in repeated) else row["case"]
    cells = "".join(f"{cell(row):>{width(title)}}" for title, cell in columns.items())
    lead = "\n" if case and repeated else ""
    return f"{lead}{case:<{CASE_WIDTH}}{row['name']:<{NAME_WIDTH}}{cells}"


def print_scaling(lines: list[Row]) -> None:
    """Print a line per sweep with the exponent of every implementation."""
    sweeps: dict[str, list[str]] = {}
    for line in lines:
        fixed = ", ".join(f"{axis} {value:,}" for axis, value in line["fixed"].items())
        what = f"{line['what']}, " if "what" in line else ""
        span = f"{line['from']:,} to {line['to']:,}" + (f" ({fixed})" if fixed else "")
        sweep = f"{what}exponent of {line['cost']} over {line['over']}, {span}"
        sweeps.setdefault(sweep, []).append(f"{line['name']} {line['power']:.2f}")
    for sweep, powers in sweeps.items():
        print(f"\n{sweep}:\n  {', '.join(powers)}")
