"""Stores of ranks that something happened to: bitwise, or refused with everything still there; nothing outside is changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.processes import RankFailedError, Ranks
from memfit.core.errors import StoreError
from memfit.runs.exporting import export_run, remove_run, verify_run
from memfit.runs.rank_record import RankRecord, find_record
from memfit.store import CommittedStore, FileOperations, RegionSpec
from memfit.store.directory import read_manifest_file
from memfit.store.manifest import write_manifest

GO_ON = "distributed.storing:go_on_as_one_of"
BEGIN = "distributed.storing:begin_at"
FIRSTS = (0, 1000)
"""Where the data of runs a and b begin."""
PLANS = {"data parallel": (0, "device"), "sharded": (3, "disk")}
Runs = Mapping[str, Path]


@pytest.fixture(scope="module")
def made(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Directories of whole runs on two ranks, with two steps: of each plan two runs of one model, one of them also as it was a step before."""
    where = tmp_path_factory.mktemp("made")
    found = {}
    for plan, (stage, tier) in PLANS.items():
        for name, first in zip("ab", FIRSTS, strict=True):
            found[f"{plan}, {name}"] = run = where / f"{plan}-{name}"
            ranks.run(2, BEGIN, str(run), 1, stage, tier, first)
            if name == "a":
                found[f"{plan}, a before"] = shutil.copytree(run, where / f"{plan}-before")
            ranks.run(2, BEGIN, str(run), 2, stage, tier, first)
    return found


