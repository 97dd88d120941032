"""Saving a job (`loading` reads it back).

In: a job's parts. Out: a directory that transformers' `from_pretrained` and plain `load_file` read,
with what continues the run beside it:

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit import devices
from memfit.core.documents import CONFIG_LIMIT_BYTES, parse_json, read_document, user_path
from memfit.core.errors import StoreError, UsageError
from memfit.core.limits import parse_bytes
from memfit.devices.kernel import limit_breaches, refusal_words
from memfit.engine.conversions import described
from memfit.engine.loss_scaling import LossScaler
from memfit.files.names import (
    INDEX_NAME,
    SaveFile,
    is_stale,
    optimizer_file,
    trained_slots,
    wait_for_updates,
    weight_files,
)
from memfit.files.replace import check_target, replacing
from memfit.files.trainer import (
    FILE_NAME,
    GroupState,
    TrainerState,
    check_room,
    class_name,
    write_text,
)
from memfit.files.writer import FilePieces, read_tensors, write_tensors
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.weights import BlockWeights
from memfit.runs.run_state import take_random
from memfit.store import FileOperations
from memfit.store.files import explain, write_small_file
from memfit.tensors.noise import RoundingNoise

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
    has_states: bool = True,
    operations: FileOperations | None = None,
    writes: bool = True,
    write_beside: Callable[[Path], object] | None = None,
) -> SaveResult:
    """Writes a job between two steps, a piece at a time.

    An interrupted save leaves the directory as it was; see [Note: how a directory is replaced].
    Files of others in it stay.

    Memory: two pieces of 2 MiB; one slice more for a weight away whose memory order is not
    row-major.

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
        extra: kept along: numbers, texts, lists, dictionaries, small tensors (a scheduler's
            `state_dict()`, for example).
        has_states: False writes weights and configuration alone.
        operations: the system calls; tests make them fail.
        writes: False on a rank that others gather from, while one of them writes.
        write_beside: writes further files into the new directory, before it takes its place.

    Raises:
        StoreError: the disk, with the bytes needed and free where it is full. UsageError: a
            directory that cannot be replaced.
        UnsupportedError: something in the model or optimizer that has no safetensors or JSON form.
            LimitBreachError: no room for the pieces.
    """
    began = time.perf_counter()
    used = FileOperations() if operations is None else operations
    target = user_path(directory).resolve()
    wait_for_updates(blocks)
    for own in states.values():
        own.learn_numbers()
    weights, index = weight_files(model, blocks, parse_bytes(max_shard_bytes))
    files, texts = [*weights], dict[str, str | bytes]()
    if has_states:
        files.append(optimizer_file(blocks, states))
        texts[FILE_NAME] = write_text(
            _trainer_state(optimizer, blocks, states, steps, scaler, noise, random or take_random(), extra or {})
        )
    if not writes:
        pieces = FilePieces(max(f.header.file_bytes for f in files))
        for file in files:
            read_tensors(file.header, file.sources, pieces)
        return SaveResult(directory=target, files={}, seconds=time.perf_counter() - began)
    if index is not None:
        texts[INDEX_NAME] = index
    check_other_model(target, _config_fields(model, blocks))

    def write_others(new: Path) -> None:
        _write_configs(model, new, blocks)
        if write_beside is not None:
            write_beside(new)

    write_save(target, files, texts, write_others, operations=used)
    return SaveResult(
        directory=target,
        files={f.name: f.header.file_bytes for f in files},
        seconds=time.perf_counter() - began,
    )


def check_form(form: str, extra: Mapping[str, Any] | None) -> None:
    """Raises `UsageError` if there is no such form of a save, or none that keeps `extra`."""
    if form not in ("memfit", "trainer", "weights"):
        raise UsageError(f'job.save(form=...) is "memfit", "trainer" or "weights", not {form!r:.80}')
    if form != "memfit" and extra is not None:
        raise UsageError(f'job.save(form="{form}") has no place for extra=: save it in a file of your own')


def check_save(directory: str | Path, model: nn.Module | None = None) -> None:
    """Refuses a directory that nothing, or not this model, can be saved into.

    Args:
        directory: to be.
        model: to be saved; None: whatever it will be.

    Raises:
        UsageError: it cannot be replaced in one step, or holds another model. StoreError: it is no
            directory, or its disk is full.
    """
    target = user_path(directory).resolve()
    check_target(target, needed_bytes=0, operations=FileOperations())
    if model is not None:
        check_other_model(target, _config_fields(model, ()))


def check_other_model(target: Path, config: Mapping[str, Any] | None) -> None:
    """Refuses a directory in which another model lies, whose configuration would be replaced, or
    would stay and describe the wrong weights.

    Two configurations are of one model where its kind is the same, and every whole number that both
    name (widths, depths, vocabularies).

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
    """Tells whether two configurations are of two models.

    Numbers of tokens, switches and versions do not tell.
    """
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
        pieces = FilePieces(max(f.header.file_bytes for f in files))
        for file in files:
            write_tensors(new / file.name, file.header, file.sources, pieces, operations=operations)


def breaches_of_save(directory: str | Path) -> AbstractContextManager[None]:
    """Context in which a save hits the limit in words that name its directory."""
    return limit_breaches(
        "save",
        lambda error: (
            f"the limit was hit while saving to {directory}: {refusal_words(error)} Nothing was changed, neither the job nor an older save. "
            "Free what else the process holds, or raise the limit"
        ),
    )


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
        raise StoreError(f"{path.name} would have invalid text ({error}): what it was made from is damaged") from error
    try:
        write_small_file(path, content, operations=operations, durable=True)
    except OSError as error:
        raise explain(error, doing="write the file", path=path) from error


def _write_configs(model: Any, directory: Path, blocks: Sequence[BlockWeights]) -> None:
    """`config.json` and `generation_config.json` as `from_pretrained` wants them.

    The model's own config is not changed.
    """
    config, generation = described(model, blocks)
    if generation is not None:
        generation.save_pretrained(directory)
    if config is not None:
        config.save_pretrained(directory)
