"""Saving a job, and loading what was saved into ordinary objects.

In: a job's parts. Out: a directory that transformers' `from_pretrained` and plain `load_file` read, with what continues the run beside it:

| file                                         | what                                                                     |
|----------------------------------------------|--------------------------------------------------------------------------|
| `model.safetensors`, or numbered shards and  | weights and persistent buffers under the names of `state_dict`, tied     |
| `model.safetensors.index.json`               | tensors once                                                             |
| `config.json`, `generation_config.json`      | of a transformers model                                                  |
| `optimizer.safetensors`                      | state tensors as `<parameter>.<key>`                                     |
| `memfit_state.json`                          | settings of the groups, scalar states, steps, random numbers, loss       |
|                                              | scale, `extra`                                                           |
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit import devices
from memfit.allocator.kernel import REFUSALS, is_refusal, refusal_words
from memfit.checkpoints.run_state import (
    check_numbers,
    check_settings,
    give_settings,
    groups_by_parameter,
    placed_numbers,
    take_random,
)
from memfit.core.documents import CONFIG_LIMIT_BYTES, parse_json, read_document
from memfit.core.errors import LimitBreachError, StoreError, UsageError
from memfit.core.units import parse_bytes
from memfit.deferred import find_origins
from memfit.engine.loss_scaling import LossScaler
from memfit.files.index import weight_file_names
from memfit.files.matching import Matched, match
from memfit.files.names import STALE, is_stale
from memfit.files.opening import open_weight_files
from memfit.files.reader import TensorFile
from memfit.files.replace import check_target, replacing
from memfit.files.saved_files import (
    INDEX_NAME,
    OPTIMIZER_NAME,
    SaveFile,
    optimizer_file,
    trained_slots,
    wait_for_updates,
    weight_files,
)
from memfit.files.trainer import (
    FILE_NAME,
    OLD_FILE_NAME,
    GroupState,
    TrainerState,
    check_room,
    class_name,
    is_of_trainer,
    read_state,
    state_file,
    write_text,
)
from memfit.files.writer import FilePieces, write_tensors
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.weights import BlockWeights
from memfit.huggingface.description import described
from memfit.optimizers import OptimizerDriver
from memfit.optimizers.interception import AwayStates
from memfit.optimizers.structure_checks import check_whole_state
from memfit.store import FileOperations
from memfit.store.file_operations import write_small_file
from memfit.store.os_errors import explain
from memfit.tensors.container import TensorEntry
from memfit.tensors.noise import RoundingNoise
from memfit.tensors.random_states import check_torch

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """A save that is whole and on stable storage.

    Attributes:
        directory: where.
        files: bytes by file name, of the safetensors files.
        seconds: it took.
    """

    directory: Path
    files: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What came with the weights.

    Attributes:
        steps: made before the save.
        extra: what `save` was given along.
        loss_scale: where losses were scaled (fp16): what `torch.amp.GradScaler.load_state_dict` takes. A job's own scale goes on by itself.
    """

    steps: int
    extra: Mapping[str, Any]
    loss_scale: Mapping[str, Any] | None = None


