"""The test suites of transformers and peft, from their source distributions.

Their wheels do not carry them. A suite is the `tests` folder of an unpacked sdist or checkout:
TRANSFORMERS_TESTS or PEFT_TESTS names one; otherwise pip downloads the sdist of the installed
version into pytest's cache. Where neither works, `Suite.find` skips with the reason.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import time
import types
import unittest
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import tests

PIP_SECONDS = 180


@dataclass
class Suite:
    """One package's tests, importable as `<package>_suite.<module>`."""

    package: str
    folder: Path

    @classmethod
    def find(cls, package: str, cache: Path) -> "Suite":
        named = os.environ.get(f"{package.upper()}_TESTS")
        if named is not None:
            if not Path(named).is_dir():
                pytest.skip(f"{package.upper()}_TESTS={named} is not a folder")
            return cls(package, Path(named))
        release = f"{package}-{version(package)}"
        folder = cache / release / "tests"
        if not folder.is_dir():
            source = ["--no-binary", package, f"{package}=={version(package)}"]
            pip(["download", "--dest", str(cache), *source])
            archive = cache / f"{release}.tar.gz"
            with tarfile.open(archive) as file:
                inside = f"{release}/tests/"
                members = [m for m in file.getmembers() if m.name.startswith(inside)]
                file.extractall(cache, members, filter="data")
            archive.unlink()
        return cls(package, folder)

    def load(self, module: str, stubs: Iterable[str] = ()) -> Any:
        """A module of the suite. `stubs` are modules it imports but can do without: where they are
        absent, empty ones are put in their place."""
        root = f"{self.package}_suite"
        if root not in sys.modules:
            parent = types.ModuleType(root)
            parent.__path__ = [str(self.folder)]
            sys.modules[root] = parent
        if (self.folder / "generation").is_dir() and str(self.folder) not in tests.__path__:
            tests.__path__.append(str(self.folder))  # a whole checkout imports `tests.exporters`
        for stub in stubs:
            name = f"{root}{stub}" if stub.startswith(".") else stub
            if not is_importable(name):
                sys.modules[name] = Stub(name)
        return importlib.import_module(f"{root}.{module}")

    def marks(self) -> set[str]:
        """Names of the pytest marks it uses, which `--strict-markers` wants to be registered."""
        found: set[str] = set()
        for file in self.folder.glob("*.py"):
            found |= set(re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8")))
        return found - {"parametrize", "skip", "skipif", "slow", "usefixtures", "xfail"}


class Stub(types.ModuleType):
    """A module any of whose names is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def is_importable(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", *arguments[:1], "--quiet", "--no-deps"]
    patience = ["--retries", "0", "--timeout", "15", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, *patience, *arguments[1:]],
            capture_output=True,
            text=True,
            timeout=PIP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip {arguments[0]} {arguments[-1]} took more than {PIP_SECONDS} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip {arguments[0]} {arguments[-1]} failed: {last}")


def needs(package: str, cache: Path) -> None:
    """A pure-Python package that a suite imports: the installed one, or one in the cache."""
    if is_importable(package):
        return
    target = cache / "packages"
    if not (target / package).is_dir():
        pip(["install", "--target", str(target), package])
    sys.path.append(str(target))
    importlib.invalidate_caches()


@dataclass
class Outcome(unittest.TestResult):
    """Which tests passed, failed and were skipped, by name, with the seconds each took."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.began = time.process_time()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.seconds[test._testMethodName] = time.process_time() - self.began
        super().stopTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.passed.append(test._testMethodName)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.skips[test._testMethodName] = reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if isinstance(err[1], pytest.skip.Exception):
            self.addSkip(test, str(err[1]))
        else:
            self.failed[test._testMethodName] = f"{err[0].__name__}: {err[1]}"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.addError(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.addError(test, err)

    def __str__(self) -> str:
        lines = [f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skips)} skipped"]
        lines += [f"{name}: {reason[:400]}" for name, reason in sorted(self.failed.items())]
        return "\n".join(lines)


def run(case: type[unittest.TestCase], leave_out: Iterable[str] = ()) -> Outcome:
    """Run the tests of a case, but those whose names begin with one of `leave_out`."""
    names = unittest.defaultTestLoader.getTestCaseNames(case)
    chosen = [name for name in names if not name.startswith(tuple(leave_out))]
    outcome = Outcome()
    unittest.TestSuite(case(name) for name in chosen).run(outcome)
    outcome.skips.pop("runTest", None)  # of a case that one of the tests makes itself
    return outcome
