"""What stands in the place of a file, and files that change while they are read: refused with words, never waited for, and nothing behind a link is touched."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from faults import small_run
from memfit.core.errors import MemfitError, PlanError, StoreError
from memfit.core.plan import Plan
from memfit.files.reader import TensorFile
from memfit.job.loading import load
from memfit.planner.problem import read_plan
from memfit.runs.exporting import export_run, read_registered, verify_run
from memfit.runs.run_store import RunStore

RUN_FILES = ("manifest.json", "homes-0.bin", "state-0.bin", "state-1.bin", "lock")
SAVE_FILES = ("model.safetensors", "optimizer.safetensors", "memfit_state.json", "model.safetensors.index.json")
PATIENCE_S = 60


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


def device(path: Path, _: Path) -> None:
    path.symlink_to("/dev/zero")


def door(path: Path, _: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as found:
            found.bind(path.name)
    finally:
        os.chdir(before)


def link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def link_to_nothing(path: Path, _: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def link_to_itself(path: Path, _: Path) -> None:
    path.symlink_to(path.name)


def second_name(path: Path, elsewhere: Path) -> None:
    os.link(elsewhere, path)


def empty(path: Path, _: Path) -> None:
    path.touch()


def half(path: Path, elsewhere: Path) -> None:
    content = elsewhere.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def huge(path: Path, elsewhere: Path) -> None:
    """A file of a tebibyte with nothing in it but the beginning."""
    path.write_bytes(elsewhere.read_bytes())
    os.truncate(path, 1 << 40)


STAND_INS: tuple[Callable[[Path, Path], None], ...] = (
    pipe, directory, device, door, link, link_to_nothing, link_to_itself, second_name, empty, half, huge,
)  # fmt: skip

QUICK = (pipe, directory, device, link, huge)


def cases(names: tuple[str, ...], *, quick: tuple[str, ...]) -> list[Any]:
    """Every stand-in in the place of every file; slow but for some."""
    every = [(name, what) for name in names for what in STAND_INS]
    return [
        pytest.param(
            name,
            what,
            id=f"{what.__name__} as {name}",
            marks=() if name in quick and what in QUICK else pytest.mark.slow,
        )
        for name, what in every
    ]


def put(what: Callable[[Path, Path], None], path: Path, elsewhere: Path) -> bytes:
    """In the place of a file; the file itself is moved elsewhere. Its bytes."""
    content = path.read_bytes() if path.exists() else b"x" * 100
    path.unlink(missing_ok=True)
    elsewhere.write_bytes(content)
    what(path, elsewhere)
    return content


def in_time(act: Callable[[], Any]) -> str | None:
    """The words of its refusal, None if it is not refused. Whatever else it raises comes through, and waiting for ever does not."""
    caught: list[BaseException | None] = []

    def work() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001, told below
            caught.append(error)
        else:
            caught.append(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert caught, "it waits"
    if isinstance(caught[0], MemfitError):
        assert 20 < len(str(caught[0])) < 4000
        return str(caught[0])
    if caught[0] is not None:
        raise caught[0]
    return None


@pytest.mark.parametrize(("name", "what"), cases(RUN_FILES, quick=("manifest.json", "homes-0.bin")))
def test_what_stands_in_the_place_of_a_file_of_a_run_is_refused(
    what: Callable[[Path, Path], None], name: str, made: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    elsewhere = tmp_path / "elsewhere"
    content = put(what, run / name, elsewhere)

    def open_it() -> None:
        store = RunStore(run, durability="step", must_exist=True)
        store.close()

    problems = [in_time(act) for act in (open_it, lambda: verify_run(run), lambda: export_run(run, tmp_path / "out"))]
    # What is read of a state is as long as the manifest says; a manifest is replaced, never written to.
    is_harmless = (
        name == "lock"
        or (name == "manifest.json" and what is second_name)
        or (name.startswith("state") and (what in (half, huge) or (what is empty and not is_current(made, name))))
    )
    assert is_harmless or problems[0] is not None
    assert elsewhere.read_bytes() == content, "written through"


def is_current(made: Path, name: str) -> bool:
    entry = json.loads((made / "run" / "manifest.json").read_text())["body"]["state"]
    return name == f"state-{entry['file']}.bin"


@pytest.mark.parametrize(("name", "what"), cases(SAVE_FILES, quick=("model.safetensors.index.json",)))
def test_what_stands_in_the_place_of_a_saved_file_is_refused(
    what: Callable[[Path, Path], None], name: str, made: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(made / "saved", saved)
    elsewhere = tmp_path / "elsewhere"
    content = put(what, saved / name, elsewhere)
    model = small_run.build("tied-and-frozen")
    optimizer = small_run.adamw(model)
    problem = in_time(lambda: load(saved, model, optimizer))
    is_same = what in (link, second_name) and name != "model.safetensors.index.json"  # a hub's cache is made of links
    assert (problem is None) == is_same
    assert elsewhere.read_bytes() == content


@pytest.mark.parametrize(
    "what",
    [pipe, directory, device, link_to_nothing, link_to_itself, empty, half, huge],
    ids=lambda what: what.__name__,
)
def test_what_stands_in_the_place_of_a_plan_or_of_registered_states_is_refused(
    what: Callable[[Path, Path], None], made: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(Plan().to_json())
    put(what, tmp_path / "plan.json", tmp_path / "elsewhere")
    for given in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        with pytest.raises(PlanError, match="plan"):
            read_plan(given)
    shutil.copytree(made / "saved", tmp_path / "saved")
    put(what, tmp_path / "saved" / "registered.safetensors", tmp_path / "elsewhere")
    assert in_time(lambda: read_registered(tmp_path / "saved")) is not None


def test_names_that_are_no_plan_are_refused_as_such() -> None:
    for given in ("", "x" * 5000, "no\0name", "[]"):
        with pytest.raises(PlanError):
            read_plan(given)


def test_a_file_that_shrinks_while_it_is_read_is_told(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shutil.copy(made / "saved" / "model.safetensors", path)
    with TensorFile(path) as file:
        os.truncate(path, file.header.file_bytes - 4096)
        last = file.header.entries[-1]
        with pytest.raises(StoreError, match="ended at byte"):
            file.read_into(last, torch.empty(last.shape, dtype=last.dtype))


def test_a_run_whose_files_shrink_under_a_live_job_says_so_and_keeps_its_commit(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    store = RunStore(run, durability="step", must_exist=True)
    name = max(store.committed.disk.regions, key=lambda region: store.committed.disk.regions[region].nbytes)
    tensor = store.committed.disk.regions[name].tensors[0].name
    os.truncate(run / "homes-0.bin", 0)
    with pytest.raises(StoreError, match="homes-0.bin"):
        store.committed.read_tensor(name, tensor)
    store.close()
    model = small_run.build("tied-and-frozen")
    with pytest.raises(StoreError, match="homes-0.bin has 0 bytes"):
        memfit.fit(model, small_run.adamw(model), small_run.loss, small_run.draw(torch.Generator()), store=run)


def test_a_run_that_lost_its_manifest_is_refused_and_not_begun_anew(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    (run / "manifest.json").rename(tmp_path / "manifest.json")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != "lock"}
    model = small_run.build("tied-and-frozen")
    for act in (
        lambda: memfit.fit(model, small_run.adamw(model), small_run.loss, small_run.draw(torch.Generator()), store=run),
        lambda: verify_run(run),
        lambda: export_run(run, tmp_path / "out"),
    ):
        with pytest.raises(StoreError, match=r"holds data of a store \(homes-0.bin\) and no manifest.json"):
            act()
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name != "lock"} == before
    (tmp_path / "manifest.json").rename(run / "manifest.json")
    assert verify_run(run).is_whole