def save_job(
    directory: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: Sequence[BlockWeights],
    states: Mapping[int, BlockStates],
    steps: int,
    scaler: LossScaler | None = None,
    noise: RoundingNoise | None = None,
    random: Mapping[str, Any] | None = None,
    max_shard_bytes: int | str = DEFAULT_SHARD_BYTES,
    extra: Mapping[str, Any] | None = None,
    operations: FileOperations | None = None,
) -> SaveResult:
    """Writes a job between two steps, a piece at a time.

    An interrupted save leaves the directory as it was; see [Note: how a directory is replaced]. Files of others in it stay.

    Memory: two pieces of 8 MiB; one slice more for a weight away whose memory order is not row-major.

    Args:
        directory: to be; parents are made.
        model: the user's.
        optimizer: the user's.
        blocks: where the bytes of the parameters are.
        states: where those of the optimizer's states are, by block index.
        steps: made so far.
        scaler: of losses, in fp16.
        noise: of stochastic rounding.
        random: as `run_state.take_random` gives it; None: of now.
        max_shard_bytes: of one file of weights.
        extra: kept along: numbers, texts, lists, dictionaries, small tensors (a scheduler's `state_dict()`, for example).
        operations: the system calls; tests make them fail.

    Raises:
        StoreError: the disk, with the bytes needed and free where it is full. UsageError: a directory that cannot be replaced.
        UnsupportedError: something in the model or optimizer that has no safetensors or JSON form. LimitBreachError: no room for the pieces.
    """
    began = time.perf_counter()
    used = FileOperations() if operations is None else operations
    target = Path(directory).expanduser().resolve()
    wait_for_updates(blocks)
    weights, index = weight_files(model, blocks, parse_bytes(max_shard_bytes))
    files = [*weights, optimizer_file(blocks, states)]
    trainer = write_text(
        _trainer_state(optimizer, blocks, states, steps, scaler, noise, random or take_random(), extra or {})
    )
    texts: dict[str, str | bytes] = {FILE_NAME: trainer}
    if index is not None:
        texts[INDEX_NAME] = index
    check_other_model(target, _config_fields(model, blocks))
    write_save(target, files, texts, lambda new: _write_configs(model, new, blocks), operations=used)
    return SaveResult(
        directory=target,
        files={f.name: f.header.file_bytes for f in files},
        seconds=time.perf_counter() - began,
    )


def check_save(directory: str | Path, model: nn.Module | None = None) -> None:
    """Refuses a directory that nothing, or not this model, can be saved into.

    Args:
        directory: to be.
        model: to be saved; None: whatever it will be.

    Raises:
        UsageError: it cannot be replaced in one step, or holds another model. StoreError: it is no directory, or its disk is full.
    """
    target = Path(directory).expanduser().resolve()
    check_target(target, needed_bytes=0, operations=FileOperations())
    if model is not None:
        check_other_model(target, _config_fields(model, ()))


def check_other_model(target: Path, config: Mapping[str, Any] | None) -> None:
    """Refuses a directory in which another model lies, whose configuration would be replaced, or would stay and describe the wrong weights.

    Two configurations are of one model where its kind is the same, and every whole number that both name (widths, depths, vocabularies).

    Args:
        target: the directory to be.
        config: of the model to be saved, as its `config.json` would have it; None: it has none.

    Raises:
        UsageError: there is another model's.
    """
    file = target / "config.json"
    try:
        there = parse_json(read_document(file, limit_bytes=CONFIG_LIMIT_BYTES), is_strict=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError):
        there = None
    there = there if isinstance(there, dict) else {}
    kind = there.get("architectures") or there.get("model_type")
    if config is None and kind is None:
        return  # somebody's own file, which stays
    if config is None or kind is None or _tells_apart(there, config):
        raise UsageError(
            f"{file} is {f'of another model ({kind!s:.80})' if kind else 'not of a model of transformers'}, and would be replaced, or describe the wrong weights: "
            "name another directory, or remove that one first"
        )