@pytest.fixture(params=["sharded", pytest.param("data parallel", marks=pytest.mark.slow)])
def plan(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(made: Runs, plan: str, tmp_path: Path) -> Path:
    return shutil.copytree(made[f"{plan}, a"], tmp_path / "run")


def goes_on(ranks: Ranks, run: Path, plan: str, size: int = 2) -> set[tuple[int, bool]]:
    """How many steps the run had, and whether it is bit for bit one of those that were made."""
    return set(ranks.run(size, GO_ON, str(run), *PLANS[plan], FIRSTS, [2, 2, 2]))


def contents(directory: Path) -> dict[str, object]:
    """What lies under a directory, without lock files, by name."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if path.name != "lock":
            what = path.read_bytes() if stat.S_ISREG(mode) else path.readlink() if stat.S_ISLNK(mode) else None
            found[str(path.relative_to(directory))] = (stat.S_IFMT(mode), what)
    return found


def refused(ranks: Ranks, run: Path, plan: str, match: str, size: int = 2) -> None:
    """The run is refused with words, and everything is still there."""
    before = contents(run)
    with pytest.raises(RankFailedError, match=match) as caught:
        goes_on(ranks, run, plan, size)
    assert "gave no answer" not in str(caught.value)
    now = contents(run)
    assert {name: now.get(name) for name in before} == before


# --- whose they are


def test_a_store_of_another_run_is_refused(ranks: Ranks, made: Runs, run: Path, plan: str) -> None:
    """Of the same model, with as many commits."""
    shutil.rmtree(run / "set-1" / "rank-1")
    shutil.copytree(made[f"{plan}, b"] / "set-1" / "rank-1", run / "set-1" / "rank-1")
    refused(ranks, run, plan, "rank-1 is not the store of rank 1 of this run: its manifest says run")
    for act in (verify_run, lambda path: export_run(path, run.parent / "out"), remove_run):
        with pytest.raises(StoreError, match="is not the store of rank 1 of this run"):
            act(run)
    shutil.rmtree(run / "set-1" / "rank-1")
    shutil.copytree(made[f"{plan}, a"] / "set-1" / "rank-1", run / "set-1" / "rank-1")
    assert goes_on(ranks, run, plan) == {(2, True)}


def test_stores_that_changed_places_are_refused(ranks: Ranks, run: Path, plan: str) -> None:
    for old, new in (("rank-0", "aside"), ("rank-1", "rank-0"), ("aside", "rank-1")):
        (run / "set-1" / old).rename(run / "set-1" / new)
    refused(ranks, run, plan, "rank-[01] is not the store of rank [01] of this run: its manifest says run")


def test_stores_of_two_copies_of_a_run_are_told_apart(ranks: Ranks, made: Runs, plan: str, tmp_path: Path) -> None:
    """With the same name, rank and number of commits, but another step behind them."""
    one, other = (shutil.copytree(made[f"{plan}, a before"], tmp_path / name) for name in ("one", "other"))
    ranks.run(2, BEGIN, str(one), 2, *PLANS[plan], 0)
    ranks.run(2, BEGIN, str(other), 2, *PLANS[plan], 7)
    shutil.rmtree(one / "set-1" / "rank-1")
    shutil.copytree(other / "set-1" / "rank-1", one / "set-1" / "rank-1")
    refused(ranks, one, plan, "are at different commits, of steps \\[2\\]")


def as_version_1(run: Path) -> None:
    """Rewrites a run as memfit wrote it before stores had a name."""
    for path in run.glob("set-1/rank-*"):
        manifest = read_manifest_file(path, operations=FileOperations())
        identity = {key: value for key, value in manifest.identity.items() if key not in ("run", "rank")}
        (path / "manifest.json").write_bytes(write_manifest(replace(manifest, identity=identity)))
    (run / "ranks.json").write_text(json.dumps({"format": "memfit-ranks", "version": 1, "ranks": 2, "set": 1}))


def test_a_run_of_before_goes_on_and_has_a_name_from_then_on(ranks: Ranks, run: Path, plan: str) -> None:
    as_version_1(run)
    assert verify_run(run).is_whole
    assert goes_on(ranks, run, plan) == {(2, True)}
    record = find_record(run)
    assert record is not None and record.number == 2 and record.run
    assert sorted(path.name for path in run.glob("set-*")) == ["set-2"]
    assert goes_on(ranks, run, plan) == {(3, True)}


def test_whole_weights_are_compared_between_ranks_where_all_that_was_drawn_is_the_same(
    ranks: Ranks, tmp_path: Path
) -> None:
    plan = "data parallel"
    for name, first in zip("ab", FIRSTS, strict=True):
        ranks.run(2, "distributed.storing:begin_with_the_same_draws", str(tmp_path / name), 2, *PLANS[plan], first)
    shutil.rmtree(tmp_path / "a" / "set-1" / "rank-1")
    shutil.copytree(tmp_path / "b" / "set-1" / "rank-1", tmp_path / "a" / "set-1" / "rank-1")
    refused(ranks, tmp_path / "a", plan, "about to do different things.*of the run: checksum")


# --- what is lost


def test_a_record_that_is_gone_empty_or_damaged_is_named_again_by_the_line_that_is_told(
    ranks: Ranks, run: Path, plan: str
) -> None:
    content = (run / "ranks.json").read_bytes()
    flipped = content.replace(b'"set": 1', b'"set": 9')
    for damage in (None, b"", content[:20], flipped, b"\xff" + content):
        (run / "ranks.json").unlink() if damage is None else (run / "ranks.json").write_bytes(damage)
        refused(ranks, run, plan, "ranks.json (is gone|is damaged)")
    with pytest.raises(RankFailedError, match="ranks.json is damaged"):
        goes_on(ranks, run, plan, size=1)
    (run / "ranks.json").unlink()
    with pytest.raises(RankFailedError, match="ranks.json is gone"):
        goes_on(ranks, run, plan, size=1)
    for act in (verify_run, lambda path: export_run(path, run.parent / "out"), remove_run):
        with pytest.raises(StoreError, match="ranks.json is gone") as caught:
            act(run)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    (run / "ranks.json").write_text(message.splitlines()[-1] + "\n")
    assert goes_on(ranks, run, plan) == {(2, True)}


def test_a_flipped_bit_of_the_record_is_found(run: Path) -> None:
    content = (run / "ranks.json").read_bytes()
    for bit in random.Random(0).sample(range(8 * len(content)), 60):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (run / "ranks.json").write_bytes(damaged)
        with pytest.raises(StoreError, match=r"ranks\.json is damaged.*make this line its content"):
            find_record(run)


def test_the_named_set_is_opened_before_another_one_goes_and_what_is_not_the_runs_stays(
    ranks: Ranks, made: Runs, run: Path, plan: str
) -> None:
    shutil.copytree(made[f"{plan}, b"] / "set-1", run / "set-5")  # somebody else's
    (run / "set-4").mkdir()  # made, and no more
    shutil.copytree(run / "set-1", run / "set-2")
    for rank in range(2):
        _rename_set(run / "set-2" / f"rank-{rank}", 2, rank)
    refused(ranks, run, plan, "names set-1, older than .*set-2")
    for rank in range(2):  # of a crash between the first commit of a set and its name
        _rename_set(run / "set-2" / f"rank-{rank}", 2, rank, generation=1)
    data = run / "set-1" / "rank-1" / "homes-0.bin"
    content = data.read_bytes()
    data.write_bytes(bytes(byte ^ 255 for byte in content))
    refused(ranks, run, plan, "damaged")
    data.write_bytes(content)
    assert goes_on(ranks, run, plan) == {(2, True)}
    assert sorted(path.name for path in run.glob("set-*")) == ["set-1", "set-5"]
    assert contents(run / "set-5") == contents(made[f"{plan}, b"] / "set-1")


def _rename_set(path: Path, number: int, rank: int, generation: int | None = None) -> None:
    manifest = read_manifest_file(path, operations=FileOperations())
    identity = {**manifest.identity, "rank": f"{rank} of 2 in set {number}"}
    manifest = replace(manifest, identity=identity, generation=generation or manifest.generation)
    (path / "manifest.json").write_bytes(write_manifest(manifest))


def test_a_missing_folder_and_a_lost_manifest_are_told_as_that(ranks: Ranks, run: Path, plan: str) -> None:
    store = run / "set-1" / "rank-1"
    (store / "manifest.json").rename(run.parent / "manifest")
    refused(ranks, run, plan, r"rank-1 holds data of a store \(homes-0.bin\) and no manifest.json")
    (run.parent / "manifest").rename(store / "manifest.json")
    store.rename(run.parent / "store")
    refused(ranks, run, plan, "is on 2 ranks, and its folder .*set-1/rank-1 is missing")
    with pytest.raises(StoreError, match="its folder .*set-1/rank-1 is missing"):
        verify_run(run)
    (run / "set-1").rename(run.parent / "set")
    refused(ranks, run, plan, "is on 2 ranks, and its folder .*set-1 is missing")


def test_ranks_that_ended_before_their_first_commit_leave_the_directory_to_whoever_comes(
    ranks: Ranks, tmp_path: Path
) -> None:
    plan, run = "sharded", tmp_path / "run"
    run.mkdir()
    RankRecord(number=0, ranks=2, run="5" * 32).write(run)
    (run / "set-1").mkdir()
    for rank in range(2):
        identity = {"memfit run of ranks": "1", "run": "5" * 32, "rank": f"{rank} of 2 in set 1"}
        CommittedStore.create(run / "set-1" / f"rank-{rank}", {"a": RegionSpec(nbytes=8)}, identity=identity).close()
    alone = shutil.copytree(run, tmp_path / "alone")
    with pytest.raises(StoreError, match="there is no store"):
        verify_run(run)
    assert ranks.run(1, "distributed.storing:go_on", str(alone), 1, 0, "device", []) == [(0, [])]
    assert verify_run(alone).step == 1
    for each in (alone, shutil.copytree(run, tmp_path / "removed")):
        assert remove_run(each)
        assert not each.exists()
    ranks.run(2, BEGIN, str(run), 2, *PLANS[plan], 0)
    assert sorted(path.name for path in run.iterdir()) == ["lock", "ranks.json", "set-1"]
    assert goes_on(ranks, run, plan) == {(2, True)}


# --- what stands in their place


@pytest.mark.parametrize("name", ["set-1", "set-1/rank-0", "set-1/rank-1"])
def test_a_folder_that_is_a_link_is_not_followed(ranks: Ranks, run: Path, plan: str, name: str) -> None:
    outside = run.parent / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    before = contents(outside)
    refused(ranks, run, plan, f"{name} is a link, behind which nothing is written")
    assert contents(outside) == before


def test_a_record_that_is_a_pipe_or_huge_is_refused_at_once(ranks: Ranks, run: Path, plan: str) -> None:
    (run / "ranks.json").unlink()
    os.mkfifo(run / "ranks.json")
    refused(ranks, run, plan, "ranks.json is damaged: it is not a plain file")
    for act in (verify_run, lambda path: export_run(path, run.parent / "out"), remove_run):
        with pytest.raises(StoreError, match="it is not a plain file"):
            act(run)
    (run / "ranks.json").unlink()
    (run / "ranks.json").touch()
    os.truncate(run / "ranks.json", 3 << 30)
    with pytest.raises(StoreError, match="more than the 4.0 KiB that such a file may have"):
        verify_run(run)


@pytest.mark.slow
def test_names_of_the_next_version_that_lead_elsewhere_are_not_written_through(
    ranks: Ranks, run: Path, plan: str
) -> None:
    mine = run.parent / "mine"
    mine.write_text("mine")
    pipe_in_place = (lambda _, path: os.mkfifo(path), "set-1/rank-1/manifest.json.new")
    links = [(os.link, name) for name in ("lock", "set-1/rank-0/lock", "set-1/rank-0/manifest.json.new")]
    for put, name in [*links, pipe_in_place]:
        (run / name).unlink(missing_ok=True)
        put(mine, run / name)
        refused(ranks, run, plan, "link|pipe|plain file")
        assert mine.read_text() == "mine"
        (run / name).unlink()
    os.link(mine, run / "ranks.json.new")
    with pytest.raises(RankFailedError, match="hard link"):
        goes_on(ranks, run, plan, size=3)  # whose set gets a name
    assert mine.read_text() == "mine"
    (run / "ranks.json.new").unlink()
    assert goes_on(ranks, run, plan) == {(2, True)}
    assert not (run / "set-2").exists()


# --- the drawn sweep


def names_in(run: Path) -> list[str]:
    """Files and folders of a run's own."""
    return [str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.name != "lock"]


def lose(run: Path, name: str, draw: random.Random, _: Path) -> None:
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def exchange(run: Path, name: str, draw: random.Random, other: Path) -> None:
    """By what another run has there, or by what lies beside it."""
    source = other / name
    if draw.random() < 0.3:
        kind = (run / name).is_dir()
        source = draw.choice([path for path in map(run.__truediv__, names_in(run)) if path.is_dir() == kind])
    if not source.exists() or source == run / name or source in (run / name).parents:
        return
    kept = run.parent / "kept"
    shutil.copytree(source, kept) if source.is_dir() else shutil.copy(source, kept)
    lose(run, name, draw, other)
    kept.rename(run / name)


def flip(run: Path, name: str, draw: random.Random, _: Path) -> None:
    path = run / name
    if path.is_file() and path.stat().st_size:
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


def cut(run: Path, name: str, draw: random.Random, _: Path) -> None:
    if (run / name).is_file():
        os.truncate(run / name, draw.randrange(1 + (run / name).stat().st_size))


def link(run: Path, name: str, draw: random.Random, _: Path) -> None:
    outside = run.parent / "outside" / name.replace("/", "-")
    (run / name).rename(outside)
    if outside.is_dir() or draw.random() < 0.5:
        (run / name).symlink_to(outside)
    else:
        os.link(outside, run / name)


def pipe(run: Path, name: str, draw: random.Random, other: Path) -> None:
    lose(run, name, draw, other)
    os.mkfifo(run / name)


MEDDLERS: tuple[Callable[[Path, str, random.Random, Path], None], ...] = (
    exchange,
    exchange,
    lose,
    flip,
    cut,
    link,
    pipe,
)


@pytest.mark.parametrize(
    "seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(300)]
)
def test_whatever_happens_to_files_the_run_goes_on_bit_for_bit_or_is_refused_with_everything_there(
    ranks: Ranks, made: Runs, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    plan = draw.choice(list(PLANS))
    run, pristine = tmp_path / "run", made[f"{plan}, a"]
    (tmp_path / "outside").mkdir()
    shutil.copytree(pristine, run)
    for _ in range(draw.choice((1, 1, 2))):
        other = made[draw.choice([name for name in made if name != f"{plan}, a"])]
        name = draw.choice([name for name in names_in(run) if "outside" not in str((run / name).resolve())])
        draw.choice(MEDDLERS)(run, name, draw, other)
    before, outside = contents(run), contents(tmp_path / "outside")
    size = draw.choice((2, 2, 2, 3))
    with suppress(StoreError):  # what it says is looked at below, of all ranks
        verify_run(run)
    assert contents(run) == before
    found: set[tuple[int, bool]] = set()
    words = ""
    try:
        found = goes_on(ranks, run, plan, size)
    except RankFailedError as error:
        words = str(error)
    if words:
        now = contents(run)
        assert {name: now.get(name) for name in before} == before
        assert "memfit.core.errors.StoreError: " in words or "DisagreementError: " in words, words
        assert "gave no answer" not in words
    else:
        is_gone = not (run / "set-1").exists() and not (run / "ranks.json").exists()
        assert found <= {(1, True), (2, True)} or (is_gone and found == {(0, True)})
    assert contents(tmp_path / "outside") == outside
