"""Tools for a run's directory without its program: look at it, copy it out, remove it.

In: a directory that `memfit.fit(store=...)` made. Out: a report; safetensors files as `Job.save`
writes them; nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from memfit.core.documents import read_document, user_path
from memfit.core.errors import MemfitError, StoreError, UnsupportedError, UsageError
from memfit.core.limits import parse_bytes
from memfit.core.storage_formats import StateFormat, moment_of, records_of
from memfit.engine.conversions import FileTensor, Range
from memfit.engine.loss_scaling import LossScaler
from memfit.files.names import INDEX_NAME, SaveFile, join, pack_states, pack_weights
from memfit.files.replace import check_target, replacing
from memfit.files.tensor_bytes import HomeSource, ResidentSource, TensorSource
from memfit.files.trainer import FILE_NAME, GroupState, TrainerState, write_text
from memfit.homes import ByteHome
from memfit.homes.optimizer_states import DecodedState, StateSlot
from memfit.homes.state_codecs import codec_of
from memfit.runs.committed_run import CommittedRun, opened_to_be_read, verify_rank_stores
from memfit.runs.rank_record import find_record, remove_rank_stores
from memfit.runs.run_state import check_numbers, numbers_in_record, part
from memfit.runs.run_store import BUFFERS, FORMAT
from memfit.runs.saving import DEFAULT_SHARD_BYTES, SaveResult, breaches_of_save, check_other_model, write_save
from memfit.store import DiskStore, FileOperations, StoreReport, TensorPlace, verify
from memfit.store.directory import is_there
from memfit.store.files import explain
from memfit.store.journal import under_way
from memfit.store.manifest import MANIFEST_NAME, STATE_LIMIT_BYTES
from memfit.store.state import decode_state, encode_state
from memfit.tensors.container import is_shape
from memfit.tensors.random_streams import check_torch

REGISTERED_NAME = "registered.safetensors"
ExportForm = Literal["memfit", "dcp"]
_CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}


def verify_run(directory: str | Path, *, on_progress: Callable[[int, int], None] | None = None) -> StoreReport:
    """Reads all that a run, of one process or of several ranks, has committed and compares it with
    its checksums; see `store.verify`.
    """
    where = user_path(directory)
    record = find_record(where)
    if record is None or not record.number:
        return verify(where, on_progress=on_progress)
    return verify_rank_stores(where, record, on_progress=on_progress)


def remove_run(directory: str | Path) -> bool:
    """Removes the files of a run, of one process or of several ranks, and the directory if nothing
    else is in it.

    Returns:
        False if there was none.

    Raises:
        StoreInUseError: a live job owns it. StoreError: it is no run, or cannot be removed.
    """
    where = user_path(directory)
    record = find_record(where)
    if record is not None:
        remove_rank_stores(where, record)
    if is_there(where / MANIFEST_NAME):
        DiskStore.open(where, identity={"memfit run": FORMAT}, durable=False).close(delete=True)
    elif record is None:
        return False
    if where.is_dir() and not any(where.iterdir()):
        where.rmdir()
    return True


def export_run(
    directory: str | Path,
    target: str | Path,
    *,
    max_shard_bytes: int | str = DEFAULT_SHARD_BYTES,
    form: ExportForm = "memfit",
) -> SaveResult:
    """Copies the last commit of a run, of one process or of several ranks, out of its store, as
    `Job.save` would have written it.

    Weights are for `from_pretrained` and plain `load_file`; `memfit.job.loading.load` puts weights,
    optimizer states and settings into plain objects. The states of registered objects go along in
    `registered.safetensors`, as `read_registered` gives them back. States of the optimizer that
    rest in fewer bits come out decoded to fp32, as `optimizer.state_dict()` has them.

    A step that a journal has decided, with all its updates made, is what is copied, with the
    settings and random numbers that it had; registered objects are those of the step before, for
    what the loop did after the step is not in the store.

    In the form "dcp" it is a checkpoint of torch.distributed.checkpoint: the state dict
    `{"model": ..., "optim": ...}` as `torch.distributed.checkpoint.state_dict.get_state_dict` has
    it, and the number of steps as "steps". Random numbers and registered objects have no place
    there.

    Memory: two pieces of 2 MiB; in the form "dcp" a chunk of 16 MiB, or a row, and what torch takes
    to serialize it. All that is committed is compared with its checksums first. Nothing is changed
    in the store, and no right to is needed.

    Args:
        directory: of the run; no job may have it open.
        target: replaced in one step, when all is written; for "dcp" it must be new or empty.
        max_shard_bytes: of one file of weights.
        form: what reads it: "memfit" (and whoever reads safetensors) or "dcp".

    Raises:
        UsageError: there is no such form, or the target has files already.
        StoreInUseError: a live job owns it. StoreError: there is no run, it is damaged, or the
            disk. UnsupportedError: masters rest in bits that only a job joins; or the journal has a
            step under way, which only the run's program can finish.
    """
    began = time.perf_counter()
    used = FileOperations()
    if form not in ("memfit", "dcp"):
        raise UsageError(f'a run is exported in the form "memfit" or "dcp", not {form!r:.80}')
    resolved = user_path(target).resolve()
    with opened_to_be_read(user_path(directory)) as run:
        _check_plain(run.identity, directory)
        try:
            if form == "dcp":
                sizes = _write_dcp(run, resolved, parse_bytes(max_shard_bytes), used)
            else:
                sizes = _write_files(run, resolved, parse_bytes(max_shard_bytes), used)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, MemfitError):
                raise
            raise _damaged(
                f"it does not describe a model and its optimizer ({type(error).__name__}: {error!s:.200})"
            ) from error
    return SaveResult(directory=resolved, files=sizes, seconds=time.perf_counter() - began)


def _write_files(run: CommittedRun, target: Path, max_shard_bytes: int, used: FileOperations) -> dict[str, int]:
    files, texts = _files_of(run, max_shard_bytes)
    described = texts.get(_CONFIGS["config"])
    check_other_model(target, None if described is None else json.loads(described))
    with breaches_of_save(target):
        write_save(target, files, texts, lambda _: None, operations=used)
    return {f.name: f.header.file_bytes for f in files}


def _write_dcp(run: CommittedRun, target: Path, max_file_bytes: int, used: FileOperations) -> dict[str, int]:
    # Not in the default path: it loads torch.distributed.
    from memfit.files.dcp import write_checkpoint

    if target.is_dir() and any(target.iterdir()):
        raise UsageError(f"{target} has files already, and a checkpoint has a directory of its own: name another")
    state = _with_journal(run)
    facts = part(state, "model", dict)
    weights, states = _sources(run, facts)
    names, groups = part(facts, "names", dict), part(state, "optimizer", dict)["groups"]
    numbers = part(part(state, "optimizer", dict), "numbers", dict)
    check_numbers(numbers)
    model: dict[str, Any] = {names.get(name, name): _stand_in(source) for name, source in weights.items()}
    optimizer: dict[str, dict[str, Any]] = {name: dict(values) for name, values in numbers.items()}
    sources = {f"model.{names.get(name, name)}": source for name, source in weights.items()}
    for name, source in states.items():
        parameter, _, key = name.rpartition(".")
        if parameter in optimizer:
            optimizer[parameter][key] = _stand_in(source)
            sources[f"optim.state.{name}"] = source
    whole = {
        "model": model | (part(state, "extra state", dict) if "extra state" in state else {}),
        "optim": {
            "state": optimizer,
            "param_groups": [{**group["settings"], "params": list(group["parameters"])} for group in groups],
        },
        "steps": part(state, "step", int),
    }
    aliases = {f"model.{other}": f"model.{name}" for other, name in part(facts, "tied", dict).items()}
    check_target(target, needed_bytes=sum(_nbytes(source) for source in sources.values()), operations=used)
    with replacing(target, stale=lambda _: False, operations=used) as new:
        return write_checkpoint(new, whole, sources, aliases, max_file_bytes=max_file_bytes)


def _stand_in(source: TensorSource) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")


def _nbytes(source: TensorSource) -> int:
    return math.prod(source.shape) * source.dtype.itemsize


def _files_of(run: CommittedRun, max_shard_bytes: int) -> tuple[list[SaveFile], dict[str, str | bytes]]:
    """The files that tensors go to, and the other files' texts.

    What is not as a job wrote it raises, by chance, whatever such values raise.
    """
    state = _with_journal(run)
    facts = part(state, "model", dict)
    weights, states = _sources(run, facts)
    extra = part(state, "extra state", dict) if "extra state" in state else {}
    chosen = _kept(weights | {name: ResidentSource(value) for name, value in extra.items()}, facts)
    numbers = part(part(state, "optimizer", dict), "numbers", dict)
    check_numbers(numbers)
    trained = {name: source for name, source in states.items() if name.rpartition(".")[0] in numbers}
    tied = part(facts, "tied", dict)
    if not all(isinstance(text, str) for pair in tied.items() for text in pair):
        raise _damaged("its 'tied' are not names")
    parameters = sum(math.prod(source.shape) for source in chosen.values())
    files, index = pack_weights(chosen, tied, max_shard_bytes, parameters=parameters)
    texts: dict[str, str | bytes] = {FILE_NAME: write_text(_trainer_state(state))}
    if state.get("registered"):
        texts[REGISTERED_NAME] = encode_state(part(state, "registered", dict))
    if index is not None:
        texts[INDEX_NAME] = index
    for key, name in _CONFIGS.items():
        if isinstance(facts.get(key), str):
            texts[name] = facts[key]
    return [*files, pack_states(trained)], texts


def _damaged(why: str) -> StoreError:
    return StoreError(f"the state of the step is damaged, or of another version of memfit: {why}")


def _with_journal(run: CommittedRun) -> Mapping[str, Any]:
    """The state that belongs to the tensors of the run."""
    state = run.state
    found = None if run.disk is None else under_way(run.disk)
    if run.disk is None or found is None:
        return state
    if found.pending:
        raise UnsupportedError(
            f"step {found.step} of the run in {run.disk.directory} is under way: {len(found.pending)} regions, such as {found.pending[0]!r}, are still to be "
            "updated from the journal, which takes the optimizer: let the program go on with the run once (memfit.fit makes the updates), then export"
        )
    optimizer = part(state, "optimizer", dict)
    groups = [
        {**group, "settings": settings}
        for group, settings in zip(optimizer["groups"], part(found.record, "settings", list), strict=True)
    ]
    return {
        **state,
        "step": found.step,
        "optimizer": {**optimizer, "groups": groups, "numbers": numbers_in_record(found.record)},
        "random": part(found.record, "random", dict),
        "loss scale": _scale(state, is_decided=True),
        "extra state": found.record.get("extra state", {}),
    }


def _scale(state: Mapping[str, Any], *, is_decided: bool = False) -> dict[str, Any] | None:
    """The loss scale, compared; or, where a step was decided, which is one without an overflow,
    that after it.
    """
    if state.get("loss scale") is None:
        return None
    scaler = LossScaler()
    try:
        scaler.load_state_dict(part(state, "loss scale", dict))
    except UsageError as error:
        raise _damaged(str(error)) from error
    return (scaler.after_a_step() if is_decided else scaler).state_dict()


def _check_plain(identity: Mapping[str, str], directory: str | Path) -> None:
    """Refuses a run with bytes that only a job can read: they would be copied out as something
    else.
    """
    if identity.get("masters") not in ("whole", "none"):
        raise UnsupportedError(
            f"the run in {directory} keeps masters {identity.get('masters')!r:.80}, which only a job decodes: go on with it and call job.save(...)"
        )
    if identity.get("state format") not in (*StateFormat,):
        raise UnsupportedError(
            f"the run in {directory} keeps optimizer states in {identity.get('state format')!r:.80}, which this memfit does not know: use the version that "
            "wrote it"
        )


def read_registered(directory: str | Path) -> dict[str, Any]:
    """The states of the objects that were registered with a run, from what `export_run` wrote: for
    their `load_state_dict`.

    Raises:
        StoreError: there is no such file, or it is damaged.
    """
    path = user_path(directory) / REGISTERED_NAME
    try:
        content = read_document(path, limit_bytes=STATE_LIMIT_BYTES)
    except OSError as error:
        raise explain(error, doing="read the registered states", path=path) from error
    except ValueError as error:
        raise StoreError(f"{path} holds no registered states: {error}; export the run again") from error
    return decode_state(content)


def _sources(run: CommittedRun, facts: Mapping[str, Any]) -> tuple[dict[str, TensorSource], dict[str, TensorSource]]:
    """Where weights (their masters, where they have one) and buffers are, and where states are, by
    name.
    """
    orders = part(facts, "orders", dict)
    weights: dict[str, TensorSource] = {}
    states: dict[str, TensorSource] = {}
    resting: dict[str, tuple[ByteHome, TensorPlace]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    # Masters come after weights, and take their place.
    for tensor in sorted(run.tensors, key=lambda tensor: tensor.tag == "master"):
        home, place = tensor.home, tensor.place
        if tensor.tag == "state":
            resting[place.name] = home, place
        else:
            shapes[place.name] = place.shape
            weights[place.name] = _source(home, place, None if tensor.region == BUFFERS else orders.get(place.name))
    chosen = StateFormat(run.identity["state format"])
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for parameter, _, key in (name.rpartition(".") for name in resting):
        keys[parameter].append(key)
    for name, (home, place) in resting.items():
        parameter, _, key = name.rpartition(".")
        found = _decoded(home, place, chosen, key, keys[parameter], shapes.get(parameter, ()))
        states[name] = _source(*(found or (home, place)), orders.get(parameter))
    return weights, states


def _decoded(
    home: ByteHome, place: TensorPlace, chosen: StateFormat, key: str, keys: Collection[str], shape: tuple[int, ...]
) -> tuple[DecodedState, TensorPlace] | None:
    """A state that rests encoded, as a home of fp32 values and its place there; None for one that
    rests as it is.

    Args:
        home: of the block's states.
        place: of this one.
        chosen: the run's format of states.
        key: the state's name.
        keys: names of all states of its parameter.
        shape: of the parameter, in memory order.
    """
    numel = math.prod(shape)
    moment = None if chosen is StateFormat.GIVEN else moment_of(key, keys, numel, "float32")
    if moment is None or place.dtype != "uint8":
        return None
    if place.nbytes != records_of(chosen).size(numel):
        raise StoreError(
            f"{place.name!r} of the store has {place.nbytes} bytes, and {numel} elements in {chosen} take {records_of(chosen).size(numel)}: it is damaged; take "
            "another commit"
        )
    slot = StateSlot(
        key=key,
        dtype=torch.float32,
        shape=shape,
        numel=numel,
        offset_bytes=place.offset,
        is_like_weight=True,
        codec=codec_of(chosen, moment),
    )
    return DecodedState(home, slot), TensorPlace(name=place.name, dtype="float32", shape=shape, offset=0)


def _kept(weights: Mapping[str, TensorSource], facts: Mapping[str, Any]) -> dict[str, TensorSource]:
    """The tensors of the files, by name."""
    names, ignored = part(facts, "names", dict), set(facts.get("ignored") or ())
    called = {parameter: names.get(parameter, parameter) for parameter in weights if parameter not in ignored}
    if len(set(called.values())) != len(called) or not all(isinstance(name, str) for name in called.values()):
        raise _damaged("its 'names' are invalid, or two tensors have one")
    kept = {name: weights[parameter] for parameter, name in called.items()}
    if facts.get("files") is None:
        return kept
    return {
        name: join(name, _file_tensor(name, found, kept), kept.__getitem__)
        for name, found in part(facts, "files", dict).items()
    }


def _file_tensor(name: Any, found: Any, kept: Mapping[str, TensorSource]) -> FileTensor:
    """A tensor of the files: ranges of those of the model, inside of these, that together are as
    long as its shape says.
    """
    shape = part(found, "shape", list)
    parts = [Range(name=own, first=first, count=count) for own, first, count in part(found, "parts", list)]
    is_inside = all(
        type(one.first) is int
        and type(one.count) is int
        and min(one.first, one.count) >= 0
        and one.first + one.count <= math.prod(kept[one.name].shape)
        for one in parts
    )
    if (
        not isinstance(name, str)
        or not is_shape(shape)
        or not is_inside
        or sum(one.count for one in parts) != math.prod(shape)
    ):
        raise _damaged(f"its 'files' have a {name!r:.200} that cannot be put together")
    return FileTensor(shape=tuple(shape), parts=tuple(parts))


def _source(home: ByteHome, place: TensorPlace, order: Any) -> HomeSource:
    """A tensor of a region; `order` is its parameter's shape and strides, where those are not
    row-major.
    """
    shape: tuple[int, ...] = place.shape
    stride: tuple[int, ...] | None = None
    if order is not None and sorted(order["shape"]) == sorted(place.shape):
        shape, stride = tuple(order["shape"]), tuple(order["stride"])
        if not is_shape(list(shape)) or not _is_dense(shape, stride):
            raise _damaged(f"its 'orders' give {place.name!r:.200} the strides {str(stride)[:200]}")
    return HomeSource(home, place.offset, dtype=place.torch_dtype, shape=shape, stride=stride)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Tells whether the elements of a tensor fill a range without gaps: row-major, with dimensions
    in some order.
    """
    if len(shape) != len(stride) or not all(type(one) is int for one in stride):
        return False
    step = 1
    for one, size in sorted((one, size) for one, size in zip(stride, shape, strict=True) if size != 1):
        if one != step:
            return False
        step *= size
    return True


def _trainer_state(state: Mapping[str, Any]) -> TrainerState:
    optimizer, random = part(state, "optimizer", dict), part(state, "random", dict)
    cuda = random.get("cuda") or []
    groups = [
        GroupState(parameters=tuple(part(group, "parameters", list)), settings=part(group, "settings", dict))
        for group in part(optimizer, "groups", list)
    ]
    if not all(isinstance(name, str) for group in groups for name in (*group.parameters, *group.settings)):
        raise _damaged("its groups of the optimizer have parameters or settings without names")
    check_torch(random["cpu"])
    return TrainerState(
        steps=part(state, "step", int),
        optimizer_class=part(optimizer, "class", str),
        groups=groups,
        numbers=optimizer["numbers"],
        random_cpu=bytes(random["cpu"].tolist()),
        random_device=bytes(cuda[0].tolist()) if cuda else None,
        noise_seed=part(state, "noise seed", int),
        loss_scale=_scale(state),
        extra={},
    )