def _tells_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tells whether two configurations are of two models. Numbers of tokens, switches and versions do not tell."""
    keys = one.keys() & other.keys()
    return any(
        one[key] != other[key]
        for key in keys
        if (key in ("model_type", "architectures") and one[key] and other[key])
        or (isinstance(one[key], int) and not isinstance(one[key], bool) and not key.endswith("_token_id"))
    )


def _config_fields(model: Any, blocks: Sequence[BlockWeights]) -> dict[str, Any] | None:
    config, _ = described(model, blocks)
    if config is None:
        return None
    text = getattr(config, "to_json_string", None)
    return json.loads(str(text())) if callable(text) else {}


def write_save(
    target: Path,
    files: Sequence[SaveFile],
    texts: Mapping[str, str | bytes],
    write_configs: Callable[[Path], None],
    *,
    operations: FileOperations,
) -> None:
    """Writes the files of a save, whole or not at all; see `save_job`.

    Args:
        target: the directory to be.
        files: safetensors.
        texts: further files, by name.
        write_configs: writes those of other libraries into a directory.
        operations: the system calls.
    """
    saved_bytes = sum(f.header.file_bytes for f in files)
    if FILE_NAME in texts:
        check_room(texts[FILE_NAME], saved_bytes)
    needed_bytes = saved_bytes + sum(len(text) for text in texts.values())
    check_target(target, needed_bytes=needed_bytes, operations=operations)
    with replacing(target, stale=is_stale, operations=operations) as new:
        write_configs(new)
        for name, text in texts.items():
            _write_text(new / name, text, operations)
        try:
            pieces = FilePieces(max(f.header.file_bytes for f in files))
            for file in files:
                write_tensors(new / file.name, file.header, file.sources, pieces, operations=operations)
        except REFUSALS as error:
            if not is_refusal(error):
                raise
            raise LimitBreachError(
                f"the limit was hit while saving to {target}: {refusal_words(error)} Nothing was changed, neither the job nor an older save. "
                "Free what else the process holds, or raise the limit",
                phase="save",
                where="save",
                torn=False,
            ) from error


def _trainer_state(
    optimizer: torch.optim.Optimizer,
    blocks: Sequence[BlockWeights],
    states: Mapping[int, BlockStates],
    steps: int,
    scaler: LossScaler | None,
    noise: RoundingNoise | None,
    random: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> TrainerState:
    names = {id(slot.parameter): slot.name for block in blocks for slot in block.slots}
    device = blocks[0].slots[0].parameter.device
    return TrainerState(
        steps=steps,
        optimizer_class=class_name(optimizer),
        groups=[
            GroupState(
                parameters=tuple(names[id(p)] for p in group["params"]),
                settings={key: value for key, value in group.items() if key != "params"},
            )
            for group in optimizer.param_groups
        ],
        numbers={slot.name: own.numbers[slot.name] for own, slot in trained_slots(blocks, states)},
        random_cpu=bytes(random["cpu"].tolist()),
        random_device=bytes(random["cuda"][devices.of(device).index(device)].tolist())
        if random["cuda"] and devices.is_accelerator(device)
        else None,
        noise_seed=None if noise is None else noise.seed,
        loss_scale=None if scaler is None else scaler.state_dict(),
        extra=extra,
    )


def _write_text(path: Path, text: str | bytes, operations: FileOperations) -> None:
    try:
        content = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise StoreError(
            f"{path.name} would have text that is none ({error}): what it was made from is damaged"
        ) from error
    try:
        write_small_file(path, content, operations=operations, durable=True)
    except OSError as error:
        raise explain(error, doing="write the file", path=path) from error


def _write_configs(model: Any, directory: Path, blocks: Sequence[BlockWeights]) -> None:
    """`config.json` and `generation_config.json` as `from_pretrained` wants them. The model's own config is not changed."""
    config, generation = described(model, blocks)
    if generation is not None:
        generation.save_pretrained(directory)
    if config is not None:
        config.save_pretrained(directory)


# --- loading --------------------------------------------------------------------------------------------------------------------


