"""`memfit doctor`: what the machine gives a run, what memfit sets, what a person may change and
what it would bring.
"""

from __future__ import annotations

import json as json_module
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from memfit.cli.options import open_console, print_table
from memfit.core.limits import format_bytes
from memfit.machine.host.advice import NOT_MEASURED, SettingChange, advise_changes, describe_host
from memfit.machine.host.measure import Measurements, measure_host
from memfit.machine.host.read import read_host
from memfit.machine.host.settings import Setting, choose_settings

if TYPE_CHECKING:
    from memfit.core.hardware import Hardware


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


# `memfit probe`: what computing and moving bytes cost on this machine, measured and kept.


def probe(
    out: Annotated[
        Path | None, typer.Option(help="Write the description here, and not to the cache that later runs read.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the description instead of tables.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    directory: Annotated[
        Path | None, typer.Option(help="On the disk that homes would use; the temporary directory by default.")
    ] = None,
) -> None:
    """Measures this machine, class by class of work and link by link, and keeps it for later runs.

    The file is JSON that you may read, change, share and pass as --hardware.
    """
    from memfit.job.probe_machine import probe as probe_machine

    console = open_console(on_errors=json)
    with console.status("measuring"):
        found, path = probe_machine(device, directory=directory, out=out)
    if json:
        typer.echo(found.to_json())
        return
    _print(console, found)
    console.print(f"the description is in {path}", markup=False, soft_wrap=True)


def _print(console: Console, found: Hardware) -> None:
    origin = found.origin
    title = f"{origin['processor']}, {origin['threads']} of {origin['processors']} threads, torch {origin['torch']}"
    rows = [(str(kind), f"{rate.per_s / 1e9:.3g}", f"{rate.spread:.0%}") for kind, rate in found.rates.items()]
    print_table(console, title, ("class of work", "1e9 a second", "spread"), rows)
    links: list[tuple[str, ...]] = []
    for tier, spec in found.away.items():
        if (link := spec.link) is None:
            continue
        for name in ("read", "write"):
            speeds = [getattr(link, f"{how}{name}_bytes_per_s") for how in ("", "both_", "busy_")]
            links.append((f"{tier}, {name}", *(f"{format_bytes(int(speed))}/s" if speed else "" for speed in speeds)))
        links.append((f"{tier}, compute beside it", f"{link.compute_share:.0%}", "", ""))
    print_table(console, "Links", ("link", "alone", "both ways at once", "while computing"), links)
    sizes = [(str(tier), format_bytes(spec.nbytes)) for tier, spec in found.tiers.items()]
    print_table(console, "Capacities", ("tier", "bytes"), sizes)
    chip = [(name, format_bytes(nbytes)) for name, nbytes in found.on_chip.items()]
    if chip:
        print_table(console, "On the chip", ("memory", "bytes"), chip)
    if found.is_unified:
        console.print("device and host are one memory: a copy between them brings nothing")
    if notes := origin.get("notes"):
        console.print(f"note: {notes}", markup=False, soft_wrap=True)
