"""Checkpointer: decides when a job is committed, what belongs to a commit, and what a run goes on
with.

In: a `RunStore`, the homes, the user's optimizer and registered objects. Out: after any crash, the
run as it stood at the top of the loop. When a step is committed is told in [Note: when a step is
committed] in `runs.checkpointer`; how a store holds it in `runs.schemes`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.core.errors import LOG, MemfitWarning, StoreError, UsageError
from memfit.core.layout import Scheme
from memfit.core.plan import Plan
from memfit.core.shape import masters_of
from memfit.devices.kernel import limit_breaches, refusal_words
from memfit.engine.housing import House
from memfit.engine.loss_scaling import LossScaler
from memfit.files.trainer import class_name
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.weights import BlockWeights
from memfit.runs import run_state
from memfit.runs.committed_run import model_facts
from memfit.runs.run_state import Registered, part, registered, taken
from memfit.runs.run_store import RunStore, persistent_buffers
from memfit.runs.schemes import CommitScheme, StoreCopies
from memfit.store import Durability
from memfit.store.state import encode_state
from memfit.tensors.noise import RoundingNoise

# Objects of the user's whose state belongs to each commit, and positions in data and random
# numbers.
#
# In: schedulers, averages, loaders, generators. Out: their states, each taken at its moment; and
# back, where a run goes on.
#
# [Note: when a step is committed]
# A training loop draws a batch, calls `job.step`, and then does what belongs to the step: a
# scheduler, an average, an evaluation, a log. A commit must resume at the top of that loop, and
# memfit sees only its own calls. So there are two moments. *Positions* (random numbers, loaders,
# samplers) are noted whenever a method of the job returns: what is drawn after that is drawn again
# by the loop that resumes. *Everything else* (schedulers, param groups, averages) is taken when the
# next `step` begins: at that point the loop body has finished, so the step is committed. `close`
# commits what is left, unless an error is passing through, in which case nobody knows what was
# done; `commit` commits at once, for a program that knows. `evaluate` and `save` commit nothing:
# they may stand between the step and its scheduler.


class Registry:
    """Registered objects of a run, and where its data and random numbers stood.

    Args:
        run: whose last commit may have states that wait for their objects.
        optimizer: the user's; it belongs to every commit without being registered.
    """

    def __init__(self, run: RunStore, optimizer: torch.optim.Optimizer) -> None:
        self._run = run
        self._optimizer = optimizer
        self._registered: dict[str, Registered] = {}
        self._positions: dict[str, Any] = {}
        self._waiting: dict[str, Any] = dict(part(run.state, "registered", dict)) if run.is_resumed else {}
        self._random: dict[str, Any] | None = None

    def carry_on(self, before: Registry) -> None:
        """Takes over what was registered with the plan before.

        It has not changed since the commit that the run goes back to.
        """
        self._registered = dict(before._registered)
        self._positions = dict(before._positions)
        self._random = before._random
        self._waiting = {}

    def register(self, name: str, thing: Any, *, is_new: bool, step: int) -> None:
        """Adds an object, and gives it the state that the run has of it; see `Job.register`."""
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
        elif self._run.is_resumed and step > 0 and not is_new:
            raise UsageError(
                f"the run in {self._run.directory}, at step {step}, has no state of {name!r} (it has "
                f"{sorted(self._waiting) or 'none'}): register it under the name that it had, or say "
                "register(..., is_new=True) if it joins the run now"
            )
        else:
            state = taken(kept)
        encode_state({name: state})  # an unsupported state is refused now, not at the first commit
        self._waiting.pop(name, None)
        self._registered[name] = kept
        if kept.is_position:
            self._positions[name] = state
        if is_waiting and not is_new:
            # Building it, giving it its state and asking for it may draw: a loader makes its
            # iterator then, which the run has behind it.
            run_state.give_random(part(self._run.state, "random", dict))

    def _give(self, name: str, kept: Registered) -> Any:
        """Gives an object the state that the run has. Returns the state that it has then."""
        try:
            kept.give(self._waiting[name])
            state = taken(kept)  # a loader looks at what it was given when it is asked for it
        except Exception as error:  # whatever somebody's object makes of what somebody's file says
            raise StoreError(
                f"the state of {name!r} in {self._run.directory} does not fit the object that is registered "
                f"({type(error).__name__}: {str(error)[:400]}): build it as it was"
            ) from error
        # Schedulers set rates while they are built; the run's own come back.
        settings = run_state.settings_of(part(self._run.state, "optimizer", dict))
        run_state.give_settings(settings, self._optimizer)
        return state

    def check_complete(self) -> None:
        """Refuses to go on while states of the run have no object. Raises `UsageError`."""
        if self._waiting:
            missing = ", ".join(map(repr, sorted(self._waiting)[:5]))
            raise UsageError(
                f"the run in {self._run.directory} also has the state of {missing}: register each with "
                "job.register(name, object) before the first step, or give it up with job.register(name, None)"
            )

    def note_positions(self) -> None:
        """Notes positions, as a method of the job returns. See [Note: when a step is committed]."""
        # if asking a loader fails, the step has no positions and is not committed with old ones
        self._random = None
        random = run_state.take_random()
        self._positions = {name: taken(kept) for name, kept in self._registered.items() if kept.is_position}
        self._random = random

    @property
    def has_positions(self) -> bool:
        """True if the last `note_positions` succeeded."""
        return self._random is not None

    def state(self) -> dict[str, Any]:
        """Takes the states that belong to a commit: of registered objects, and random numbers."""
        now = {name: taken(kept) for name, kept in self._registered.items() if not kept.is_position}
        # States that wait for their objects must outlive a commit that comes before these are
        # registered.
        return {"registered": {**self._waiting, **now, **self._positions}, "random": self._random}


_FORMAT = 1
_NO_STORE = "this job has no store, where it could be kept: memfit.fit(store=directory) makes a run that commits its steps and can be resumed"

Forget = Callable[[Iterable[nn.Parameter]], None]


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """Cost and promise of committing.

    Attributes:
        directory: of the store.
        durability: see `memfit.fit`.
        step: the committed one; a crash now goes back to it.
        scheme: see `memfit.fit`.
        disk_bytes: what the store takes, claimed when it was made.
        resident_bytes: what a commit writes, at most, of blocks that rest in memory; what rests on
            disk is written by the step itself.
    """

    directory: Path
    durability: Durability
    step: int | None
    scheme: Scheme
    disk_bytes: int
    resident_bytes: int


class Checkpointer:
    """Decides when a job is committed, and what belongs to a commit.

    This one commits nothing; see `RunCheckpointer`.
    """

    def note_changed(self, blocks: Iterable[int]) -> None:
        """Marks what rests of these blocks, by index, as newer than the last commit."""

    def note_changed_between(self, blocks: Iterable[int]) -> None:
        """Does as `note_changed` for changes between two steps, which belong to the one that ended
        last.
        """

    def check_changeable(self, block: BlockWeights, *, is_deciding: bool) -> None:
        """Refuses a change of a block between two steps that could not be committed.

        Raises `UnsupportedError`.
        """

    def begin(self) -> None:
        """Begins the run, at the end of `fit`: commits its first version, or restores the random
        numbers of a resumed one.

        Raises:
            StoreError: the disk, or a state that cannot be used.
        """

    def register(self, name: str, thing: Any, *, is_new: bool) -> None:
        """Adds the state of an object to every commit; see `Job.register`."""
        raise UsageError(f"job.register({name!r}, ...): {_NO_STORE}")

    def check_registered(self) -> None:
        """Refuses to go on while states of the run have no object. Raises `UsageError`."""

    def note_positions(self) -> None:
        """Notes where data and random numbers stand, as a method of the job returns."""

    def note_clip(self, coefficient: float) -> None:
        """Notes what the last step's gradients were multiplied with, for the record."""

    def commit_if_due(self, *, is_asked: bool = False) -> None:
        """Commits the step that ended last, if the durability asks for it.

        Args:
            is_asked: somebody asks for it too.

        Raises:
            StoreError: the disk. Unless the message says otherwise the commit before is whole, the
                step is made, and committing is tried again by the next call.
            UnsupportedError: a registered object's state cannot be kept. LimitBreachError: the
                limit.
        """

    def commit(self) -> None:
        """Commits the step that ended last, whatever the durability. Raises as `commit_if_due`."""

    def commit_here(self) -> None:
        """Commits all as it stands now; see `Job.commit`."""
        raise UsageError(f"job.commit(): {_NO_STORE}")

    def report(self) -> CommitReport | None:
        """Returns what committing costs and promises; None where nothing is committed."""
        return None

    def way_back(self) -> str:
        """Says how a torn job is taken back to whole weights."""
        return "load a saved state into the model and fit again. Under a plan with is_atomic=True, what rests on disk cannot tear"


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The parts of a job that belong to its commits.

    Attributes:
        model: the user's.
        optimizer: the user's.
        plan: the job's.
        reason: why this plan, without what each process tells anew.
        compiled: names of the calls that are compiled.
        max_grad_norm: for the record.
        blocks: of the model.
        states: by block index.
        noise: of stochastic rounding; its seed is the run's.
        scaler: of losses, where the plan computes in fp16.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    reason: str
    compiled: tuple[str, ...]
    max_grad_norm: float | None
    blocks: Sequence[BlockWeights]
    states: Mapping[int, BlockStates]
    noise: RoundingNoise
    scaler: LossScaler | None