def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    restore_random: bool = True,
) -> LoadResult:
    """Puts a save into an ordinary model and optimizer, bit for bit: the next plain `optimizer.step()` is the one that would have come.

    All names, shapes, dtypes and settings are compared before the first byte is changed; sizes that files tell are checked against
    their lengths before anything is allocated.

    Memory: one piece of 8 MiB, and the optimizer's states, which come into being.

    Args:
        directory: that `job.save` wrote.
        model: of the same architecture, not under a job. Weights are written in place.
        optimizer: of the same class over the same parameters; None: weights alone.
        restore_random: torch's default generators go on where they were (with an optimizer only).

    Raises:
        StoreError: a file that is missing, damaged or not memfit's. UsageError: a model or optimizer that the save does not fit.
    """
    source = Path(directory).expanduser()
    if not source.is_dir():
        raise StoreError(f"there is no directory {source}; name one that job.save wrote")
    _refuse_live(model, optimizer)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(source / name)) for name in weight_file_names(source, STALE)]
        weights = _match_weights(files, model, source)
        trainer = read_state(source)
        scale = _scale_of(trainer, source)
        if optimizer is None:
            _copy(weights)
            return LoadResult(steps=trainer.steps, extra=trainer.extra, loss_scale=scale)
        file = stack.enter_context(TensorFile(source / OPTIMIZER_NAME))
        named = dict(model.named_parameters())
        states = _match_optimizer(file, trainer, named, optimizer, OptimizerDriver(optimizer, named), source)
        random = _random_of(trainer, source) if restore_random else None
        _copy(weights)
        _restore_optimizer(file, trainer, states, named, optimizer)
    _restore_random(random, device_of_parameters(named), source)
    return LoadResult(steps=trainer.steps, extra=trainer.extra, loss_scale=scale)


