"""States that say what a job never wrote, with their checksums made right: each is refused by name, before anything is changed or read out of place."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faults import small_run
from faults.crash_disk import RecordedDisk
from faults.crash_story import filled
from faults.journal_story import EVEN, RECORD_BYTES
from memfit.core.errors import MemfitError, StoreError, UnsupportedError, UsageError
from memfit.core.limits import MIB
from memfit.core.plan import Plan
from memfit.engine.loss_scaling import LossScaler
from memfit.files.reader import CheckpointFile
from memfit.files.trainer import FILE_NAME
from memfit.job.loading import load
from memfit.runs import run_state
from memfit.runs.exporting import export_run
from memfit.store import verify
from memfit.store.journal import RECORD, Journal
from memfit.store.state import decode_state, encode_state
from memfit.tensors.random_streams import check_numpy, check_python, check_torch
from property.test_hostile_files import little_memory, resealed_state

LEFT, POSITION = slice(8, 12), slice(16, 24)
"""Of the state of torch's generator."""


# --- random generators: a process that believes these reads outside of its memory


def torch_state(left: int, position: int) -> torch.Tensor:
    state = torch.Generator().manual_seed(1).get_state()
    for place, value in ((LEFT, left), (POSITION, position)):
        size = place.stop - place.start
        state[place] = torch.tensor(list(value.to_bytes(size, "little", signed=True)), dtype=torch.uint8)
    return state


def test_states_that_generators_have_are_taken() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = np.random.RandomState(1)
    for count in (0, 1, 622, 1, 1, 1, 700):
        torch.rand(count, generator=generator)
        numbers.random_sample(count)
        check_torch(generator.get_state())
        check_numpy(numbers.get_state(legacy=True))
    for kind in (np.random.MT19937, np.random.Philox, np.random.PCG64, np.random.PCG64DXSM, np.random.SFC64):
        bits = kind(3)
        np.random.Generator(bits).random(5)
        check_numpy(bits.state)
    python = random.Random(3)
    python.gauss()
    check_python(python.getstate())


@pytest.mark.parametrize(("left", "position"), [(624, 624), (1, 625), (0, 0), (625, 0), (-1, 0), (2, 1 << 40), (1, -1)])
def test_torchs_generator_must_stand_in_its_table(left: int, position: int) -> None:
    with pytest.raises(ValueError, match="stands at word"):
        check_torch(torch_state(left, position))


@pytest.mark.parametrize("position", [625, -1, 2_000_000_000, -(1 << 31), 1.0, True, None])
def test_numpys_generators_must_stand_in_their_table(position: Any) -> None:
    name, words, _, *rest = np.random.RandomState(1).get_state(legacy=True)
    with pytest.raises(ValueError, match="stands at word"):
        check_numpy((name, words, position, *rest))
    twister = np.random.MT19937(1).state
    with pytest.raises(ValueError, match="stands at word"):
        check_numpy(twister | {"state": twister["state"] | {"pos": position}})
    with pytest.raises(ValueError, match="stands at word"):
        check_numpy(np.random.Philox(1).state | {"buffer_pos": position})


def test_registered_generators_refuse_such_states_and_stay_as_they_are() -> None:
    generator = np.random.Generator(np.random.Philox(1))
    kept = run_state.registered("noise", generator)
    state = kept.take()
    with pytest.raises(ValueError, match="stands at word"):
        kept.give(state | {"buffer_pos": -2_000_000_000})
    assert generator.bit_generator.state["buffer_pos"] == state["buffer_pos"]
    kept.give(state)


# --- whole runs


