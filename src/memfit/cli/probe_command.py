"""`memfit probe`: what computing and moving bytes cost on this machine, measured and kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from memfit.cli.output import open_console, print_table
from memfit.core.units import format_bytes

if TYPE_CHECKING:
    from memfit.core.hardware import Hardware


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
    from memfit.api.probe_machine import probe as probe_machine

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
