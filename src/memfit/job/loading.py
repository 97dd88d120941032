"""Loading what a job saved: into ordinary objects, or into another job.

In: a directory that `Job.save` wrote, or weight files of others. Out: weights, optimizer states and
settings, compared before the first byte is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit import devices
from memfit.core.documents import user_path
from memfit.core.errors import StoreError, UsageError
from memfit.engine.loss_scaling import LossScaler
from memfit.files.matching import Matched, match
from memfit.files.names import (
    OPTIMIZER_NAME,
    STALE,
)
from memfit.files.origin import find_origins
from memfit.files.reader import TensorFile, open_weight_files, weight_file_names
from memfit.files.trainer import (
    FILE_NAME,
    OLD_FILE_NAME,
    TrainerState,
    class_name,
    is_of_trainer,
    read_state,
    state_file,
)
from memfit.files.weight_sources import warn_of_unused
from memfit.job.assembly import Assembly
from memfit.optimizers import OptimizerDriver
from memfit.optimizers.interception import AwayStates
from memfit.optimizers.standing import check_whole_state
from memfit.runs.run_state import (
    check_numbers,
    check_settings,
    give_settings,
    groups_by_parameter,
    placed_numbers,
)
from memfit.tensors.container import TensorEntry
from memfit.tensors.random_streams import check_torch
from memfit.tensors.with_frozen import saved_model


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Steps and values that came with the weights.

    Attributes:
        steps: made before the save.
        extra: what `save` was given along.
        loss_scale: where losses were scaled (fp16): what `torch.amp.GradScaler.load_state_dict`
            takes. A job's own scale goes on by itself.
    """

    steps: int
    extra: Mapping[str, Any]
    loss_scale: Mapping[str, Any] | None = None


def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    restore_random: bool = True,
) -> LoadResult:
    """Puts a save into an ordinary model and optimizer, bit for bit: the next plain
    `optimizer.step()` is the one that would have come.

    All names, shapes, dtypes and settings are compared before the first byte is changed; sizes that
    files tell are checked against their lengths before anything is allocated.

    Memory: one piece of 2 MiB, and the optimizer's states, which come into being.

    Args:
        directory: that `job.save` wrote.
        model: of the same architecture, not under a job. Weights are written in place.
        optimizer: of the same class over the same parameters; None: weights alone.
        restore_random: torch's default generators go on where they were (with an optimizer only).

    Raises:
        StoreError: a file that is missing, damaged or not memfit's. UsageError: a model or
            optimizer that the save does not fit.
    """
    source = user_path(directory)
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
                f"{source} holds a state of {name!r:.200}, which its own groups do not have: its files are of several saves; take all of one"
            )
        layout = driver.state_layout(name)
        planned = {t.key: t for t in layout}
        numbers = trainer.numbers.get(name, {})
        shapes = {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries.items()}
        check_whole_state("load", name, layout, {**numbers, **shapes})
        for key, entry in entries.items():
            expected = planned[key].dtype or entry.dtype
            if entry.dtype != expected:
                raise UsageError(
                    f"the state {key!r} of {name!r} was saved as {entry.dtype}; this optimizer keeps it as {expected}: use the optimizer as it was"
                )
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


def load_into_job(source: str | Path, job: Assembly, *, restore_random: bool, weights_only: bool = False) -> LoadResult:
    """Puts weights of files where a job keeps them, and the states of a save beside them.

    See `Job.load`.

    Returns:
        The steps and the `extra` of a save; else the steps made so far, and nothing.

    Raises:
        StoreError: a file that is missing or damaged.
        UsageError: files that do not fit the model or the optimizer; nothing was changed.
    """
    path = user_path(source)
    with job.loading(), ExitStack() as stack:
        files = open_weight_files(path, stack)
        matched, unused = match(files, saved_model(job.model), path)
        warn_of_unused(unused)
        states = None
        if state_file(path) is not None and not weights_only:
            states = _OpenStates(path, stack, job, restore_random=restore_random)
        elif not weights_only and is_of_trainer(path / OLD_FILE_NAME):
            warnings.warn(
                f"{path} is a checkpoint of transformers' Trainer: its weights were loaded, its optimizer states and "
                "settings (optimizer.pt) were not",
                UserWarning,
                stacklevel=3,
            )
        job.fill({id(found.tensor): found for found in matched.values() if isinstance(found.tensor, nn.Parameter)})
        _copy([found for found in matched.values() if not isinstance(found.tensor, nn.Parameter)])
        found = LoadResult(steps=job.steps, extra={}) if states is None else states.give()
    if states is not None:
        job.count_on(found.steps)
    return found


def load_states(directory: str | Path, job: Assembly, *, restore_random: bool) -> LoadResult:
    """Puts the optimizer's states of a save where a job keeps them, one parameter's at a time.

    See `Job.load_states`.

    Raises:
        StoreError: a file that is missing, damaged or not memfit's.
        UsageError: an optimizer that the save does not fit; nothing was changed.
    """
    with job.loading(), ExitStack() as stack:
        found = _OpenStates(user_path(directory), stack, job, restore_random=restore_random).give()
    job.count_on(found.steps)
    return found


class _OpenStates:
    """The states of a save, compared with the optimizer of a job, and not read yet."""

    def __init__(self, source: Path, stack: ExitStack, job: Assembly, *, restore_random: bool) -> None:
        self._source = source
        self._job = job
        self._named = dict(job.model.named_parameters())
        self._trainer = read_state(source)
        self._file = stack.enter_context(TensorFile(source / OPTIMIZER_NAME))
        optimizer, driver = job.setup.optimizer, job.driver
        self._entries = _match_optimizer(self._file, self._trainer, self._named, optimizer, driver, source)
        self._random = _random_of(self._trainer, source) if restore_random else None
        self._scale = _scale_of(self._trainer, source)

    def give(self) -> LoadResult:
        """Reads them, one parameter's at a time."""
        trainer, job = self._trainer, self._job
        optimizer = job.setup.optimizer
        give_settings((group.settings for group in trainer.groups), optimizer)
        groups = groups_by_parameter(optimizer)
        for name, entries in self._entries.items():
            own = self._named[name]
            job.scatter_state(name, _read_state(self._file, trainer, name, entries, own, groups[id(own)]))
        _restore_random(self._random, device_of_parameters(self._named), self._source)
        if self._random is not None and trainer.noise_seed is not None:
            job.noise.seed = trainer.noise_seed
        if job.scaler is not None and self._scale is not None:
            job.scaler.load_state_dict(self._scale)
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
    """The states of torch's generator on the CPU and, if it drew there, on an accelerator.

    See [Note: positions in generators].
    """
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
    """Puts the generators of the processor and of the model's device where they were (not of the
    thread's current device).
    """
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
