"""Commits of a run: what belongs to a step, when it is sealed, and how a run goes on.

In: a `RunStore`, the homes, the user's optimizer and registered objects. Out: after any crash, the run as it stood at the top of the loop.

[Note: when a step is sealed]
A training loop draws a batch, calls `job.step`, and then does what belongs to the step: a scheduler, an average, an evaluation, a log. A commit must
resume at the top of that loop, and memfit sees only its own calls. So two moments are noted. *Positions* (random numbers, loaders, samplers) are noted
whenever a method of the job returns: what is drawn after that is drawn again by the loop that resumes. *Everything else* (schedulers, param groups, averages)
is taken when the next `step` begins, for only then is it sure that the loop's body is through; then the step is sealed. `close` seals what is left, unless
an error is passing through, in which case nobody knows what was done; `commit` seals at once, for a program that knows. `evaluate` and `save` seal
nothing: they may stand between the step and its scheduler.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.allocator.kernel import REFUSALS, is_refusal, refusal_words
from memfit.core.errors import LimitBreachError, MemfitWarning, StoreError, UsageError
from memfit.core.layout import Scheme
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from memfit.core.units import format_bytes
from memfit.engine.housing import House
from memfit.engine.loss_scaling import LossScaler
from memfit.files.names import keep_names
from memfit.files.trainer import class_name
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.run_store import RunStore, masters_of, persistent_buffers
from memfit.homes.weights import BlockWeights
from memfit.huggingface.conversions import file_tensors
from memfit.job import run_state
from memfit.job.machine import Machine
from memfit.job.run_state import Registered, part, registered, taken
from memfit.job.saving import described
from memfit.store import Durability
from memfit.store.state import encode_state
from memfit.tensors.noise import RoundingNoise

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """What committing costs and promises.

    Attributes:
        directory: of the store.
        durability: see `memfit.fit`.
        step: the committed one; a crash now goes back to it.
        scheme: see `memfit.fit`.
        disk_bytes: what the store takes, claimed when it was made.
        resident_bytes: what a commit writes, at most, of blocks that rest in memory; what rests on disk is written by the step itself.
    """

    directory: Path
    durability: Durability
    step: int | None
    scheme: Scheme
    disk_bytes: int
    resident_bytes: int


def run_identity(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, str]:
    """What tells a run from others, beside its tensors."""
    return {
        "model": type(model).__qualname__,
        "optimizer": class_name(optimizer),
        "compute dtype": str(plan.compute_dtype),
        "masters": masters_of(plan),
        "state format": str(plan.state_format),
    }


class Commits:
    """The commits of one job.

    Memory: the small state, three times for a moment while it is encoded: tensors of registered objects count.

    Args:
        run: the directory.
        house: where the bytes are.
        machine: whose phase "commit" is measured.
        model: the user's.
        optimizer: the user's.
        blocks: of the model.
        states: by block index.
        plan: the job's.
        reason: why this plan.
        max_grad_norm: for the record.
        noise: of stochastic rounding; its seed is the run's.
        scaler: of losses, where the plan computes in fp16.
    """

    def __init__(
        self,
        run: RunStore,
        house: House,
        *,
        machine: Machine,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        plan: Plan,
        reason: str,
        max_grad_norm: float | None,
        noise: RoundingNoise,
        scaler: LossScaler | None,
    ) -> None:
        self.run = run
        self._house = house
        self._machine = machine
        self._model = model
        self._optimizer = optimizer
        self._states = states
        self._plan = plan
        self._reason = reason
        self._max_grad_norm = max_grad_norm
        self._noise = noise
        self._scaler = scaler
        self._names = {id(slot.parameter): slot.name for block in blocks for slot in block.slots}
        self._frozen = [slot.name for block in blocks for slot in block.slots if not slot.requires_grad]
        self._facts = _facts(model, blocks)
        self._registered: dict[str, Registered] = {}
        self._positions: dict[str, Any] = {}
        self._random: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}
        self._is_noted = False
        self.clip: float | None = None
        if run.is_resumed:
            self._waiting = dict(part(run.state, "registered", dict))

    def carry_on(self, before: Commits) -> None:
        """What was registered with the job stays registered. It has changed nothing since the commit that the run goes back to."""
        self._registered = dict(before._registered)
        self._positions = dict(before._positions)
        self._random = dict(before._random)
        self._is_noted = before._is_noted
        self._waiting = {}

    # --- the beginning ----------------------------------------------------------------------------------------------------------

    def has_weights(self, block: str) -> bool:
        """The last commit has the current weights of this block, not only its masters."""
        if self.run.scheme == "journal":
            return True  # all regions of a block are written together
        before = Plan.from_json(part(self.run.state, "plan", str))
        return before.block(block).weight_home is Tier.DISK

    def tell_changes(self) -> None:
        """Warns of parameters that train and did not at the run's last commit, or the other way round. Raises `StoreError` for a state that cannot be used."""
        told = run_state.changed_training(self.run.state.get("frozen"), self._frozen, set(self._names.values()))
        if told:
            step = part(self.run.state, "step", int)
            warnings.warn(f"since step {step} of the run in {self.run.directory}: {told}", MemfitWarning, stacklevel=2)

    def take_up(self) -> None:
        """Settings and counters of the optimizer, and what modules keep beside buffers, become the run's. Raises `StoreError` for a state that cannot be used."""
        optimizer = part(self.run.state, "optimizer", dict)
        run_state.give_numbers(optimizer.get("numbers"), self._states, self._optimizer)
        run_state.give_settings(run_state.settings_of(optimizer), self._optimizer)
        run_state.give_extra(self.run.state.get("extra state", {}), self._model)
        self._noise.seed = part(self.run.state, "noise seed", int)
        if self._scaler is not None:
            self._scaler.load_state_dict(part(self.run.state, "loss scale", dict))

    def begin(self) -> None:
        """At the end of `fit`: a new run's first version is committed; a resumed one has its random numbers where they were.

        Raises:
            StoreError: the disk, or a state that cannot be used.
        """
        if self.run.is_resumed:
            run_state.give_random(part(self.run.state, "random", dict))
            self.note()
            return
        self.note()
        with self._machine.phases("commit"):
            self._seal(is_first=True)

    # --- what belongs to a step -------------------------------------------------------------------------------------------------

    def register(self, name: str, thing: Any, *, is_new: bool) -> None:
        """See `Job.register`."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"register: a name is a text, not {name!r:.80}")
        if name in self._registered:
            raise UsageError(f"register: {name!r} is registered already; give each object a name of its own")
        if thing is self._optimizer:
            raise UsageError(f"register({name!r}, optimizer): the job's own optimizer belongs to every commit already")
        is_waiting = name in self._waiting
        if thing is None:
            if not is_waiting:
                raise UsageError(f"register({name!r}, None) gives up a state that the run does not have")
            del self._waiting[name]
            return
        kept = registered(name, thing)
        if is_waiting and not is_new:
            state = self._give(name, kept)
        elif self._is_late(is_new=is_new):
            raise UsageError(
                f"the run in {self.run.directory}, at step {self._house.step}, has no state of {name!r} (it has {sorted(self._waiting) or 'none'}): register it "
                "under the name that it had, or say register(..., is_new=True) if it joins the run now"
            )
        else:
            state = taken(kept)
        encode_state({name: state})  # what cannot be kept is told now, not when the first step is sealed
        self._waiting.pop(name, None)
        self._registered[name] = kept
        if kept.is_position:
            self._positions[name] = state
        if is_waiting and not is_new:
            # Building it, giving it its state and asking for it may draw: a loader makes its iterator then, which the run has behind it.
            run_state.give_random(part(self.run.state, "random", dict))

    def _is_late(self, *, is_new: bool) -> bool:
        """The object has a past in the run that is not in the store."""
        return self.run.is_resumed and self._house.step > 0 and not is_new

    def _give(self, name: str, kept: Registered) -> Any:
        """Gives an object the state that the run has; what it makes of it."""
        try:
            kept.give(self._waiting[name])
            state = taken(kept)  # a loader looks at what it was given when it is asked for it
        except Exception as error:  # whatever somebody's object makes of what somebody's file says
            raise StoreError(
                f"the state of {name!r} in {self.run.directory} does not fit the object that is registered ({type(error).__name__}: {str(error)[:400]}): "
                "build it as it was"
            ) from error
        # Schedulers set rates while they are built; the run's own come back.
        run_state.give_settings(run_state.settings_of(part(self.run.state, "optimizer", dict)), self._optimizer)
        return state

    def check_registered(self) -> None:
        """Refuses to go on while states of the run have no object. Raises `UsageError`."""
        if self._waiting:
            missing = sorted(self._waiting)
            raise UsageError(
                f"the run in {self.run.directory} also has the state of {', '.join(map(repr, missing[:5]))}: register each with job.register(name, object) before "
                "the first step, or give it up with job.register(name, None)"
            )

    def note(self) -> None:
        """Notes the positions, as a method of the job returns. See [Note: when a step is sealed]."""
        self._is_noted = False
        random = run_state.take_random()
        self._positions = {name: taken(kept) for name, kept in self._registered.items() if kept.is_position}
        self._random = random
        self._is_noted = True

    # --- sealing ----------------------------------------------------------------------------------------------------------------

    @property
    def has_unsealed(self) -> bool:
        """A step was made that is not committed yet."""
        return self.run.committed.has_unsealed

    def seal(self, *, force: bool = False) -> bool:
        """Commits the step that ended last, if the durability asks for it or it is forced to.

        Returns:
            True if a commit was made.

        Raises:
            StoreError: the disk. What the message does not say otherwise: the commit before is whole, the step is made, and sealing is tried again by
                the next call.
            UnsupportedError: a registered object's state cannot be kept. LimitBreachError: the limit.
        """
        if not self.has_unsealed or not (force or self.run.committed.is_due):
            return False
        with self._machine.phases("commit"):
            self._seal()
        return True

    def _seal(self, *, is_first: bool = False) -> None:
        if not self._is_noted:
            raise StoreError(
                f"step {self._house.step} cannot be committed: where its data and random numbers stood could not be noted when it ended (an error of that time says "
                "why). job.commit() notes and commits all as it stands now; job.close(commit=False) gives the step up"
            )
        try:
            flips = self._house.keep_residents()
            if is_first:
                self.run.committed.end_step(self._house.step)
            self.run.committed.seal(self._state, flips=flips, force=True)
        except REFUSALS as error:
            if not is_refusal(error):
                raise
            raise LimitBreachError(
                f"the limit was hit while step {self._house.step} was committed: {refusal_words(error)} The commit before is whole, and the step is made. "
                "Free what else the process holds; the next call commits it",
                phase="commit",
                where="commit",
                torn=False,
            ) from error
        self._house.residents_kept()

    def _state(self) -> dict[str, Any]:
        now = {name: taken(kept) for name, kept in self._registered.items() if not kept.is_position}
        return {
            "format": _FORMAT,
            "step": self._house.step,
            "plan": self._plan.to_json(),
            "reason": self._reason,
            "optimizer": {
                "class": class_name(self._optimizer),
                "groups": run_state.take_groups(self._optimizer, self._names),
                "numbers": run_state.take_numbers(self._states),
            },
            "frozen": self._frozen,
            "random": self._random,
            "noise seed": self._noise.seed,
            "loss scale": None if self._scaler is None else self._scaler.state_dict(),
            "clip": {"max_norm": self._max_grad_norm, "coefficient": self.clip},
            # What waits for its object is not lost by a commit that comes before.
            "registered": {**self._waiting, **now, **self._positions},
            "extra state": run_state.take_extra(self._model),
            "model": self._facts,
        }

    def report(self) -> CommitReport:
        """See `CommitReport`."""
        return CommitReport(
            directory=self.run.directory,
            durability=self.run.durability,
            step=self.run.committed.committed_step,
            scheme=self.run.scheme,
            disk_bytes=self.run.nbytes,
            resident_bytes=self._house.resident_bytes,
        )


def stored_plan(run: RunStore) -> Plan:
    """The plan of the run's last commit.

    Raises:
        StoreError: there is none. PlanError: it is damaged.
    """
    return Plan.from_json(part(run.state, "plan", str))


def stored_reason(run: RunStore) -> str:
    """Why that plan, as the run said."""
    return part(run.state, "reason", str)


def check_run(run: RunStore, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses a run of another model, by the names and shapes of its parameters, or of another optimizer. Raises `StoreError`."""
    found: dict[str, tuple[int, ...]] = {}
    for spec in run.committed.disk.regions.values():
        if spec.tag == "weight":
            found |= {place.name: place.shape for place in spec.tensors}
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    run_state.check_parameters(wanted, found, run.directory)
    if part(run.state, "format", int) != _FORMAT:
        raise StoreError(
            f"the run in {run.directory} has a state of format {run.state['format']!r:.40}; this memfit reads {_FORMAT}: use the version that wrote it"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    run_state.check_optimizer(part(run.state, "optimizer", dict), optimizer, names)


def _facts(model: nn.Module, blocks: Sequence[BlockWeights]) -> dict[str, Any]:
    """What an export needs to know of a model that is not there: names of its `state_dict`, ties, memory orders, its configuration."""
    kept = keep_names(model)
    known = {id(slot.parameter): slot.name for block in blocks for slot in block.slots}
    names = {name: known.get(id(tensor), name) for name, tensor in kept.tensors.items()}
    own = {*known.values(), *(name for name, _ in persistent_buffers(model))}
    config, generation = described(model, blocks)
    return {
        "class": type(model).__name__,
        # What is plain is left out: a model of the library's takes some hundred bytes.
        "names": {parameter: name for name, parameter in names.items() if name != parameter},
        "ignored": sorted(own - set(names.values())),
        "tied": dict(kept.tied),
        "files": _files(model, {name: tuple(tensor.shape) for name, tensor in kept.tensors.items()}),
        "orders": {
            slot.name: {"shape": list(slot.shape), "stride": list(slot.stride)}
            for block in blocks
            for slot in block.slots
            if not _is_row_major(slot.shape, slot.stride)
        },
        "config": config.to_json_string() if hasattr(config, "to_json_string") else None,
        "generation_config": None if generation is None else generation.to_json_string(),
    }


def _files(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """The tensors of the model's files; None where they are those of its `state_dict`."""
    found = file_tensors(model, shapes)
    is_plain = found.keys() == shapes.keys() and all(
        wanted.shape == shapes[name] and len(wanted.parts) == 1 and wanted.parts[0].name == name
        for name, wanted in found.items()
    )
    if is_plain:
        return None
    return {
        name: {"shape": list(wanted.shape), "parts": [[part.name, part.first, part.count] for part in wanted.parts]}
        for name, wanted in found.items()
    }


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return tuple(torch.empty(shape, device="meta").stride()) == stride


def describe(report: CommitReport) -> str:
    """The report in a sentence."""
    at = "nothing yet" if report.step is None else f"step {report.step}"
    return f"{report.directory}: {at} committed, {format_bytes(report.disk_bytes)} on disk, durability {report.durability!r}"


__all__ = ["CommitReport", "Commits", "check_run", "describe", "run_identity", "stored_plan", "stored_reason"]
