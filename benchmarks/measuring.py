"""Costs of several functions side by side, as shares of what the machine can do.

A benchmark is a generator of rows, run by `run`, which prints them as they come, says how the cost
grows along each axis that was swept, and writes the section of the results file (`results.py`).
A row is flat: `case` says in words what was measured and `name` by which of the rivals.
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

from benchmarks.results import Row, keep, machine, results_path

Columns = dict[str, Callable[[Row], str]]
"""Title to cell."""

CASE_WIDTH, NAME_WIDTH, NARROWEST = 32, 22, 11


def interleaved(
    functions: dict[str, Callable[[], Any]],
    rounds: int,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every round of each; they take turns, since the machine is shared. `before` runs
    ahead of each, unmeasured."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            before()
            start = time.perf_counter()
            function()
            if turn:  # the first warms up
                taken[name].append(time.perf_counter() - start)
    return taken


def ratio(over: list[float], under: list[float]) -> tuple[float, float]:
    """The median of over / under of the same round, and the distance between its quartiles."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    if len(ratios) == 1:
        return ratios[0], 0.0
    low, _, high = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), high - low


def compared(
    taken: dict[str, list[float]], limit: str, work: float = 1.0, against: tuple[str, ...] = ()
) -> dict[str, Row]:
    """Of each function but the limit its median seconds, its share of the limit's speed, and how
    many times as fast as each of `against` it is; `work` is what it does, in runs of the limit."""
    found = {}
    for name, seconds in taken.items():
        if name == limit:
            continue
        share, spread = ratio(taken[limit], seconds)
        row = {"name": name, "seconds": statistics.median(seconds)}
        row |= {"share": work * share, "share_spread": work * spread}
        for rival in against:
            times, spread = ratio(taken[rival], seconds)
            row |= {f"times_{rival}": times, f"times_{rival}_spread": spread}
        found[name] = row
    return found


def with_spread(key: str, digits: int = 2) -> Callable[[Row], str]:
    """The cell of a ratio, as median ± distance of the quartiles."""

    def cell(row: Row) -> str:
        if key not in row:
            return ""
        return f"{row[key]:.{digits}f} ± {row[f'{key}_spread']:.{digits}f}"

    return cell


def number(key: str, form: str = ".2f", unit: int | float = 1) -> Callable[[Row], str]:
    """The cell of a number, in units of `unit`."""

    def cell(row: Row) -> str:
        if key not in row:
            return ""
        return format(row[key] if unit == 1 else row[key] / unit, form)

    return cell


def growth(rows: list[Row], axes: tuple[str, ...], cost: str) -> list[Row]:
    """With which power of each axis the cost of each rival grows, wherever rows differ in that
    axis alone."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for axis in axes:
        for row in rows:
            if axis in row and row.get(cost, 0) > 0:
                others = (other for other in axes if other in row and other != axis)
                fixed = tuple((other, row[other]) for other in others)
                groups.setdefault((axis, row["name"], row.get("what"), fixed), []).append(row)
    found = []
    for (axis, name, what, fixed), same in groups.items():
        points = sorted((row[axis], row[cost]) for row in same)
        if points[0][0] == points[-1][0]:
            continue
        line = {"name": name, "over": axis, "from": points[0][0], "to": points[-1][0]}
        line |= {"cost": cost, "power": power(points), "fixed": dict(fixed)}
        found.append(line if what is None else {**line, "what": what})
    return found


def power(points: list[tuple[float, float]]) -> float:
    """p of the curve c x^p nearest to the points, by least squares of the logarithms."""
    x = [math.log(a) for a, _ in points]
    y = [math.log(b) for _, b in points]
    return statistics.linear_regression(x, y).slope


def progress(text: str) -> None:
    """To stderr: what stdout holds may be for a program."""
    print(f"... {text}", file=sys.stderr, flush=True)


def parser(doc: str) -> argparse.ArgumentParser:
    """With the options that all benchmarks share; the first line of `doc` says what it is."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--full", action="store_true", help="longer sweeps, more rounds")
    made.add_argument("--rounds", type=int, help="to take the medians of")
    made.add_argument("--json", action="store_true", help="print the section as JSON, not a table")
    made.add_argument(
        "--out", type=Path, help="the results file, by default of this machine and version"
    )
    return made


def run(
    name: str,
    measure: Callable[[argparse.Namespace], Iterator[Row]],
    columns: Columns,
    options: argparse.Namespace,
    *,
    axes: tuple[str, ...] = (),
    cost: str = "seconds",
) -> None:
    """Measure, print and keep the section `name`."""
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
    grown = growth(rows, axes, cost)
    section = {"seconds": round(time.perf_counter() - start, 1), "rows": rows}
    section |= {"growth": grown} if grown else {}
    path = options.out or results_path()
    keep(path, name, section)
    if options.json:
        print(json.dumps({"machine": about, name: section}, indent=2))
        return
    print_growth(grown)
    print(f"\n{section['seconds']:.0f} s; kept in {path.name}\n")


def width(title: str) -> int:
    return 3 + max(len(title), NARROWEST)


def table_line(row: Row, columns: Columns, repeated: list[Row]) -> str:
    """A case is named once, in the first of its rows."""
    case = "" if any(row["case"] == last["case"] for last in repeated) else row["case"]
    cells = "".join(f"{cell(row):>{width(title)}}" for title, cell in columns.items())
    lead = "\n" if case and repeated else ""
    return f"{lead}{case:<{CASE_WIDTH}}{row['name']:<{NAME_WIDTH}}{cells}"


def print_growth(lines: list[Row]) -> None:
    """A line for each sweep, with the powers of all rivals."""
    sweeps: dict[str, list[str]] = {}
    for line in lines:
        fixed = ", ".join(f"{axis} {value:,}" for axis, value in line["fixed"].items())
        what = f"{line['what']}, " if "what" in line else ""
        sweep = (
            f"{what}{line['cost']} as a power of {line['over']}, {line['from']:,} to {line['to']:,}"
            + (f" ({fixed})" if fixed else "")
        )
        sweeps.setdefault(sweep, []).append(f"{line['name']} {line['power']:.2f}")
    for sweep, powers in sweeps.items():
        print(f"\n{sweep}:\n  {', '.join(powers)}")
