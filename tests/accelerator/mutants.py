"""A test of tests: takes one ordering out of the code at a time, and tells whether the tests notice.

In: a module with `MUTATIONS`, each an edit of one function, the tests that must fail with it and what they must say, and with `IMPORTS`, names of modules that
the tests would import while they run. Out: a table, and exit status 1 if one
was not noticed. A plugin of pytest's:

    PYTHONPATH=tests python -m pytest -p accelerator.mutants --mutations device.mutations --device late tests/device

The tests are collected once, in a process that never computes anything. Each mutation then has a fork of it (memory shared, no imports again, nothing to be
undone), in which the function gets other code. A fork in which nothing is mutated runs all tests first: what fails there notices nothing. `--no-control` leaves
that out where the same tests run beside, on the same device.
"""

from __future__ import annotations
import __future__

import ast
import faulthandler
import importlib
import inspect
import json
import os
import re
import select
import signal
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

WRONG = r"races on the late device|method equal of"
"""What a test says that met a race, or that compared tensors with `torch.equal`."""

_MOST_SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One ordering that is taken out.

    Attributes:
        says: a sentence: how the code then is.
        where: `module:function` or `module:Class.method`.
        take: text of the function's source, which occurs there once; lines as they stand, from the first word on.
        put: what stands there instead.
        tests: of which one must fail, `file::name[parameters]` below the collected folder.
        shows: a regular expression that the failure's text must match: a test that fails for another reason has noticed nothing.
        is_slow: is tried with `--slow` only.
    """

    says: str
    where: str
    take: str
    put: str
    tests: Sequence[str]
    shows: str = WRONG
    is_slow: bool = False

    def apply(self) -> None:
        """Gives the function its other code, wherever it was imported to.

        Raises:
            LookupError: There is no such function, or its source has the text not at all or several times.
        """
        _function(self.where).__code__ = self.code()

    def code(self) -> CodeType:
        """Returns the function's other code and applies nothing; raises as `apply` does."""
        return _mutated(_function(self.where), self.take, self.put, self.where)