def prepare_store(scheme: CommitScheme, of: Committed) -> None:
    """Makes the store of a run with all its room, or compares it with what is wanted, before homes
    are made in it.
    """
    identity = {
        "model": type(of.model).__qualname__,
        "optimizer": class_name(of.optimizer),
        "compute dtype": str(of.plan.compute_dtype),
        "masters": masters_of(of.plan),
        "state format": str(of.plan.state_format),
    }
    scheme.prepare(of.blocks, of.states, persistent_buffers(of.model), identity)


class RunCheckpointer(Checkpointer):
    """Commits a job to the directory of a run.

    Memory: the small state, three times for a moment while it is encoded: tensors of registered
    objects count.

    Args:
        run: the directory; its store is open.
        scheme: how the store is laid out.
        house: where the bytes are.
        of: what belongs to the commits.
        phase: measures the phase of this name.
        before: the checkpointer of the plan that this one takes the place of.
    """

    def __init__(
        self,
        run: RunStore,
        scheme: CommitScheme,
        house: House,
        of: Committed,
        *,
        phase: Callable[[str], AbstractContextManager[object]],
        before: RunCheckpointer | None = None,
    ) -> None:
        self.run = run
        self.copies = StoreCopies(run, house, scheme, of.model)
        self._scheme = scheme
        self._house = house
        self._of = of
        self._phase = phase
        self._names = {id(slot.parameter): slot.name for block in of.blocks for slot in block.slots}
        self._frozen = [slot.name for block in of.blocks for slot in block.slots if not slot.requires_grad]
        self._facts = model_facts(of.model, of.blocks)
        self.registry = Registry(run, of.optimizer)
        self._clip: float | None = None
        if before is not None:
            self.registry.carry_on(before.registry)

    # --- going on from a commit ------------------------------------------------------------------

    def restore_homes(self, forget: Forget | None) -> None:
        """Fills homes and buffers with the values of the last commit; see `House.take_over`.

        Warns of parameters that train and did not at that commit, or the other way round.

        Raises:
            StoreError: the disk, or a state that cannot be used.
        """
        told = run_state.changed_training(self.run.state.get("frozen"), self._frozen, set(self._names.values()))
        step = part(self.run.state, "step", int)
        if told:
            warnings.warn(f"since step {step} of the run in {self.run.directory}: {told}", MemfitWarning, stacklevel=2)
        self._house.take_over(
            self.copies.load, forget, has_weights=self._scheme.has_weights, step=self.run.resumed.step
        )
        self.copies.load_buffers()

    def restore_settings(self) -> None:
        """Restores settings and counters of the optimizer, and extra state of modules.

        Raises `StoreError`.
        """
        of, optimizer = self._of, part(self.run.state, "optimizer", dict)
        run_state.give_numbers(self.run.resumed.numbers, of.states, of.optimizer)
        run_state.give_settings(run_state.settings_of(optimizer), of.optimizer)
        run_state.give_extra(self.run.state.get("extra state", {}), of.model)
        of.noise.seed = part(self.run.state, "noise seed", int)
        if of.scaler is not None:
            of.scaler.load_state_dict(part(self.run.state, "loss scale", dict))
        self._house.keep_changes()  # weights that were rounded from masters again

    def begin(self) -> None:
        """See `Checkpointer.begin`."""
        if self.run.is_resumed:
            run_state.give_random(part(self.run.state, "random", dict))
        self.registry.note_positions()
        self.begin_again()

    def begin_again(self) -> None:
        """Commits the first version of a store that is new; see `begin`, and `RunStore.is_new`.

        Behind an exchange of plans what is registered stands where the last commit has it.
        """
        if self.run.is_new:
            # nothing is in the store yet
            self.note_changed(block.index for block in self._of.blocks)
            with self._phase("commit"):
                self._commit(is_first=True)
            self.run.commits.note_first()

    # --- what belongs to a step ------------------------------------------------------------------

    def note_changed(self, blocks: Iterable[int]) -> None:
        """See `Checkpointer.note_changed`."""
        self.copies.note_changed(blocks)

    def note_changed_between(self, blocks: Iterable[int]) -> None:
        """See `Checkpointer.note_changed_between`."""
        if self.copies.note_changed(blocks):
            self.run.committed.advance(())  # the step that ended last is to be committed again

    def check_changeable(self, block: BlockWeights, *, is_deciding: bool) -> None:
        """See `Checkpointer.check_changeable`."""
        self._scheme.check_changeable(block, trains=block.index in self._of.states, is_deciding=is_deciding)

    def register(self, name: str, thing: Any, *, is_new: bool) -> None:
        """See `Checkpointer.register`."""
        self.registry.register(name, thing, is_new=is_new, step=self._house.step)

    def check_registered(self) -> None:
        """See `Checkpointer.check_registered`."""
        self.registry.check_complete()

    def note_positions(self) -> None:
        """See `Checkpointer.note_positions`."""
        self.registry.note_positions()

    def note_clip(self, coefficient: float) -> None:
        """See `Checkpointer.note_clip`."""
        self._clip = coefficient

    # --- committing ------------------------------------------------------------------------------

    def commit_if_due(self, *, is_asked: bool = False) -> None:
        """See `Checkpointer.commit_if_due`."""
        committed = self.run.committed
        if self.run.commits.any(committed.is_due or (is_asked and committed.has_uncommitted)):
            with self._phase("commit"):
                self._commit()

    def commit(self) -> None:
        """See `Checkpointer.commit`."""
        if self.run.commits.any(self.run.committed.has_uncommitted):
            with self._phase("commit"):
                self._commit()
            LOG.debug("committed step %d in %s", self._house.step, self.run.directory)

    def commit_here(self) -> None:
        """See `Checkpointer.commit_here`."""
        self.registry.note_positions()
        self.commit()

    def _commit(self, *, is_first: bool = False) -> None:
        with self.run.commits.committing():
            self._commit_alone(is_first=is_first)
        self.copies.note_committed()

    def _commit_alone(self, *, is_first: bool) -> None:
        if not self.registry.has_positions:
            raise StoreError(
                f"step {self._house.step} cannot be committed: where its data and random numbers stood could not be noted "
                "when it ended (an error of that time says why). job.commit() notes and commits all as it stands now; "
                "job.close(commit=False) gives the step up"
            )
        with limit_breaches(
            "commit",
            lambda error: (
                f"the limit was hit while step {self._house.step} was committed: {refusal_words(error)} The commit before "
                "is whole, and the step is made. Free what else the process holds; the next call commits it"
            ),
        ):
            # Copies are whole in the spare slots before the manifest names them: a crash in between
            # finds the commit before.
            flips = self.copies.write()
            if is_first:
                self.run.committed.end_step(self._house.step)
            self.run.commits.commit(self._state, flips)

    def _state(self) -> dict[str, Any]:
        of = self._of
        return {
            "format": _FORMAT,
            "step": self._house.step,
            "plan": of.plan.to_json(),
            "reason": of.reason,
            "compiled": [*of.compiled],
            "optimizer": {
                "class": class_name(of.optimizer),
                "groups": run_state.take_groups(of.optimizer, self._names),
                "numbers": run_state.take_numbers(of.states),
            },
            "frozen": self._frozen,
            "noise seed": of.noise.seed,
            "loss scale": None if of.scaler is None else of.scaler.state_dict(),
            "clip": {"max_norm": of.max_grad_norm, "coefficient": self._clip},
            "extra state": run_state.take_extra(of.model),
            "model": self._facts,
            **self.registry.state(),
            **self.run.commits.state(),
        }

    def report(self) -> CommitReport:
        """See `Checkpointer.report`."""
        return CommitReport(
            directory=self.run.directory,
            durability=self.run.durability,
            step=self.run.committed.committed_step,
            scheme=self.run.scheme,
            disk_bytes=self.run.nbytes,
            resident_bytes=self.copies.nbytes,
        )

    def way_back(self) -> str:
        """See `Checkpointer.way_back`."""
        report = self.report()
        return (
            f"step {report.step} is whole in {report.directory}: close this job with restore=False and fit again with "
            "the same store"
        )


def stored_plan(run: RunStore) -> Plan:
    """Returns the plan of the run's last commit.

    Raises:
        StoreError: there is none. PlanError: it is damaged.
    """
    return Plan.from_json(part(run.state, "plan", str))


def stored_reason(run: RunStore) -> str:
    """Returns the reason of that plan, as the run said it."""
    return part(run.state, "reason", str)


def stored_compiled(run: RunStore) -> tuple[str, ...]:
    """Returns the names of the calls that were compiled in the run's last commit."""
    return tuple(part(run.state, "compiled", list)) if "compiled" in run.state else ()


def check_run(run: RunStore, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses a run of another model, by names and shapes of its parameters, or of another
    optimizer.

    Raises `StoreError`.
    """
    found = run.resumed.weight_shapes()
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    run_state.check_parameters(wanted, found, run.directory)
    if part(run.state, "format", int) != _FORMAT:
        raise StoreError(
            f"the run in {run.directory} has a state of format {run.state['format']!r:.40}; this memfit reads {_FORMAT}: "
            "use the version that wrote it"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    run_state.check_optimizer(part(run.state, "optimizer", dict), optimizer, names)
