"""Imports go only along the arrows of docs/architecture.md, "Rooms"; torch stays out of the packages that plan and predict.

Every import is read from the source with `ast`: at the top, inside functions, under TYPE_CHECKING, and calls of
`import_module` and `__import__` with a constant name.
"""

from __future__ import annotations

import ast
import dis
import functools
import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "memfit"

# Packages inside of rooms, which have arrows of their own.
SUBROOMS = frozenset({"integrations.recipes", "machine.host", "planner.search"})

# Room -> the rooms it may import. A room is a package of memfit, one of `SUBROOMS` in it, or a module beside them; "memfit" is `__init__.py`.
ARROWS: dict[str, frozenset[str]] = {
    room: frozenset(targets.split())
    for room, targets in {
        # Without torch.
        "core": "",
        "machine.host": "core",
        "report": "core",
        "step": "core",
        "planner.search": "core step",
        # Tensors, and where they rest.
        "devices": "core",
        "tensors": "core devices",
        "store": "core devices tensors",
        "optimizers": "core devices tensors",
        "trace": "core devices tensors",
        "homes": "core devices optimizers store tensors",
        # Steps, runs, machines, plans.
        "mesh": "core homes optimizers tensors",
        "engine": "core devices homes tensors trace",
        "files": "core devices engine homes store tensors",
        "runs": "core devices engine files homes mesh store tensors",
        "machine": "core devices homes machine.host optimizers step store tensors trace",
        "planner": (
            "core devices engine files homes machine mesh optimizers planner.search report runs step store "
            "tensors trace"
        ),
        "job": (
            "core devices engine files homes machine mesh optimizers planner planner.search report runs step "
            "store tensors trace"
        ),
        "integrations.recipes": "core files",
        "integrations": "core job planner tensors trace",
        # Public names, and the command line.
        "api": "job planner trace",
        "arena": "devices",
        "communicator": "mesh",
        "losses": "core engine",
        "parameter_server": "job mesh",
        "recipes": "integrations.recipes",
        "sinks": "core",
        "memfit": "arena communicator core job losses parameter_server planner sinks tensors trace",
        "cli": "core integrations.recipes job machine machine.host planner report runs",
        "__main__": "cli",
    }.items()
}

# Public modules beside the packages.
MODULES = frozenset({"api", "arena", "communicator", "losses", "parameter_server", "recipes", "sinks"})

TORCH_FAMILY = frozenset({"torch", "torchvision", "torchaudio", "functorch"})
# They all import torch when they are imported.
HOST_LIBRARIES = frozenset({"transformers", "peft", "accelerate", "lightning", "pytorch_lightning", "deepspeed"})

TORCH_FREE = ("core", "machine.host", "planner.search", "step", "report", "cli")
MAY_IMPORT_TORCH = frozenset(ARROWS) - {*TORCH_FREE, "memfit", "__main__"}
# Scripts that run in child processes of their own: they load torch where they use it, and nobody imports them.
CHILD_PROGRAMS = frozenset({"machine/host/trials.py"})
MAY_IMPORT_HOST_LIBRARIES = frozenset({"files", "integrations", "integrations.recipes"})
# The other modules of these rooms import them where they are used.
HOST_MODULES = frozenset({"integrations/transformers.py", "integrations/lightning.py"})
# `safetensors` itself is free of torch, this part is not.
TORCH_IN_DISGUISE = "safetensors.torch"


@dataclass(frozen=True)
class Import:
    path: Path
    line: int
    module: str
    is_lazy: bool
    """Inside a function, or read by type checkers only."""


