"""List, run and report the exhibits.

python -m experiments                                 # list them with state and cost
python -m experiments run                             # every table and figure, laptop scale
python -m experiments run gradients --scale smoke     # a few steps of one of them
python -m experiments run zero_shot --scale paper --dry_run     # print the commands of a cluster
python -m experiments report                          # write the report page from recorded results
"""

import argparse
import sys
from pathlib import Path

from experiments.catalog import BEYOND, NAMES, PAPER, STUDIES, load_exhibit
from experiments.exhibit import SCALES, Exhibit, Scale, complete, compute_of
from experiments.job import Job, Results, with_needs
from experiments.report import PUBLISHED, publish, write_report
from experiments.runner import run_jobs
from experiments.workspace import Workspace, missing_data

FLOPS_PER_SECOND = 25e9
"""What one core of a laptop does at these sizes; for the estimate of the time."""


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.command == "run":
        run(options)
    elif options.command == "report":
        report(options)
    else:
        list_exhibits(SCALES[options.scale])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__.partition("\n")[0]
    )
    parser.set_defaults(command="list", scale="laptop")
    commands = parser.add_subparsers()
    running = commands.add_parser("run", help="run exhibits, or resume them")
    reporting = commands.add_parser("report", help="write the report page from recorded results")
    for command, scales in ((running, list(SCALES)), (reporting, ["smoke", "laptop"])):
        command.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
        command.add_argument("--scale", choices=scales, default="laptop")
        command.add_argument("--out", type=Path, help="folder; by default runs/experiments/SCALE")
    running.set_defaults(command="run")
    running.add_argument("--workers", type=int, default=2, help="runs at a time, one core each")
    running.add_argument(
        "--processes", type=int, help="at the scale paper: processes of a run, by default one a GPU"
    )
    running.add_argument(
        "--dry_run", action="store_true", help="show what would run, and check the recipes"
    )
    reporting.set_defaults(command="report")
    reporting.add_argument(
        "--publish",
        action="store_true",
        help="add the results of --out to those in the repository, and rewrite its page and plots",
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in getattr(options, "names", []) if name not in NAMES]:
        parser.error(f"no exhibit {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    if getattr(options, "publish", False) and options.scale != "laptop":
        parser.error(f"--publish is for the scale laptop, not {options.scale}")
    for name in ("workers", "processes"):
        count = getattr(options, name, None)
        if count is not None and count < 1:
            parser.error(f"--{name} {count} must be at least 1")
    return options


def run(options: argparse.Namespace) -> None:
    scale, folder = SCALES[options.scale], output_folder(options)
    results = Results(folder / "results.jsonl")
    exhibits = {name: load_exhibit(name) for name in options.names or (*PAPER, *BEYOND)}
    if scale.name == "paper":
        from experiments.cluster import launch

        sys.exit(launch(exhibits, scale, results, folder, options.dry_run, options.processes))
    runnable = {name: e for name, e in exhibits.items() if has_data(name, e, scale, results)}

    def plan(results: Results) -> list[Job]:
        return [job for e in runnable.values() for job in e.jobs(scale, results)]

    if options.dry_run:
        for job in with_needs(plan(results)):
            print(f"{'finished' if job in results else 'to do':8}  {job.key}")
        return
    workspace = Workspace(folder, small=scale.name == "smoke")
    try:
        outcome = run_jobs(
            plan, results, workspace, options.workers, lambda line: print(line, flush=True)
        )
    except KeyboardInterrupt:
        sys.exit("interrupted; start the same command again to resume")
    finished = {n: e for n, e in runnable.items() if complete(e, scale, results)}
    if finished:
        print(f"report: {write_report(finished, scale, results, folder)}")
    if outcome.failed:
        sys.exit(f"{len(outcome.failed)} jobs failed")


def has_data(name: str, exhibit: Exhibit, scale: Scale, results: Results) -> bool:
    """Whether this machine has the data of an exhibit; says why not."""
    if scale.name == "smoke":
        return True
    names = {name for job in with_needs(exhibit.jobs(scale, results)) for name in job.data}
    reasons = missing_data(names)
    for reason in reasons:
        print(f"skipping {name}: {reason}")
    return not reasons


def report(options: argparse.Namespace) -> None:
    """Write the report of the results in --out; without any, of the published results."""
    scale, folder = SCALES[options.scale], output_folder(options)
    results = Results(folder / "results.jsonl")
    if options.publish:
        results = publish(results)
    elif not results.rows:
        results = Results(PUBLISHED)
    names = options.names or (*PAPER, *BEYOND)
    if options.publish:  # the page has all exhibits
        names = [name for name in NAMES if name in names or name not in STUDIES]
    exhibits = {name: load_exhibit(name) for name in names}
    finished = {n: e for n, e in exhibits.items() if complete(e, scale, results)}
    for name in exhibits:
        if name not in finished:
            print(f"{name} is not finished; python -m experiments run {name}")
    if finished:
        page = write_report(finished, scale, results, None if options.publish else folder)
        print(f"report: {page}")


def output_folder(options: argparse.Namespace) -> Path:
    return options.out or Path("runs/experiments") / options.scale


def list_exhibits(scale: Scale) -> None:
    """Print every exhibit with its published state and the cost of running it."""
    results = Results(PUBLISHED)
    print(f"{'name':<24}{'published':>12}{'cost':>16}  exhibit")
    for name in NAMES:
        exhibit = load_exhibit(name)
        jobs = with_needs(exhibit.jobs(scale, results))
        done = sum(job in results for job in jobs)
        minutes = compute_of(jobs) / FLOPS_PER_SECOND / 60
        state = "complete" if done == len(jobs) else f"{done} of {len(jobs)}"
        cost = f"{minutes:.0f} core-min"
        print(f"{name:<24}{state:>12}{cost:>16}  {exhibit.title} ({exhibit.source})")


if __name__ == "__main__":
    main()