def _refuse_live(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if find_origins(model):
        raise UsageError(
            "the model was built by memfit.empty, so its weights have no memory yet: give the directory to memfit.fit(weights=...), then to job.load(...)"
        )
    is_live = optimizer is not None and isinstance(optimizer.state, AwayStates)
    if is_live or any(hasattr(type(p), "_memfit_present_class") for p in model.parameters()):
        raise UsageError("the model is under a running job: load before memfit.fit, or after job.close()")
    for name, p in model.named_parameters():
        if p.device.type == "meta":
            raise UsageError(
                f"{name!r} has no memory (meta device): give it some first, with model.to_empty(device=...)"
            )


def _match_weights(files: Sequence[TensorFile], model: nn.Module, source: Path) -> list[Matched]:
    matched, unused = match(files, model, source)
    if unused:
        raise UsageError(
            f"{source} holds {unused[0]!r:.200}, which the model does not have; build the model as it was when it was saved"
        )
    for found in matched.values():
        for dtype in found.dtypes - {found.tensor.dtype}:
            raise UsageError(
                f"the weight {found.name!r} was saved as {dtype}; here it is {found.tensor.dtype}: build the model as it was"
            )
    return list(matched.values())


def _compare(what: str, entry: TensorEntry, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if entry.shape != shape or entry.dtype != dtype:
        raise UsageError(
            f"{what} was saved with shape {list(entry.shape)} and {entry.dtype}; here it has shape {list(shape)} and {dtype}: build the model as it was"
        )


def _copy(weights: Sequence[Matched]) -> None:
    for found in weights:
        found.fill()


def _match_optimizer(
    file: TensorFile,
    trainer: TrainerState,
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    driver: OptimizerDriver,
    source: Path,
) -> dict[str, dict[str, TensorEntry]]:
    """By parameter, the entries of its state tensors; everything agrees with the live optimizer."""
    if class_name(optimizer) != trainer.optimizer_class:
        raise UsageError(
            f"{source} was saved with {trainer.optimizer_class}, this optimizer is {class_name(optimizer)}: make the same one, or load the weights alone"
        )
    names = {id(p): name for name, p in named.items()}
    here = [tuple(names.get(id(p), "?") for p in group["params"]) for group in optimizer.param_groups]
    if here != [group.parameters for group in trainer.groups]:
        raise UsageError(
            f"{source} was saved with {len(trainer.groups)} parameter groups of {[len(g.parameters) for g in trainer.groups]} parameters, this optimizer "
            f"has {len(here)} of {[len(g) for g in here]}, or they hold other parameters: build it as it was"
        )
    check_settings([group.settings for group in trainer.groups], optimizer)
    check_numbers(trainer.numbers)
    states: dict[str, dict[str, TensorEntry]] = {name: {} for name in trainer.numbers}
    for entry in file.header.entries:
        name, _, key = entry.name.rpartition(".")
        states.setdefault(name, {})[key] = entry
    for name, entries in states.items():
        if name not in driver.names:
            raise UsageError(
                f"{source} holds a state of {name!r:.200}, which this optimizer does not update; build it as it was"
            )
        layout = driver.state_layout(name)
        planned = {t.key: t for t in layout}
        numbers = trainer.numbers.get(name, {})
        shapes = {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries.items()}
        check_whole_state("load", name, layout, {**numbers, **shapes})
        for key, entry in entries.items():
            expected = planned[key].dtype or entry.dtype
            _compare(f"the state {key!r} of {name!r}", entry, expected, planned[key].shape)
    return states


def _restore_optimizer(
    file: TensorFile,
    trainer: TrainerState,
    states: Mapping[str, Mapping[str, TensorEntry]],
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    give_settings((group.settings for group in trainer.groups), optimizer)
    optimizer.state.clear()
    groups = groups_by_parameter(optimizer)
    for name, entries in states.items():
        parameter = named[name]
        optimizer.state[parameter] = _read_state(file, trainer, name, entries, parameter, groups[id(parameter)])


def _read_state(
    file: TensorFile,
    trainer: TrainerState,
    name: str,
    entries: Mapping[str, TensorEntry],
    parameter: nn.Parameter,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole state of a parameter, which may be away."""
    own: dict[str, Any] = {}
    for key, entry in entries.items():
        if entry.shape == tuple(parameter.shape):
            own[key] = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=entry.dtype, device=parameter.device
            )
        else:
            own[key] = torch.empty(entry.shape, dtype=entry.dtype, device=parameter.device)
        file.read_into(entry, own[key])
    return own | placed_numbers(trainer.numbers.get(name, {}), parameter, group)


def load_into_job(
    source: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    driver: OptimizerDriver,
    fill: Callable[[Mapping[int, Matched]], None],
    scatter: Callable[[str, dict[str, Any]], None],
    scaler: LossScaler | None,
    noise: RoundingNoise,
    restore_random: bool,
) -> LoadResult | None:
    """Puts weights of files where a job keeps them, and the states of a save beside them; see `Job.load`.

    Returns:
        What came with the weights; None where they are not a save's.

    Raises:
        StoreError: a file that is missing or damaged. UsageError: files that do not fit the model or the optimizer; nothing was changed.
    """
    path = Path(source).expanduser()
    with ExitStack() as stack:
        files = open_weight_files(path, stack)
        matched, unused = match(files, model, path)
        warn_of_unused(unused)
        states = None
        if state_file(path) is not None:
            named = dict(model.named_parameters())
            states = _OpenStates(
                path, stack, named, optimizer, driver, scaler=scaler, noise=noise, restore_random=restore_random
            )
        elif is_of_trainer(path / OLD_FILE_NAME):
            warnings.warn(
                f"{path} is a checkpoint of transformers' Trainer: its weights were loaded, its optimizer states and settings (optimizer.pt) were not",
                UserWarning,
                stacklevel=3,
            )
        fill({id(found.tensor): found for found in matched.values() if isinstance(found.tensor, nn.Parameter)})
        _copy([found for found in matched.values() if not isinstance(found.tensor, nn.Parameter)])
        return None if states is None else states.give(optimizer, scatter)


def warn_of_unused(names: Sequence[str]) -> None:
    """Tells of tensors in files that the model has no use for."""
    if names:
        some = ", ".join(f"{name!r:.200}" for name in names[:5]) + (", ..." if len(names) > 5 else "")
        warnings.warn(
            f"{len(names)} tensors of the weight files have no place in the model: {some}", UserWarning, stacklevel=4
        )


def load_states(
    directory: str | Path,
    *,
    optimizer: torch.optim.Optimizer,
    driver: OptimizerDriver,
    named: Mapping[str, nn.Parameter],
    scatter: Callable[[str, dict[str, Any]], None],
    scaler: LossScaler | None,
    noise: RoundingNoise,
    restore_random: bool,
) -> LoadResult:
    """Puts the optimizer's states of a save where a job keeps them, one parameter's at a time; see `Job.load_states`.

    Raises:
        StoreError: a file that is missing, damaged or not memfit's. UsageError: an optimizer that the save does not fit; nothing was changed.
    """
    with ExitStack() as stack:
        path = Path(directory).expanduser()
        found = _OpenStates(
            path, stack, named, optimizer, driver, scaler=scaler, noise=noise, restore_random=restore_random
        )
        return found.give(optimizer, scatter)


class _OpenStates:
    """The states of a save, compared with an optimizer that they fit, and not read yet."""

    def __init__(
        self,
        source: Path,
        stack: ExitStack,
        named: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        driver: OptimizerDriver,
        *,
        scaler: LossScaler | None,
        noise: RoundingNoise,
        restore_random: bool,
    ) -> None:
        self._source = source
        self._named = named
        self._scaler = scaler
        self._noise = noise
        self._trainer = read_state(source)
        self._file = stack.enter_context(TensorFile(source / OPTIMIZER_NAME))
        self._entries = _match_optimizer(self._file, self._trainer, named, optimizer, driver, source)
        self._random = _random_of(self._trainer, source) if restore_random else None
        self._scale = _scale_of(self._trainer, source)

    def give(self, optimizer: torch.optim.Optimizer, scatter: Callable[[str, dict[str, Any]], None]) -> LoadResult:
        """Reads them, one parameter's at a time."""
        trainer = self._trainer
        give_settings((group.settings for group in trainer.groups), optimizer)
        groups = groups_by_parameter(optimizer)
        for name, entries in self._entries.items():
            own = self._named[name]
            scatter(name, _read_state(self._file, trainer, name, entries, own, groups[id(own)]))
        _restore_random(self._random, device_of_parameters(self._named), self._source)
        if self._random is not None and trainer.noise_seed is not None:
            self._noise.seed = trainer.noise_seed
        if self._scaler is not None and self._scale is not None:
            self._scaler.load_state_dict(self._scale)
        return LoadResult(steps=trainer.steps, extra=trainer.extra, loss_scale=self._scale)


def _scale_of(trainer: TrainerState, source: Path) -> Mapping[str, Any] | None:
    """The state of the loss scale, tried on a scaler of its own."""
    if trainer.loss_scale is not None:
        try:
            LossScaler().load_state_dict(trainer.loss_scale)
        except UsageError as error:
            raise StoreError(f"{source / FILE_NAME} is damaged: {error}; take another save") from error
    return trainer.loss_scale


def _random_of(trainer: TrainerState, source: Path) -> list[torch.Tensor]:
    """The states of torch's generator on the CPU and, if it drew there, on an accelerator. See [Note: positions in generators]."""
    kept = [trainer.random_cpu, *(() if trainer.random_device is None else (trainer.random_device,))]
    found = [torch.tensor(list(state), dtype=torch.uint8) for state in kept]
    try:
        check_torch(found[0])
    except (TypeError, ValueError) as error:
        raise _no_random(source, error) from error
    return found


def device_of_parameters(named: Mapping[str, torch.nn.Parameter]) -> torch.device:
    """The device on which a model's parameters lie; the processor for a model without any."""
    return next((p.device for p in named.values()), torch.device("cpu"))


def _restore_random(random: Sequence[torch.Tensor] | None, device: torch.device, source: Path) -> None:
    """Puts the generators of the processor and of the model's device where they were (not of the thread's current device)."""
    if random is None:
        return
    try:
        torch.set_rng_state(random[0])
        if len(random) > 1 and devices.is_accelerator(device):
            devices.of(device).set_rng_state(device, random[1])
    except (RuntimeError, TypeError) as error:
        raise _no_random(source, error) from error


def _no_random(source: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{source / FILE_NAME} holds no state of torch's generators ({error}); load with restore_random=False"
    )
