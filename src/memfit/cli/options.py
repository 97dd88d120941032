"""Options that several commands share, each written once: what is trained, what it has to fit into,
what may change.

In: a command whose parameters are groups of options. Out: the same command as typer reads it, with
the groups' fields as its options.

[Note: groups of options]
A group is a frozen dataclass whose fields are annotated as typer wants its parameters. A command
names the group as one parameter, `shared` puts the fields in its place, in order, and gives the
command the group made. An option that another command needs too is moved into a group: then it has
one name, one default and one text.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from memfit.cli.source import CommandSource, find_source
from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware
from memfit.core.numerics import ALLOWANCES
from memfit.core.plan import own_allowances
from memfit.report.page import write_report


def _recipe_names(incomplete: str) -> list[str]:
    from memfit.integrations.recipes.gpt import RECIPES

    return [recipe.name for recipe in RECIPES if recipe.name.startswith(incomplete)]


def _machine_names(incomplete: str) -> list[str]:
    from memfit.core.hardware import machine_names

    return [name for name in machine_names() if name.startswith(incomplete)]


def _allowances(incomplete: str) -> list[str]:
    return [word for word in sorted(ALLOWANCES) if word.startswith(incomplete)]


def _numerics(incomplete: str) -> list[str]:
    return [word for word in ("auto", "exact") if word.startswith(incomplete)]


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Returns what completes one of these words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Subject: a function of the user's, a recipe, or a model of transformers."""

    function: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="Your function: it takes nothing and returns (model, optimizer, loss, sample), or a DataLoader in the sample's place.",
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="A built-in recipe, such as gpt2-small.", autocompletion=_recipe_names),
    ] = None
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "--transformers",
            metavar="DIR_OR_CONFIG",
            help="A model of transformers (causal, sequence to sequence, image classifier): a config.json, or a directory as save_pretrained writes it.",
        ),
    ] = None
    batch: Annotated[int, typer.Option("--batch", min=1, help="Rows a step, with --model.")] = 8
    sequence: Annotated[
        int, typer.Option("--sequence", min=1, help="Tokens a row, with --model of a language model.")
    ] = 512

    @property
    def is_named(self) -> bool:
        """True if something is named."""
        return any(named is not None for named in (self.function, self.recipe, self.model))

    @property
    def is_ambiguous(self) -> bool:
        """True if several things are named."""
        return sum(named is not None for named in (self.function, self.recipe, self.model)) > 1

    def build(self) -> CommandSource:
        """Builds what is named; see `find_source`."""
        return find_source(self.function, self.recipe, self.model, self.batch, self.sequence)


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Limits by tier, and the machine."""

    limit: Annotated[str | None, typer.Option(help="Memory of the whole process (or of the GPU), such as 1.25GiB.")] = (
        None
    )
    host_limit: Annotated[str | None, typer.Option(help="Host memory beside a device.")] = None
    disk_limit: Annotated[str | None, typer.Option(help="Files: homes on disk, and a store.")] = None
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="NAME_OR_FILE",
            help="Another machine, which need not be here unless it is to train: a name such as h200, or a JSON file as Hardware.to_json writes it.",
            autocompletion=_machine_names,
        ),
    ] = None
    tiers: Annotated[
        str | None,
        typer.Option(
            "--tiers",
            metavar="TIER=SIZE,...",
            help="Capacities in place of those of --hardware, such as device=141GiB,host=128GiB,disk=64GiB.",
        ),
    ] = None
    emulate_device: Annotated[
        bool, typer.Option("--emulate-device", help="Count a device of its own inside the process.")
    ] = False
    directory: Annotated[
        Path | None, typer.Option(help="Where homes on disk are made (or would be); temporary by default.")
    ] = None

    @property
    def is_named(self) -> bool:
        """True if a limit or a machine is named."""
        return any((self.limit, self.host_limit, self.disk_limit, self.hardware, self.tiers, self.emulate_device))

    def keywords(self) -> dict[str, Any]:
        """Returns keywords of `memfit.fit`, but for `limit`.

        Raises:
            UsageError: no such machine, or sizes without one.
        """
        return {
            "host_limit": self.host_limit,
            "disk_limit": self.disk_limit,
            "hardware": given_hardware(self.hardware, self.tiers),
            "emulate_device": self.emulate_device,
            "directory": self.directory,
        }


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """Changes that a plan may make."""

    numerics: Annotated[
        str,
        typer.Option(
            "--numerics",
            help="exact: plans that give plain PyTorch's bits, or none. auto: sums are regrouped where nothing else fits, or where it is a tenth faster.",
            autocompletion=_numerics,
        ),
    ] = "auto"
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            help="A change of arithmetic that plans may use, such as bf16 or int8-state. May be repeated.",
            autocompletion=_allowances,
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Take this plan (JSON, as memfit plan --json writes it; - reads standard input), or a technique by its name, such as zero-offload."
        ),
    ] = None
    block: Annotated[
        list[str] | None, typer.Option(help="A module that is to be a block. May be repeated; else memfit finds them.")
    ] = None
    clip: Annotated[float | None, typer.Option(help="Gradients are clipped to this norm.")] = None

    def keywords(self) -> dict[str, Any]:
        """Returns keywords of `memfit.fit`."""
        return {
            "numerics": self.numerics,  # its check says what it takes
            "allow": own_allowances(self.allow or ()),
            "plan": given_plan(self.plan),
            "blocks": self.block,
            "max_grad_norm": self.clip,
        }


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the same as JSON here; - writes it, and nothing else, to standard output."),
]

RanksOption = Annotated[
    int,
    typer.Option(
        "--ranks",
        min=1,
        help="Processes that train together, each inside the limit and with a batch of its own; train starts them on this machine, as torchrun does.",
    ),
]


def given_plan(path: Path | None) -> Path | str | None:
    """The value of `plan=` for the option: the path, or what stands on standard input."""
    return sys.stdin.read() if path == Path("-") else path


def given_hardware(hardware: str | None, tiers: str | None) -> Hardware | None:
    """The machine that --hardware and --tiers describe; None: this one.

    Raises:
        UsageError: no such machine, or sizes without one.
    """
    from memfit.core.hardware import machine_names, read_hardware, read_tiers

    sizes = {} if tiers is None else read_tiers(tiers)
    found = read_hardware(hardware)
    if found is None:
        if tiers is not None:
            raise UsageError(
                f"--tiers gives sizes, and no speeds: name the machine with --hardware, a file or one of {', '.join(machine_names())}"
            )
        return None
    return found.with_capacities(sizes)


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with the fields of its groups as parameters of its own. See [Note: groups
    of options].
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and is_dataclass(kind):
            groups[name] = kind
            own = get_type_hints(kind, include_extras=True)
            parameters += [_keyword(each.name, own[each.name], each.default) for each in fields(kind)]
        else:
            parameters.append(_keyword(name, kind, parameter.default))

    def call(**given: Any) -> None:
        made = {name: kind(**_taken(kind, given)) for name, kind in groups.items()}
        command(**made, **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__module__ = command.__module__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _taken(kind: Any, given: dict[str, Any]) -> Mapping[str, Any]:
    return {each.name: given.pop(each.name) for each in fields(kind)}


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# Tables and lines on the terminal.

# Where there is no terminal (a file, a pipe) nothing is cut at 80 characters.
_WIDTH_ELSEWHERE = 160


class TableList(Console):
    """A console that shows nothing and keeps the tables it is given, for `--json`.

    Attributes:
        tables: of each its title and its rows, by the names of their columns ("note" of one without
            a name).
    """

    def __init__(self) -> None:
        super().__init__(file=StringIO())
        self.tables: list[dict[str, Any]] = []

    def take(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Keeps a table."""
        names = [column or "note" for column in columns]
        self.tables.append({"title": title, "rows": [dict(zip(names, row, strict=True)) for row in rows]})


def open_console(*, on_errors: bool = False) -> Console:
    """A console on standard output, or on that for errors, where standard output is for another
    program.
    """
    console = Console(highlight=False, stderr=on_errors)
    return console if console.is_terminal else Console(highlight=False, stderr=on_errors, width=_WIDTH_ELSEWHERE)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()
) -> None:
    """Prints a table; the first column and those in `left` are text, the others numbers, aligned
    right.
    """
    if isinstance(console, TableList):
        console.take(title, columns, rows)
        return
    table = Table(header_style="", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        is_text = index == 0 or column in left
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold", markup=False)
    console.print(table, markup=False)
    console.print()


def print_json(path: Path, data: Any) -> None:
    """Writes data as JSON to a file, or to standard output for `-`.

    Raises:
        UsageError: the file cannot be written.
    """
    text = json.dumps(data, indent=1, allow_nan=False)
    if path == Path("-"):
        typer.echo(text)
    else:
        write_report(path, text + "\n")