def module_name(path: Path, source: Path) -> tuple[str, ...]:
    parts = ("memfit", *path.relative_to(source).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def room_of(module: tuple[str, ...]) -> str:
    inner = ".".join(module[1:3])
    return inner if inner in SUBROOMS else module[1] if len(module) > 1 else "memfit"


def called_name(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def resolve_relative(path: Path, source: Path, level: int, module: str | None) -> str:
    package = ("memfit", *path.relative_to(source).parent.parts)
    return ".".join([*package[: len(package) - (level - 1)], *([module] if module else [])])


def is_lazy_scope(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@functools.cache
def read_imports(path: Path, source: Path) -> tuple[Import, ...]:
    return tuple(_imports_of(path, source))


def _imports_of(path: Path, source: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    lazy = {id(inner) for node in ast.walk(tree) if is_lazy_scope(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_relative(path, source, node.level, node.module) if node.level else node.module or ""
            # `from memfit import runtime` imports a room, `from memfit.core import x` a name or a module in it.
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"} and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names = [first.value]
        for name in names:
            assert isinstance(node, ast.stmt | ast.expr)
            yield Import(path, node.lineno, name, id(node) in lazy)


def memfit_target(name: str, source: Path) -> str | None:
    """The room that an import of `memfit...` reaches; `from memfit import fit` reaches `__init__`."""
    parts = name.split(".")
    if parts[0] != "memfit":
        return None
    if len(parts) > 1 and ((source / parts[1]).is_dir() or (source / f"{parts[1]}.py").is_file()):
        return room_of((*parts,))
    return "memfit"


def find_violations(source: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(source.rglob("*.py")):
        room = room_of(module_name(path, source))
        if room not in ARROWS:
            found.append(f"{path}: the room {room!r} is not in the table of docs/architecture.md and of this test")
            continue
        for one in read_imports(path, source):
            where = f"{path}:{one.line}"
            target = memfit_target(one.module, source)
            if target is not None:
                if target != room and target not in ARROWS[room]:
                    found.append(f"{where}: {room} may not import {target} ({one.module})")
                continue
            top = one.module.split(".")[0]
            is_torch = top in TORCH_FAMILY or f"{one.module}.".startswith(f"{TORCH_IN_DISGUISE}.")
            is_in_child = one.is_lazy and path.relative_to(source).as_posix() in CHILD_PROGRAMS
            if is_torch and room not in MAY_IMPORT_TORCH and not is_in_child:
                found.append(f"{where}: {room} may not import torch ({one.module})")
            if top in HOST_LIBRARIES:
                if room not in MAY_IMPORT_HOST_LIBRARIES:
                    found.append(f"{where}: {room} may not import {top}")
                elif path.relative_to(source).as_posix() not in HOST_MODULES and not one.is_lazy:
                    found.append(f"{where}: {room} imports {top} at the top: import it where it is used")
    return found


def test_imports_follow_the_arrows_of_the_design() -> None:
    violations = find_violations(SOURCE)
    assert not violations, "\n" + "\n".join(violations)


def test_every_room_of_the_table_exists_or_is_the_wiring() -> None:
    rooms = {room_of(module_name(path, SOURCE)) for path in SOURCE.rglob("*.py")}
    assert rooms == set(ARROWS)


def test_the_table_in_the_docs_is_this_one() -> None:
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_.]+)` \| [^|]+ \| ([a-z_., -]+) \|$", text, re.MULTILINE)
    told = {room: frozenset(targets.split(", ")) - {"-"} for room, targets in rows}
    assert told == {room: targets for room, targets in ARROWS.items() if room not in ("memfit", "__main__")}


def test_the_table_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ARROWS):
        ready = {room for room, targets in ARROWS.items() if room not in done and targets <= done}
        assert ready, f"a cycle among {sorted(set(ARROWS) - done)}"
        done |= ready


def test_torch_free_rooms_reach_only_torch_free_rooms() -> None:
    for room in TORCH_FREE:
        assert room == "cli" or not ARROWS[room] & MAY_IMPORT_TORCH


def test_there_are_18_packages_and_none_holds_more_than_an_eighth_of_the_lines() -> None:
    lines = Counter[str]()
    for path in SOURCE.rglob("*.py"):
        lines[path.relative_to(SOURCE).parts[0]] += len(path.read_text(encoding="utf-8").splitlines())
    largest = max(lines, key=lambda room: lines[room])
    assert lines[largest] <= 0.125 * lines.total(), (largest, lines[largest])
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
    assert len([*SOURCE.glob("*/__init__.py")]) <= 18


def test_a_file_name_is_used_once() -> None:
    names = Counter(path.name for path in SOURCE.rglob("*.py") if not path.name.startswith("__"))
    # A command line module and a room, or the public module and what it stands for, have paths that no reader takes for each other.
    assert {name for name, count in names.items() if count > 1} == set()


def test_a_class_name_is_used_once() -> None:
    names = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == set()


def test_imports_inside_of_a_room_have_no_cycle() -> None:
    """At import; what is imported in a function or for type checkers only may point back."""
    modules = {".".join(module_name(path, SOURCE)): path for path in SOURCE.rglob("*.py")}
    waits: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = {one.module for one in read_imports(path, SOURCE) if not one.is_lazy}
        # `from memfit.homes.home import ByteHome` reads as a name in a module: the longest prefix that is a module counts.
        found = {prefix for target in targets if (prefix := _module_in(target, modules)) is not None}
        waits[name] = {t for t in found if t != name and room_of((*t.split("."),)) == room_of((*name.split("."),))}
    done: set[str] = set()
    while len(done) < len(waits):
        ready = {name for name, targets in waits.items() if name not in done and targets <= done}
        assert ready, f"a cycle among {sorted(set(waits) - done)}"
        done |= ready


def _module_in(name: str, modules: Container[str]) -> str | None:
    if name in modules:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in modules else None


PLANTED: list[tuple[str, str, str]] = [
    ("engine/engine.py", "from memfit.planner import search", "engine may not import planner.search"),
    ("engine/engine.py", "from memfit import planner", "engine may not import planner"),
    ("engine/engine.py", "from ..planner import search", "engine may not import planner.search"),
    ("engine/engine.py", "from .. import planner", "engine may not import planner"),
    ("homes/disk.py", "from ..planner.search import x", "homes may not import planner.search"),
    ("engine/engine.py", "def f():\n    import memfit.planner.search", "engine may not import planner.search"),
    ("engine/engine.py", "import importlib\nimportlib.import_module('memfit.cli')", "engine may not import cli"),
    ("engine/engine.py", "import memfit", "engine may not import memfit"),
    ("engine/engine.py", "from memfit import fit", "engine may not import memfit"),
    (
        "core/plan.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        "core may not import torch",
    ),
    ("core/plan.py", "from memfit.engine.engine import Engine", "core may not import engine"),
    ("planner/search/bounds.py", "def f():\n    import torch.nn as nn", "planner.search may not import torch"),
    ("step/build.py", "__import__('torch')", "step may not import torch"),
    ("step/simulate.py", "import functorch", "step may not import torch"),
    ("report/terminal.py", "from safetensors.torch import save_file", "report may not import torch"),
    ("report/terminal.py", "from safetensors import torch", "report may not import torch"),
    (
        "planner/search/bounds.py",
        "async def f():\n    from transformers import AutoModel",
        "planner.search may not import transformers",
    ),
    ("engine/tail.py", "import transformers", "engine may not import transformers"),
    ("cli/train_command.py", "from memfit.engine import engine", "cli may not import engine"),
    ("cli/train_command.py", "import torch", "cli may not import torch"),
    ("machine/host/read.py", "def f():\n    import torch", "machine.host may not import torch"),
    ("machine/host/trials.py", "import torch", "machine.host may not import torch"),
    ("machine/host/read.py", "from memfit.devices import procfs", "machine.host may not import devices"),
    ("integrations/recipes/gpt.py", "import transformers", "at the top"),
    ("api.py", "from memfit.cli import main", "api may not import cli"),
    ("novelty/thing.py", "x = 1", "the room 'novelty' is not in the table"),
]


def make_tree(root: Path, planted: dict[str, str]) -> Path:
    source = root / "memfit"
    for room in set(ARROWS) - {"memfit", *MODULES}:
        (folder := source.joinpath(*room.split("."))).mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (source / "__init__.py").write_text("from memfit.job import fit\n")
    (source / "api.py").write_text("from memfit.job import fit\nimport torch\n")
    for name, text in planted.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return source


@pytest.mark.parametrize(("name", "text", "message"), PLANTED)
def test_the_checker_finds_a_planted_violation(tmp_path: Path, name: str, text: str, message: str) -> None:
    violations = find_violations(make_tree(tmp_path, {name: text}))
    assert len(violations) == 1, violations
    assert message in violations[0]
    assert name in violations[0]


def test_the_checker_is_silent_on_what_is_allowed(tmp_path: Path) -> None:
    allowed = {
        "core/plan.py": "from __future__ import annotations\nfrom memfit.core.limits import GIB\nfrom . import units",
        "core/limits.py": "GIB = 1 << 30",
        "machine/host/trials.py": "def f():\n    import torch\n    from torch import nn",
        "planner/search/bounds.py": "import scipy\nfrom memfit.step import simulate\nfrom memfit.step import build",
        "engine/engine.py": "import torch\nfrom memfit.homes import disk\nimport safetensors.torch",
        "integrations/recipes/gpt.py": (
            "from typing import TYPE_CHECKING\nimport torch\n"
            "if TYPE_CHECKING:\n    from transformers import GPT2Config\n"
            "def build():\n    import transformers"
        ),
        "cli/train_command.py": "from memfit.job import fit\nfrom memfit.report import progress\nfrom memfit.integrations import recipes",
        "report/terminal.py": "import rich\nfrom safetensors import safe_open",
    }
    assert find_violations(make_tree(tmp_path, allowed)) == []


def test_the_checker_reads_every_module_of_memfit() -> None:
    # An independent count: the interpreter's own compile of each file finds as many import instructions.
    for path in SOURCE.rglob("*.py"):
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        waiting = [code]
        instructions = 0
        while waiting:
            current = waiting.pop()
            instructions += sum(1 for one in dis.get_instructions(current) if one.opname == "IMPORT_NAME")
            waiting.extend(constant for constant in current.co_consts if isinstance(constant, type(code)))
        statements = {(one.line, one.module.rsplit(".", 1)[0]) for one in read_imports(path, SOURCE)}
        assert len(statements) >= instructions, path


def test_torch_cuda_is_named_in_devices_alone() -> None:
    naming = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py") if "torch.cuda" in path.read_text()}
    assert naming == {"devices"}