def _function(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
        if found is None:
            raise LookupError(f"{where}: there is no {name!r}")
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    if not isinstance(found, FunctionType):
        raise LookupError(f"{where} is no function")
    return found


def _mutated(function: FunctionType, take: str, put: str, where: str) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(take)
    if count != 1:
        raise LookupError(
            f"{where} holds {take!r} {count} times, not once: the code has moved, the mutation must follow"
        )
    begin = source.index(take)
    indent = " " * (begin - source.rfind("\n", 0, begin) - 1)
    tree = ast.parse(source.replace(take, put.replace("\n", "\n" + indent)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    flags = __future__.annotations.compiler_flag
    compiled = compile(tree, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    code = next(c for c in compiled.co_consts if isinstance(c, CodeType) and c.co_name == definition.name)
    if code.co_freevars != function.__code__.co_freevars:
        raise LookupError(f"{where} uses names of a function around it")
    return code


# ---------------------------------------------------------------------------------------------------- in forks


def _in_fork(work: Callable[[], Any]) -> tuple[Any, str, float]:
    """What the work returns, how the process ended if it did not come to that, and its seconds of processor time."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            faulthandler.disable()  # some mutations end in a fault, which is told in one line
            answer = json.dumps(work()).encode()
            while answer:
                answer = answer[os.write(write, answer) :]
        finally:
            os._exit(0)
    os.close(write)
    chunks, deadline = [], time.monotonic() + _MOST_SECONDS
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            break
        chunks.append(os.read(read, 1 << 16))
        if not chunks[-1]:
            break
    os.close(read)
    _, status, usage = os.wait4(pid, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        end = f"killed after {_MOST_SECONDS} s" if number == signal.SIGKILL else f"died of signal {number}"
        return None, end, seconds
    try:
        return json.loads(b"".join(chunks)), "", seconds
    except ValueError:
        return None, "ended without an answer", seconds


def _failure(item: pytest.Item) -> str:
    """The text of a test's failures, its teardown's included; empty if it passed."""
    reports = runtestprotocol(item, log=False, nextitem=None)
    failed = [report.longreprtext for report in reports if report.failed]
    skipped = [f"skipped: {report.longreprtext}" for report in reports if report.skipped]
    return "\n".join(failed or skipped)


def _try(mutation: Mutation, items: Sequence[pytest.Item]) -> tuple[str, str]:
    """The test that noticed, or ""; and what was seen."""
    try:
        mutation.apply()
    except (LookupError, SyntaxError) as error:
        return "", f"{type(error).__name__}: {error}"
    seen = []
    for item in items:
        text = _failure(item)
        if text and re.search(mutation.shows, text):
            return item.name, _gist(text, mutation.shows)
        seen.append(f"{item.name}: {_last_line(text) or 'passed'}")
    return "", "; ".join(seen)


def _gist(text: str, pattern: str) -> str:
    found = re.search(f".*(?:{pattern}).*", text)
    return " ".join(found.group().split())[:110] if found else ""


def _last_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("E ")]
    return " ".join((errors or text.splitlines() or [""])[0].split())[:160]


# ---------------------------------------------------------------------------------------------------- the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--mutations", metavar="MODULE", help="whose MUTATIONS are tried, in place of running the tests")
    group.addoption("--only", metavar="REGEX", default="", help="only mutations whose sentence matches")
    group.addoption("--no-control", action="store_true", help="the tests are known to pass where nothing is mutated")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    name = session.config.getoption("--mutations")
    if name is None or session.testsfailed:
        return None
    module = importlib.import_module(name)
    for one in module.IMPORTS:  # here, once, not in every fork
        importlib.import_module(one)
    every: Sequence[Mutation] = module.MUTATIONS
    wanted = str(session.config.getoption("--only"))
    chosen = [m for m in every if re.search(wanted, m.says) and (session.config.getoption("--slow") or not m.is_slow)]
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all forks
    lines = _Lines(session)
    by_name = {item.nodeid.split("/")[-1]: item for item in session.items}
    named = {name: by_name.get(name) for m in chosen for name in m.tests}
    absent = [name for name, item in named.items() if item is None]
    if absent:
        lines.tell(False, "tests that are not there", ", ".join(absent))
    items = {name: item for name, item in named.items() if item is not None}
    unfit: Sequence[str] = []
    if not session.config.getoption("--no-control"):
        failures, end, seconds = _in_fork(lambda: {name: _failure(item) for name, item in items.items()})
        if failures is None:
            lines.tell(False, "nothing is mutated", end)
            return True
        unfit = [name for name, text in failures.items() if text]
        for name in unfit:
            lines.tell(False, f"nothing is mutated: {name}", _last_line(failures[name]))
        lines.tell(True, "nothing is mutated", f"{len(items) - len(unfit)} tests pass", seconds)
    caught = 0
    for mutation in chosen:
        at = [items[name] for name in mutation.tests if name in items and name not in unfit]
        answer, end, seconds = _in_fork(lambda m=mutation, at=at: _try(m, at))
        test, seen = answer if answer is not None else ("the process" if re.search(mutation.shows, end) else "", "")
        caught += bool(test)
        lines.tell(bool(test), mutation.says, f"{test or 'NOT NOTICED'}: {end or seen}", seconds)
    lines.tell(caught == len(chosen), f"{caught} of {len(chosen)} mutations were noticed")
    return True


class _Lines:
    """What is told while it runs."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        self._write = reporter.write_line if reporter is not None else print

    def tell(self, is_good: bool, says: str, more: str = "", seconds: float | None = None) -> None:
        if not is_good:
            self._session.testsfailed += 1
        took = "      " if seconds is None else f"{seconds:4.1f} s"
        self._write(f"{'ok  ' if is_good else 'FAIL'} {took} {says}")
        if more:
            self._write(f"            {more}")
