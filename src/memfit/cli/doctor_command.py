"""`memfit doctor`: what the machine gives a run, what memfit sets, what a person may change and
what it would bring.
"""

from __future__ import annotations

import json as json_module
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memfit.cli.output import open_console, print_table
from memfit.core.units import format_bytes
from memfit.host import (
    NOT_MEASURED,
    Measurements,
    Setting,
    SettingChange,
    advise_changes,
    choose_settings,
    describe_host,
    measure_host,
    read_host,
)


def doctor(
    directory: Annotated[
        Path | None, typer.Option(help="On the disk that homes would use; the temporary directory by default.")
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure what settings bring: some 5 to 10 seconds.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Looks at processors, memory, pages, malloc and disk.

    Says what memfit sets, what you may change and what it brings.
    """
    host = read_host(tempfile.gettempdir() if directory is None else directory)
    settings = choose_settings(host)
    if json:
        measured = measure_host(host) if measure else None
        document = {
            "found": asdict(host),
            "settings": [asdict(setting) for setting in settings],
            "measured": None if measured is None else asdict(measured),
            "changes": [asdict(change) for change in advise_changes(host, settings, measured)],
        }
        typer.echo(json_module.dumps(document, indent=2))
        return
    console = open_console()
    print_table(console, "Found", ("what", "found"), describe_host(host), left=("found",))
    _print_settings(console, settings)
    measured = None
    if measure:
        with console.status("measuring"):
            measured = measure_host(host)
        _print_measurements(console, measured)
        if host.processors.is_busy:
            busy = f"The machine was busy (load {host.processors.load:g} on {host.processors.logical} processors): these figures are rough"
            console.print(f"{busy}; measure again when it is idle.", markup=False, soft_wrap=True)
            console.print()
    _print_changes(console, advise_changes(host, settings, measured))


def _print_settings(console: Console, settings: tuple[Setting, ...]) -> None:
    rows = [
        (
            f"{setting.name}={setting.value}",
            "memfit" if setting.yours is None else f"yours stays: {setting.yours}",
            setting.reason,
        )
        for setting in settings
    ]
    title = "Set by memfit's commands before torch starts (in your own program: for you to export)"
    print_table(console, title, ("variable", "who sets it", "why"), rows, left=("who sets it", "why"))


def _print_measurements(console: Console, measured: Measurements) -> None:
    waiting, touch = measured.waiting, measured.first_touch
    with_threads = f"small step, {waiting.threads} threads"
    rows = [
        (f"{with_threads}, alone", waiting.before, _milliseconds(waiting.before_alone_s), ""),
        ("", "PASSIVE", _milliseconds(waiting.passive_alone_s), f"{waiting.alone_gain:.2f}x"),
        (f"{with_threads}, beside one busy thread", waiting.before, _milliseconds(waiting.before_contended_s), ""),
        ("", "PASSIVE", _milliseconds(waiting.passive_contended_s), f"{waiting.contended_gain:.2f}x"),
    ]
    one = measured.threads[0]
    for index, trial in enumerate(measured.threads):
        gain = "" if index == 0 else f"{one.step_s / trial.step_s:.2f}x"
        rows.append(
            (
                "" if index else "small step, PASSIVE",
                "1 thread" if trial.threads == 1 else f"{trial.threads} threads",
                _milliseconds(trial.step_s),
                gain,
            )
        )
    small = touch.small_bytes_per_s
    rows += [
        ("fresh memory", "small pages", _rate(small), ""),
        (
            "",
            "huge pages" if touch.huge_share is None else f"huge pages ({touch.huge_share:.0%} of them given)",
            _rate(touch.huge_bytes_per_s),
            f"{touch.huge_bytes_per_s / small:.2f}x",
        ),
        ("", "touched before", _rate(touch.again_bytes_per_s), f"{touch.again_bytes_per_s / small:.2f}x"),
    ]
    rows += _disk_rows(measured)
    print_table(
        console,
        f"Measured in {measured.seconds:.1f} s; the last column compares with the first line of each group",
        ("what", "how", "measured", "as fast"),
        rows,
        left=("how",),
    )


def _disk_rows(measured: Measurements) -> list[tuple[str, str, str, str]]:
    cached, direct = measured.disk_cached, measured.disk_direct
    if cached is None:
        return []
    whole = format_bytes(measured.file_bytes)
    rows: list[tuple[str, str, str, str]] = []
    for what in ("read", "write"):
        before = getattr(cached, f"{what}_bytes_per_s")
        rows.append((f"disk, {what} {whole}", "page cache", _rate(before), ""))
        if direct is not None:
            rate = getattr(direct, f"{what}_bytes_per_s")
            rows.append(("", "direct I/O", _rate(rate), f"{rate / before:.2f}x"))
    rows.append((f"left in memory of {whole}", "page cache", format_bytes(cached.cached_bytes), ""))
    if direct is not None:
        rows.append(("", "direct I/O", format_bytes(direct.cached_bytes), ""))
    return rows


def _print_changes(console: Console, changes: tuple[SettingChange, ...]) -> None:
    if not changes:
        console.print("Nothing to change: the machine gives what it has.", markup=False)
        return
    console.print("You may change", style="bold", markup=False)
    for number, change in enumerate(changes, start=1):
        console.print(f"{number}. {change.found}", markup=False)
        measured = change.measured if change.measured.startswith(NOT_MEASURED) else f"measured: {change.measured}"
        for text in (f"change: {change.how}", f"brings: {change.brings}", measured):
            console.print(f"   {text}", markup=False, soft_wrap=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"
