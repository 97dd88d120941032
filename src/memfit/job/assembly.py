"""What works in a job under one plan: blocks with their homes, commits, updates, the engine.

In: a job's parts. Out: everything at home and ready for steps; at the end, everything back where it was. A job has one assembly at a time; a tighter plan
brings the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit import devices
from memfit.batches.splitting import signature_of
from memfit.checkpoints.checkpointer import Checkpointer, Committed, RunCheckpointer, prepare_store
from memfit.checkpoints.schemes import scheme_of
from memfit.core.errors import DoesNotFitError, StoreError, UsageError
from memfit.core.plan import Plan
from memfit.core.precision import ComputeDtype
from memfit.core.tiers import Tier
from memfit.core.units import format_bytes
from memfit.engine.engine import Engine
from memfit.engine.housing import House
from memfit.engine.inputs import cast_dtype, casting_inputs
from memfit.engine.loss_scaling import LossScaler, in_half
from memfit.engine.policies import CallFrames
from memfit.files.matching import Matched
from memfit.homes import ByteHome
from memfit.homes.factories import own_factories
from memfit.homes.optimizer_states import BlockStates, StateRest, embedding_names
from memfit.homes.pinned_ring import PinnedRing
from memfit.homes.update_pieces import PieceUpdates
from memfit.homes.updates import UpdateWorker
from memfit.homes.weights import BlockWeights
from memfit.job.interrupts import Interrupts
from memfit.job.journaling import StepJournal
from memfit.job.parts import JobParts, Prepared
from memfit.job.saving import LoadResult
from memfit.job.setting import training_setting
from memfit.optimizers import OwnerCallbacks
from memfit.tensors.noise import RoundingNoise

_SHAPES = 64
"""Shapes of batches that a job remembers its schedules for; of more, those that were used longest ago are planned for again."""


class Assembly:
    """The working parts of a job under one plan.

    Args:
        parts: what `fit` hands over.
        scaler: the loss scale of a plan that computes in fp16.
        interrupts: of the job.
        before: the checkpointer of the plan that this one takes the place of.

    Attributes:
        torn: why blocks hold weights of different steps; None while they do not.
        is_stepping: in the middle of a step, or of inference.
        has_begun: everything is at home, and not given up.
        has_told_changes: the user knows that a parameter was changed past its memory.
        has_started: the run is the job's: its first version is committed, or it goes on.
        steps_before: steps of the run that this job did not make.

    Raises:
        MemfitError: something could not move home; what had moved was given back.
    """

    def __init__(
        self,
        parts: JobParts,
        *,
        scaler: LossScaler | None,
        interrupts: Interrupts,
        before: RunCheckpointer | None = None,
    ) -> None:
        self.parts = parts
        self.plan: Plan = parts.plan
        self.machine = parts.machine
        self.scaler = scaler
        self.torn: str | None = None
        self.is_stepping = False
        self.has_begun = False
        self.has_started = before is not None
        self.has_told_changes = False
        self.steps_before = 0
        self._has_ended = False
        self._prepared = {parts.signature: parts.prepared}
        self._modes = _modes(parts.model)
        driver = parts.driver
        self.blocks = tuple(
            BlockWeights(i, name, parameters, parts.plan.compute_dtype)
            for i, (name, parameters) in enumerate(parts.blocks)
        )
        if self.plan.compute_dtype.has_masters:
            driver.use_masters(torch.float32)
        self.place = {slot.name: (block, slot) for block in self.blocks for slot in block.slots}
        trained = set(driver.names)
        self.noise = RoundingNoise(seed=torch.initial_seed())
        rest = StateRest(format=self.plan.state_format, kept=embedding_names(parts.model), noise=self.noise)
        self.states = {
            block.index: BlockStates(
                block, {slot.name: driver.state_layout(slot.name) for slot in block.slots if slot.name in trained}, rest
            )
            for block in self.blocks
            if any(slot.name in trained for slot in block.slots)
        }
        committed = Committed(
            model=parts.model,
            optimizer=parts.optimizer,
            plan=parts.plan,
            reason=parts.reason,
            max_grad_norm=parts.max_grad_norm,
            blocks=self.blocks,
            states=self.states,
            noise=self.noise,
            scaler=self.scaler,
        )
        scheme = None if parts.run is None else scheme_of(parts.run, parts.plan)
        if scheme is not None:
            prepare_store(scheme, committed)
        self.house = House(
            parts.plan,
            self.blocks,
            self.states,
            own_factories(
                parts.machine.device,
                parts.directory,
                host_ledger=parts.machine.host_ledger,
                kept=parts.run,
                further=parts.machine.further,
            ),
            keeps_gradients=parts.keeps_gradients,
            keeps_norms=parts.max_grad_norm is not None,
        )
        self.checkpointer = Checkpointer()
        self.journal: StepJournal | None = None
        self._running = ExitStack()
        self._owed: set[str] = set()
        try:
            if parts.run is not None and scheme is not None:
                self.checkpointer = RunCheckpointer(
                    parts.run, scheme, self.house, committed, phase=parts.machine.phases, before=before
                )
            self._move_in()
            self._start(interrupts)
        except BaseException:
            if before is None:
                self.end(restore=True)
            else:
                self.give_up()  # the store has everything, and the run is still that of the assembly before
            raise

    def _move_in(self) -> None:
        """Weights and optimizer states move home, or are found there. If that fails, `end` gives back what had moved."""
        parts, driver = self.parts, self.parts.driver
        resumed = self.run_checkpointer if parts.run is not None and parts.run.is_resumed else None
        if resumed is None:
            self.house.move_in(parts.bring, parts.take_back)
        else:
            resumed.restore_homes(parts.forget)
        callbacks = OwnerCallbacks(
            gather_state=self.gather_state, scatter_state=self.scatter_state, zero_grad=self._zero_grad
        )
        for name, state in driver.adopt(callbacks):
            block, slot = self.place[name]
            try:
                if resumed is None:
                    self.states[block.index].put(slot, state)
            except BaseException:
                driver.restore(name, state)
                raise
            self._owed.add(name)
        if resumed is not None:
            resumed.restore_settings()
        self.house.first_commit()

    def _start(self, interrupts: Interrupts) -> None:
        """The threads and hooks of the steps; the limit is armed."""
        parts, machine = self.parts, self.machine
        self._running.enter_context(casting_inputs(parts.casts, cast_dtype(self.plan.compute_dtype)))
        noise = self.noise if self.plan.drops_masters else None
        moved = None
        if devices.is_accelerator(machine.device):
            moved = PinnedRing(machine.device, ledger=machine.host_ledger)
            self._running.callback(moved.close)
        pieces = PieceUpdates(parts.driver, self.states, self.house.gradients, noise=noise, moved=moved)
        self.updates = UpdateWorker(pieces)
        self._running.callback(self.updates.close)
        self.frames = CallFrames(parts.plan, self.blocks, self.house.pools(), device=machine.device)
        self.engine = Engine(
            model=parts.model,
            sites=parts.sites,
            blocks=self.blocks,
            frames=self.frames,
            gradients=self.house.gradients,
            updates=self.updates,
            parameter_order=[name for name, _ in parts.model.named_parameters()],
            device_types=("cpu", machine.device.type) if devices.is_accelerator(machine.device) else ("cpu",),
            loose=[i for i, block in enumerate(parts.prepared.profile.blocks) if block.is_spanning],
            observe=interrupts.check,
        )
        self._running.callback(self.engine.close)
        self.frames.attach(self.engine)
        self._open_journal()
        machine.forget_peak()  # while the model was whole
        if parts.enforces:
            machine.arm()
        self.has_begun = True

    def _open_journal(self) -> None:
        """Where the run keeps one: a step that was decided when the last process ended is made."""
        parts = self.parts
        if parts.run is None or parts.run.scheme != "journal":
            return
        self.journal = StepJournal(
            parts.run,
            self.house,
            self.run_checkpointer.copies,
            model=parts.model,
            driver=parts.driver,
            optimizer=parts.optimizer,
            updates=self.updates,
            states=self.states,
            noise=self.noise,
        )
        if parts.run.is_resumed:
            self.journal.take_up()

    def begin_run(self) -> None:
        """Commits a new run's first version, or puts the random numbers of a resumed one where they were."""
        self.checkpointer.begin()
        self.has_started = True
        # Where weights came from is not asked for any more.
        self.parts = replace(self.parts, bring=None, take_back=None)

    @property
    def run_checkpointer(self) -> RunCheckpointer:
        """The checkpointer of a job that has a store."""
        assert isinstance(self.checkpointer, RunCheckpointer), "only a job with a store commits"
        return self.checkpointer

    # --- what it is -------------------------------------------------------------------------------------------------------------

    @property
    def loss(self) -> Callable[[nn.Module, Any], Any]:
        """The user's, as the plan runs it."""
        loss = self.parts.loss
        return in_half(loss, self.machine.device.type) if self.plan.compute_dtype is ComputeDtype.FLOAT16 else loss

    @contextmanager
    def setting(self) -> Iterator[None]:
        """In which the model runs; see `setting.training_setting`."""
        with training_setting(self.parts.model, self.plan.loss_chunk_tokens, self.parts.caches.use):
            yield

    @property
    def steps(self) -> int:
        """Of the run so far."""
        return self.steps_before + self.house.step

    def note_modes(self) -> None:
        """Modules in other modes (`model.train()` after a frozen start) are another program: what was prepared is prepared again, and checked."""
        modes = _modes(self.parts.model)
        if modes != self._modes:
            self._prepared.clear()
            self._modes = modes

    def prepare(self, batch: Any) -> Prepared:
        """What depends on the batch's shapes: planned for when they come.

        Raises:
            DoesNotFitError: the plan passes a limit with this batch.
        """
        prepared, excess = self.look_at(batch)
        if excess is not None:
            advice = "cut it, or close the job and fit again with this batch as the sample"
            if self.parts.replan is None:
                advice += (
                    '; fit(store=..., on_breach="replan") looks for another plan by itself when such a batch comes'
                )
            raise DoesNotFitError(f"{excess}: {advice}")
        return prepared

    def look_at(self, batch: Any) -> tuple[Prepared, str | None]:
        """As `prepare`, and in words what passes a limit; None if nothing does."""
        signature = signature_of(batch, self.parts.cut, self.plan.microbatches)
        if signature in self._prepared:
            known = self._prepared[signature] = self._prepared.pop(signature)  # the one that was used last stands last
            return known, None
        with self.engine.looking_away():
            prepared = self.parts.prepare(batch, self.plan)
        excess = self._excess(prepared)
        if excess is None:
            self._prepared[signature] = prepared
            if len(self._prepared) > _SHAPES:
                del self._prepared[next(iter(self._prepared))]
            return prepared, None
        shapes = [list(shape) for shape, _ in signature.tensors]
        return prepared, f"a batch of {signature.rows} rows with tensors {shapes} {excess}"

    def _excess(self, prepared: Prepared) -> str | None:
        left, peak = self.machine.room_bytes, prepared.timeline.peak_bytes
        if self.parts.enforces and left is not None and peak > left:
            return f"would take {format_bytes(peak)} of tensors under the job's plan, and {format_bytes(left)} are left"
        return self.parts.excess(prepared)

    def held(self) -> Iterator[torch.Tensor]:
        """What is on the device between steps and goes with the plan."""
        yield from self.house.held()
        yield from (p.grad for p in self.parts.model.parameters() if p.grad is not None)

    def residents(self) -> Iterator[tuple[str, int]]:
        """What of the job is on the device now, with its bytes."""
        for block in self.blocks:
            if block.is_here:
                yield f"weights of {block.name!r}", block.nbytes
            for slot in block.slots:
                nbytes = self.house.gradients.held_bytes(slot)
                if nbytes:
                    yield f"gradient of {slot.name!r}", nbytes
        for index, states in self.states.items():
            if states.home is not None and states.home.memory is not None:
                yield f"optimizer states of {self.blocks[index].name!r}", states.nbytes

    @property
    def is_undoable(self) -> bool:
        """The homes of what was updated still hold the weights and states of before."""
        return all(
            _has_spare_slot(self.blocks[b].home)
            and _has_spare_slot(self.blocks[b].master_home)
            and (not self.states[b].nbytes or _has_spare_slot(self.states[b].home))
            for b in self.updates.updated_blocks
        )

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within it nothing else is done with the job, and what is written is no version yet."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    # --- what the user reaches between steps ------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """The parameters are those of `fit`, lie where the job put them, and train as they did.

        Raises:
            UsageError: one does not.
        """
        now = dict(self.parts.model.named_parameters())
        for name, (block, slot) in self.place.items():
            parameter = now.get(name)
            problem = None
            if parameter is None:
                problem = "was removed from the model"
            elif parameter is not slot.parameter:
                problem = "was replaced by another parameter"
            elif parameter.requires_grad != slot.requires_grad:
                problem = f"had requires_grad={slot.requires_grad} and has {parameter.requires_grad} now"
            elif block.is_here and parameter.untyped_storage()._cdata != block.storage._cdata:  # noqa: SLF001, identity
                problem = "was given other memory (parameter.data = ..., model.to(...))"
            if problem is not None:
                self.has_told_changes = True
                raise UsageError(
                    f"the parameter {name!r} {problem} behind the job's back: homes, plan and optimizer states belong to the old one. Change values in place inside "
                    "`with job.weights():`; for anything else close the job, change the model, and fit again"
                )
        added = [name for name in now if name not in self.place]
        if added:
            raise UsageError(
                f"the model has a new parameter {added[0]!r} that the job does not know: close the job and fit again"
            )

    def keep_changes(self) -> None:
        """What was written to homes between two steps is a version of its own. Within a step nothing is one yet."""
        if not self.is_stepping:
            if self.journal is not None:
                self.journal.finish()
            self.house.keep_changes()

    def choose_blocks(self, names: Sequence[str]) -> list[BlockWeights]:
        """The blocks of these names, or of parameters of these names; all without any.

        Raises:
            UsageError: an unknown name.
        """
        if not names:
            return list(self.blocks)
        by_name = {block.name: block for block in self.blocks} | {n: b for n, (b, _) in self.place.items()}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise UsageError(
                f"no block or parameter is called {unknown[0]!r}; blocks are {[block.name for block in self.blocks]}"
            )
        return list(dict.fromkeys(by_name[name] for name in names))

    def write_home(self, changed: Sequence[BlockWeights], before: Mapping[int, Sequence[int]]) -> None:
        """Weights that were changed here become what rests at home.

        Args:
            changed: blocks.
            before: the versions of their tensors when they came.

        Raises:
            StoreError: the disk; where homes have one slot, the weights are torn. UnsupportedError: there is no room for a version that no step makes.
        """
        for block in changed:
            self._check_changeable(block)
        self.checkpointer.note_changed(block.index for block in changed)
        try:
            for block in changed:
                ticket = block.write_home(before[block.index])
                if ticket is not None:
                    ticket.wait()
            self.keep_changes()
        except BaseException as error:
            if any(_is_overwritten(block.home) or _is_overwritten(block.master_home) for block in changed):
                self.torn = f"weights that were changed between two steps could not be written ({type(error).__name__}: {error})"
            self.house.forget_step()
            raise

    def fill(self, found: Mapping[int, Matched]) -> None:
        """Weights get the values that files have, one at a time, at home.

        Args:
            found: by identity of the parameter.

        Raises:
            StoreError: a file, or the disk; the weights are torn where some had been replaced. UnsupportedError: see `write_home`.
        """
        chosen = [block for block in self.blocks if any(id(slot.parameter) in found for slot in block.slots)]
        for block in chosen:
            self._check_changeable(block)
        self.checkpointer.note_changed(block.index for block in chosen)
        try:
            for block in chosen:
                block.release()
                for slot in block.slots:
                    values = torch.empty_strided(
                        slot.shape, slot.stride, dtype=slot.master_dtype, device=slot.parameter.device
                    )
                    found[id(slot.parameter)].read(values)
                    block.put(slot, values)
        except BaseException as error:
            if not all(_has_spare_slot(home) for block in chosen for home in (block.home, block.master_home)):
                self.torn = f"a load ended in its middle ({type(error).__name__}: {error})"
            raise

    @contextmanager
    def loading(self) -> Iterator[None]:
        """What is written to homes inside becomes a version of its own, or is forgotten where it fails."""
        self.keep_changes()
        try:
            yield
        except BaseException:
            self.house.forget_step()
            raise
        self.keep_changes()

    def count_on(self, found: LoadResult) -> LoadResult:
        """Steps go on from those of a save."""
        self.steps_before = found.steps - self.house.step
        return found

    def gather_state(self, name: str) -> dict[str, Any]:
        """The optimizer states of a parameter, from home."""
        self.keep_changes()
        block, slot = self.place[name]
        return self.states[block.index].gather(slot)

    def scatter_state(self, name: str, state: dict[str, Any]) -> None:
        """Optimizer states of a parameter, to their home.

        Raises:
            UnsupportedError: there is no room for a version that no step makes.
        """
        block, slot = self.place[name]
        self._check_changeable(block)
        self.checkpointer.note_changed([block.index])
        self.states[block.index].put(slot, state)

    def _check_changeable(self, block: BlockWeights) -> None:
        self.checkpointer.check_changeable(block, is_deciding=self.journal is not None and self.journal.is_waiting)

    def _zero_grad(self, set_to_none: bool) -> None:  # noqa: FBT001, the optimizer's own signature
        for _, slot in self.place.values():
            gradient = slot.parameter.grad
            if set_to_none or gradient is None:
                slot.parameter.grad = None
            else:
                gradient.zero_()

    # --- the end ----------------------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Nothing is left here."""
        return self._has_ended

    def bytes_to_come(self) -> int:
        """What giving everything back brings to the device, at its peak."""
        coming = sum(b.master_nbytes if b.has_masters else b.nbytes for b in self.blocks if b.travels)
        coming += sum(s.nbytes for s in self.states.values() if s.home is not None and s.home.tier is not Tier.DEVICE)
        return coming + max(block.nbytes for block in self.blocks)  # one is here twice for a moment

    def give_up(self) -> None:
        """Lets go of all that the plan made; only the store stays, for the next plan. May be repeated."""
        self.has_begun = False
        self._running.close()
        for block in self.blocks:
            block.give_up()
        for states in self.states.values():
            states.home = None
        self.parts.driver.release()
        self.house.close()

    def hand_over(self) -> None:
        """The machine and the run, which were shared, are the next assembly's to end."""
        self._has_ended = True

    def end(self, *, restore: bool) -> None:
        """Gives everything back, or gives it up; may be repeated when that fails.

        Raises:
            StoreError: something could not be read; what could be is given back.
        """
        if self._has_ended:
            return
        self.machine.disarm()
        self._running.close()
        if restore:
            self._give_back()
        else:
            for block in self.blocks:
                block.release()
        self._has_ended = True
        self.parts.driver.release()
        self.house.close()
        if self.parts.run is not None and self.has_started:
            self.parts.run.close()
        elif self.parts.run is not None:
            self.parts.run.reset()

    def _give_back(self) -> None:
        """States and weights, each as soon as it was read; what was given back already is not read again."""
        try:
            self.keep_changes()
            for name in sorted(self._owed):
                self.parts.driver.restore(name, self.gather_state(name))
                self._owed.discard(name)
            # Before the first step weights are what they were born as: what never was in memory need not come there.
            take_back = None if self.has_begun else self.parts.take_back
            self.house.give_back(as_given=not self.has_begun, take_back=take_back)
        except StoreError as error:
            failure = StoreError(
                f"not everything could be given back: {error}. Repeat job.close() when the disk can be read again; job.close(restore=False) gives up "
                "what is still in the job's homes"
            )
            failure.errno = error.errno
            raise failure from error


def _has_spare_slot(home: ByteHome | None) -> bool:
    return home is not None and home.has_spare_slot


def _is_overwritten(home: ByteHome | None) -> bool:
    """What is written there changes what reads see."""
    return home is not None and home.has_versions and not home.has_spare_slot


def _modes(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())