def lying(made: Path, place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The run, with a state that was changed and sealed again."""
    run = place / "run"
    shutil.copytree(made / "run", run)
    manifest = (run / "manifest.json").read_bytes()
    entry = json.loads(manifest)["body"]["state"]
    file = run / f"state-{entry['file']}.bin"
    state = decode_state(file.read_bytes()[: entry["nbytes"]])
    change(state)
    content = encode_state(state)
    file.write_bytes(content)
    (run / "manifest.json").write_bytes(resealed_state(manifest, content))
    return run


def order(**found: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["model"]["orders"].update({"layers.1.up.weight": found})


def file(*parts: Any, shape: Any = (64, 32)) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["model"].update(files={"x": {"shape": list(shape), "parts": list(parts)}})


def setting(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["optimizer"]["groups"][0]["settings"].update(values)


UP = "layers.1.up.weight"
EXPORTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "strides outside of the tensor": order(shape=[64, 32], stride=[1 << 40, 1]),
    "strides that overlap": order(shape=[64, 32], stride=[0, 1]),
    "negative strides": order(shape=[64, 32], stride=[-32, 1]),
    "strides of another rank": order(shape=[64, 32], stride=[1]),
    "an order of nothing": order(),
    "a range behind the tensor": file([UP, 1, 2048]),
    "a range before it": file([UP, -1, 2048]),
    "ranges that are too short": file([UP, 0, 2047]),
    "ranges that are too long": file([UP, 0, 2048], [UP, 0, 1]),
    "a range of another tensor": file(["nothing", 0, 2048]),
    "a shape of text": file([UP, 0, 2048], shape="ab"),
    "two tensors of one name": lambda state: state["model"]["names"].update({UP: "layers.1.up.bias"}),
    "a tensor named like a word of the format": lambda state: state["model"]["names"].update({UP: "__metadata__"}),
    "a name that is no text": lambda state: state["model"]["names"].update({UP: "\ud800"}),
    "a range of a text": lambda state: state["model"].update(files={"x": "ab"}),
    "a tie to a number": lambda state: state["model"]["tied"].update({"head": 3}),
    "a generator outside of its table": lambda state: state["random"].update(cpu=torch_state(624, 624)),
    "no step": lambda state: state.pop("step"),
    "groups that are none": lambda state: state["optimizer"].update(groups=[[]]),
    "settings without names": lambda state: state["optimizer"]["groups"][0].update(settings={3: 4}),
    "counters beyond 64 bits": lambda state: state["optimizer"]["numbers"].update({UP: {"step": 1 << 63}}),
    "counters of text": lambda state: state["optimizer"]["numbers"].update({UP: {"step": "x"}}),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_run_that_lies_is_not_copied_out(kind: str, made: Path, tmp_path: Path) -> None:
    run = lying(made, tmp_path, EXPORTS[kind])
    with pytest.raises((StoreError, UnsupportedError)) as caught:
        export_run(run, tmp_path / "out")
    assert 20 < len(str(caught.value)) < 1000
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [0, 1, RECORD_BYTES - 7, 1 << 32, (1 << 63) - 8, (1 << 64) - 1])
def test_a_journal_whose_record_has_another_length_is_not_read(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(journal: Journal, record: Any) -> None:
        content = (length.to_bytes(8, "little") + encode_state(record)).ljust(RECORD_BYTES, b"\0")
        journal._disk.region(RECORD).write(0, RECORD_BYTES, filled(content)).wait()

    monkeypatch.setattr(Journal, "_write", write)
    with EVEN.begin(RecordedDisk(tmp_path / "run")) as store:
        journal = EVEN.journal(store)
        journal.begin_step()
        for block in EVEN.blocks:
            content = EVEN.gradient(1, block)
            store.region(f"{block}/gradient").write(0, len(content), filled(content), slot="current").wait()
        journal.begin(1, EVEN.record(1, 0))
        with pytest.raises(StoreError, match="the record of a step .* damaged|the state of the step cannot be read"):
            journal.read()
    assert "damaged" in str(verify(tmp_path / "run").state_problem) or length == 1


RESUMED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a rate of text": (setting(lr="x"), r"param_groups\[0\] has 'lr' = 'x'"),
    "a first rate in a dictionary": (setting(initial_lr={}), r"param_groups\[0\] has 'initial_lr' = {}"),
    "no rate": (setting(lr=None), r"param_groups\[0\] has 'lr' = None"),
    "rates in a list": (setting(lr=[1, 2]), r"param_groups\[0\] has 'lr'"),
    "one beta": (setting(betas=(0.9,)), r"param_groups\[0\] has 'betas'"),
    "betas of text": (setting(betas=("x", "y")), r"param_groups\[0\] has 'betas'"),
    "parameters among the settings": (setting(params=[]), r"param_groups\[0\] has 'params'"),
    "a rate beyond 64 bits": (setting(lr=-(1 << 63) - 1), r"param_groups\[0\] has 'lr'"),
    "counters beyond 64 bits": (lambda state: state["optimizer"]["numbers"].update({UP: {"step": 1 << 63}}), "no number"),
    "counters in a list": (lambda state: state["optimizer"]["numbers"].update({UP: {"step": [1]}}), "no number"),
    "a generator outside of its table": (lambda state: state["random"].update(cpu=torch_state(624, 624)), "stands at"),
    "NumPy's outside of its table": (lambda state: state["random"].update(numpy=("MT19937", *state["random"]["numpy"][1:2], 2_000_000_000, 0, 0.0)), "stands at"),
    "a registered one": (lambda state: state["registered"].update(data=torch_state(1, 625)), "'data' .* does not fit"),
    "an average of nothing": (lambda state: state["registered"].update(average={}), "'average' .* does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_that_lies_is_not_taken_up(kind: str, made: Path, tmp_path: Path) -> None:
    change, told = RESUMED[kind]
    run = lying(made, tmp_path, change)
    with pytest.raises(MemfitError, match=told):
        small_run.train("tied-and-frozen", Plan(), run, total=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["optimizer"]["groups"][0]["settings"].update(lr="x"), "'lr' = 'x'"),
        (lambda d: d["optimizer"]["numbers"][UP].update(step="x"), "no number"),
        (lambda d: d["random"].update(cpu="AAAA" * 1685), "wrong size|stands at|no state"),
        (lambda d: d.update(extra={"x": {"tensor": {"dtype": "float32", "shape": [10**300] * 50, "values": [], "device": "cpu"}}}), "not a tensor"),
        (lambda d: d.update(extra={"x": json.loads("[" * 400 + "]" * 400)}), "nested"),
    ],
    ids=["a rate", "a counter", "a generator", "a shape without end", "depth"],
)  # fmt: skip
def test_a_save_that_lies_changes_nothing(change: Callable[[Any], None], told: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "saved", tmp_path / "saved")
    path = tmp_path / "saved" / FILE_NAME
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    model = small_run.build("tied-and-frozen")
    optimizer = small_run.adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MemfitError, match=told):
        load(tmp_path / "saved", model, optimizer)
    if told != "wrong size|stands at|no state":  # its length is torch's to judge
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not optimizer.state


@pytest.mark.parametrize(
    "changed",
    [{"scale": "x"}, {"scale": float("nan")}, {"scale": -1.0}, {"scale": float("inf")}, {"growth_factor": 0.5}, {"backoff_factor": 2},
     {"growth_interval": 1.5}, {"_growth_tracker": -1}],
)  # fmt: skip
def test_a_loss_scale_that_is_none_is_refused(changed: dict[str, Any]) -> None:
    scaler = LossScaler()
    before = scaler.state_dict()
    with pytest.raises(UsageError, match=f"{next(iter(changed))} is"):
        scaler.load_state_dict(before | changed)


# --- what torch.save wrote, and what it did not


def rewritten(path: Path, pickled: bytes, *, compression: int = zipfile.ZIP_STORED) -> None:
    """A file of torch.save with another pickle in it."""
    torch.save({"weight": torch.zeros(3, 4)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") and pickled else content)


CALLS = {
    "a command": b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
    "an evaluation": b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
    "room of any size": b"cbuiltins\nbytearray\n(\x8a\x05\x00\x00\x00\x00\x10tR.",
    "nothing": b".",
    "no end": b"(" * 1000,
    "half a text": b"X\xff\xff\xff\x7fx",
    "very many lists": b"(" + b"]" * 400_000 + b"l.",
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_checkpoint_that_asks_for_more_than_tensors_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    rewritten(path, b"\x80\x02" + CALLS[kind])
    with little_memory(path.stat().st_size + 64 * MIB), pytest.raises(MemfitError) as caught:
        CheckpointFile(path)
    assert "model.pt" in str(caught.value)
    assert 20 < len(str(caught.value)) < 1000


def test_checkpoints_of_other_tensors_or_with_packed_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.eye(3).to_sparse()}, path)
    with pytest.raises(MemfitError, match="model.pt"):
        CheckpointFile(path)
    rewritten(path, b"", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(StoreError, match="compressed"):
        CheckpointFile(path)
    rewritten(path, b"")
    with CheckpointFile(path) as file:
        assert [entry.name for entry in file.header.entries] == ["weight"]
    content = path.read_bytes()
    for cut in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(StoreError, match="model.pt"):
            CheckpointFile(path)
