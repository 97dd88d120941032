"""Files that memfit opens without `core.documents.read_document`, each with the reason why it may."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memfit.cli.plan_command import read_plan_file
from memfit.core.errors import MemfitError

SOURCE = Path(__file__).parents[2] / "src" / "memfit"
READERS = ("open", "read_text", "read_bytes")
_OTHERS = ("DiskStore", "CommittedStore", "gate", "self._gates", "self._gates[keep.gives]", "self._resumed", "super()")
"""Whose `open` is not that of a file."""

KERNEL = "a file of the kernel, which nobody replaces"
CHECKED = "opened without waiting, and looked at before it is read"
IS_FILE = "its caller asks `is_file` first, and it may have any size"
OWN = "a file that memfit makes itself"
PACKAGE = "a file of the package"
DIRECTORY = "a directory, to lock it or to sync its names"
MAY_STAY: dict[str, str] = {
    "devices/compiling.py:_key": PACKAGE,
    "devices/compiling.py:prebuilt_name": PACKAGE,
    "devices/kernel.py:_file_systems": KERNEL,
    "devices/kernel.py:_mapped_files": KERNEL,
    "devices/procfs.py:descendants": KERNEL,
    "devices/procfs.py:read_shares": KERNEL,
    "devices/procfs.py:read_status": KERNEL,
    "cli/init_command.py:init": PACKAGE,
    "core/documents.py:read_document": "the one reader of documents",
    "mesh/failure.py:_machine": KERNEL,
    "mesh/failure.py:_status": KERNEL,
    "files/reader.py:_read_header": CHECKED,
    "files/dcp.py:_write_file": OWN,
    "files/reader.py:__init__": CHECKED,
    "files/replace.py:_make_locked": DIRECTORY,
    "files/replace.py:_remove_leftovers": DIRECTORY,
    "files/replace.py:_sync": OWN,
    "files/trainer.py:is_of_trainer": "asks `is_file` first, and reads its head alone",
    "machine/host/system_files.py:read_text": KERNEL,
    "machine/host/trials.py:_huge_bytes": KERNEL,
    "integrations/lightning.py:load_checkpoint": IS_FILE,
    "integrations/transformers.py:_load_optimizer_and_scheduler": IS_FILE,
    "job/ema.py:__init__": OWN,
    "job/ema.py:read": IS_FILE,
    "job/ema.py:write": OWN,
    "machine/described.py:_processor_name": KERNEL,
    "job/torch_states.py:read_states": IS_FILE,
    "job/torch_states.py:write_torch": OWN,
    "integrations/recipes/corpus.py:build_tokenizer": PACKAGE,
    "integrations/recipes/corpus.py:iterate_files": "texts that a person names to train on: of any size, a piece at a time, and a pipe may be meant",
    "integrations/recipes/corpus.py:iterate_text": "sources of the running interpreter",
    "report/page.py:_read": PACKAGE,
    "store/directory.py:read_manifest_file": CHECKED,
    "store/files.py:_open_direct": "a file that is open already, by its descriptor",
    "store/files.py:allocate": "a file that is open already, by its descriptor",
    "store/files.py:open": "the store's one door to the system",
    "store/files.py:open_file": CHECKED,
    "store/files.py:sync_directory": DIRECTORY,
    "store/files.py:write_small_file": "written, without waiting, and by no other name of somebody's file",
    "store/lock.py:_open_file": CHECKED,
    "store/lock.py:boot_id": KERNEL,
    "store/lock.py:process_start_time": KERNEL,
    "store/directory.py:_open": DIRECTORY,
}


def opened(source: Path) -> Iterator[str]:
    """Yields "path:function" of each call that opens a file by its name."""
    for path in sorted(source.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and _opens(node.func):
                        yield f"{path.relative_to(source).as_posix()}:{function.name}"


def _opens(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id == "open"
    if not isinstance(called, ast.Attribute):
        return False
    of = ast.unparse(called.value)
    return (called.attr in READERS and of not in _OTHERS) or ast.unparse(called) in ("torch.load", "np.load")


def test_every_file_that_is_opened_in_another_way_has_its_reason() -> None:
    assert sorted({*opened(SOURCE)} - MAY_STAY.keys()) == []
    assert sorted(MAY_STAY.keys() - {*opened(SOURCE)}) == []


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_text_of_no_encoding(path: Path) -> None:
    path.write_bytes(b"\xff{}")


def put_giant(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


@pytest.mark.parametrize("put", [put_pipe, put_text_of_no_encoding, put_giant, Path.mkdir])
def test_a_plan_to_compare_with_is_read_like_every_document(put: Callable[[Path], object], tmp_path: Path) -> None:
    put(tmp_path / "plan.json")
    raised: list[BaseException] = []

    def read() -> None:
        try:
            read_plan_file(tmp_path / "plan.json")
        except MemfitError as error:
            raised.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30.0)
    assert len(raised) == 1, "it waits, or is no error of memfit's"
    assert "plan" in str(raised[0])
