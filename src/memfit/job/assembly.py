"""Assembly: what works in a job under one plan.

In: a plan that was decided. Out: everything at home and ready for steps; at the end, everything
back where it was. A job has one assembly at a time; a tighter plan brings the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from memfit import devices
from memfit.core.errors import StoreError
from memfit.core.layout import Share
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.engine.call_frames import CallFrames
from memfit.engine.engine import Engine
from memfit.engine.housing import House
from memfit.engine.loss_scaling import LossScaler, in_half
from memfit.engine.modules import cast_dtype, casting_inputs
from memfit.engine.sites import Site
from memfit.homes.factories import own_factories
from memfit.homes.optimizer_states import BlockStates, StateRest, embedding_names
from memfit.homes.regions import state_region, updated_regions
from memfit.homes.staging import PinnedRing
from memfit.homes.update_pieces import PieceUpdates
from memfit.homes.updates import UpdateWorker
from memfit.homes.weights import BlockWeights, StagedBlock, is_whole
from memfit.job.contents import Contents
from memfit.job.interrupts import Interrupts
from memfit.job.journaling import StepJournal
from memfit.machine.machine import FreedPages
from memfit.mesh.agreement import WHOLE, agree
from memfit.mesh.rank_group import RankGroup
from memfit.mesh.rank_homes import RankSharing
from memfit.optimizers import OwnerCallbacks
from memfit.planner.preparing import PreparedShapes
from memfit.planner.problem import training_setting
from memfit.planner.setup import Planned, Setup
from memfit.planner.together import WeightSums, checksum_at_home, fail_together
from memfit.runs.checkpointer import Committed, RunCheckpointer, prepare_store
from memfit.runs.schemes import scheme_of
from memfit.step.sizes import cut_of
from memfit.tensors.noise import RoundingNoise


class Assembly(Contents):
    """The working parts of a job under one plan. Made by `assemble`.

    Attributes:
        engine: carries out schedules.
        frames: what calls save for backward.
        updates: the optimizer's worker.
        shapes: schedules of the shapes of batches that came.
        has_begun: everything is at home, and not given up.
        has_started: the run is the job's: its first version is committed, or it goes on.
        has_ended: nothing is left here.
        steps_before: steps of the run that this job did not make.
    """

    engine: Engine
    frames: CallFrames
    updates: UpdateWorker
    shapes: PreparedShapes

    def __init__(self, planned: Planned, house: House, *, noise: RoundingNoise, scaler: LossScaler | None) -> None:
        super().__init__(planned, house, noise=noise, scaler=scaler)
        self.has_begun = False
        self.has_started = False
        self.has_ended = False
        self.steps_before = 0
        self._running = ExitStack()
        self._owed: set[str] = set()

    @property
    def run_checkpointer(self) -> RunCheckpointer:
        """The checkpointer of a job that has a store."""
        assert isinstance(self.checkpointer, RunCheckpointer), "only a job with a store commits"
        return self.checkpointer

    @property
    def steps(self) -> int:
        """Steps of the run so far."""
        return self.steps_before + self.house.step

    def count_on(self, steps: int) -> None:
        """Counts steps on from those of a save."""
        self.steps_before = steps - self.house.step

    @property
    def loss(self) -> Callable[[nn.Module, Any], Any]:
        """The user's loss, as the plan runs it."""
        loss = self.setup.problem.loss
        return in_half(loss, self.machine.device.type) if self.plan.compute_dtype is ComputeDtype.FLOAT16 else loss

    @contextmanager
    def setting(self) -> Iterator[None]:
        """Context in which the model runs; see `setting.training_setting`."""
        with training_setting(self.model, self.plan.loss_chunk_tokens, self.setup.problem.caches.use):
            yield

    # --- the beginning ---------------------------------------------------------------------------

    def move_in(self) -> None:
        """Moves weights and optimizer states home, or finds them in the run's store.

        If that fails, `end` gives back what had moved.
        """
        setup, driver = self.setup, self.driver
        resumed = self.run_checkpointer if setup.run is not None and setup.run.is_resumed else None
        if resumed is None:
            sums = WeightSums(setup.sources.bring)
            bring = setup.sources.bring if setup.ranks is None else sums.bring
            self.house.move_in(bring, setup.sources.take_back, self._stage, FreedPages(self.machine).note)
            if setup.ranks is not None:
                names = {id(slot.parameter): slot.name for _, slot in self.place.values()}
                agree(setup.ranks, "memfit.fit with these weights", digest=sums.text(names), advice=WHOLE)
        else:
            resumed.restore_homes(setup.sources.forget)
        callbacks = OwnerCallbacks(
            gather_state=self.gather_state, scatter_state=self.scatter_state, zero_grad=self._zero_grad
        )
        # What leaves the device goes first, as of weights.
        order = sorted(driver.names, key=lambda name: self._rests_on_device(self.place[name][0]))
        for name, state in driver.adopt(callbacks, order):
            block, slot = self.place[name]
            try:
                if resumed is None:
                    self.house.place_states([block.index] if block.index in self.states else [])
                    self.states[block.index].put(slot, state)
            except BaseException:
                driver.restore(name, state)
                raise
            self._owed.add(name)
        if resumed is None:
            self.house.place_states()
        if resumed is not None:
            resumed.restore_settings()
            if setup.ranks is not None:
                agree(setup.ranks, "memfit.fit with these weights", digest="\n".join(self._whole_sums()))
        self.house.first_commit()

    def _stage(self, block: BlockWeights, nbytes: int) -> StagedBlock | None:
        """Puts a block's values on the host where the device has no room beside them for homes of
        so many bytes, and the host has.
        """
        machine, host_limit = self.machine, self.machine.limits.of(Tier.HOST)
        if self.setup.ranks is not None or not machine.lacks_room_for(nbytes) or not is_whole(block):
            return None
        here = block.nbytes if not block.has_masters else block.master_nbytes
        held = self.house.factories[Tier.HOST].held_bytes
        if host_limit is not None and held + here > host_limit:
            return None
        return StagedBlock(block, machine.host_ledger)

    def _whole_sums(self) -> Iterator[str]:
        """Yields a checksum of each tensor of the run that every rank has whole at home.

        States of a parameter that was never updated are left out: nobody has given them values.
        """
        assert self.setup.run is not None, "weights and states of a run are at home"
        begun = {name for states in self.states.values() for name in states.numbers}
        for block in self.blocks:
            plan = self.plan.block(block.name)
            shares = (plan.weights_over, plan.states_over, plan.states_over)
            for name, share in zip(updated_regions(block.name), shares, strict=True):
                if share is Share.WHOLE and name in self.house.placed:
                    home = self.house.placed[name][1].own
                    for place in self.setup.run.regions[name].tensors:
                        if name == state_region(block.name) and place.name.rpartition(".")[0] not in begun:
                            continue
                        yield f"{name} {place.name!r} of the run: checksum {checksum_at_home(home, place.offset, place.nbytes):08x}"

    def _rests_on_device(self, block: BlockWeights) -> bool:
        return self.plan.block(block.name).state_home.traits.is_device

    def start(self, interrupts: Interrupts) -> None:
        """Starts the threads and hooks of the steps, and arms the limit."""
        setup, machine = self.setup, self.machine
        problem = setup.problem
        compiled = {} if problem.compiled is None else problem.compiled.calls
        # Closed in reverse: hooks, the updates' thread, the pinned memory that it copies through.
        self._running.enter_context(casting_inputs(problem.casts, cast_dtype(self.plan.compute_dtype)))
        noise = self.noise if self.plan.drops_masters else None
        moved = None
        if devices.is_accelerator(machine.device):
            moved = PinnedRing(machine.device, ledger=machine.host_ledger)
            self._running.callback(moved.close)
        pieces = PieceUpdates(
            self.driver, self.states, self.house.gradients, noise=noise, moved=moved, watchers=setup.watchers
        )
        self.updates = UpdateWorker(pieces)
        self._running.callback(self.updates.close)
        self.frames = CallFrames(self.plan, self.blocks, self.house.pools(), device=machine.device)
        self.engine = Engine(
            model=self.model,
            sites=[
                Site(name=s.name, module=s.module, blocks=s.blocks, compiled=compiled.get(s.name))
                for s in problem.block_map.sites
            ],
            blocks=self.blocks,
            frames=self.frames,
            gradients=self.house.gradients,
            updates=self.updates,
            parameter_order=[name for name, _ in self.model.named_parameters()],
            device_types=("cpu", machine.device.type) if devices.is_accelerator(machine.device) else ("cpu",),
            loose=[i for i, block in enumerate(self.planned.prepared.profile.blocks) if block.is_spanning],
            calls=interrupts.calls,
            observe=interrupts.check,
        )
        self._running.callback(self.engine.close)
        self.frames.attach(self.engine)
        self.shapes = PreparedShapes(self.planned, self.engine.looking_away)
        if setup.run is not None and setup.has_journal:
            self._open_journal()
        machine.forget_peak()  # while the model was whole
        machine.give_back_libraries()  # those of planning alone
        if setup.enforces:
            machine.hard_limit.arm()
        self.watch_again(range(len(self.blocks)))
        self.has_begun = True

    def _open_journal(self) -> None:
        """Opens the journal. A step that was decided when the last process ended is made."""
        assert self.setup.run is not None
        self.journal = StepJournal(
            self.setup.run,
            self.house,
            self.run_checkpointer.copies,
            model=self.model,
            driver=self.driver,
            optimizer=self.setup.optimizer,
            updates=self.updates,
            states=self.states,
            noise=self.noise,
        )
        if self.setup.run.is_resumed:
            self.journal.take_up()

    def begin_run(self) -> None:
        """Commits a new run's first version, or puts the random numbers of a resumed one where they
        were.
        """
        self.checkpointer.begin()
        self.has_started = True
        self.setup.sources.drop()

    def _zero_grad(self, set_to_none: bool) -> None:  # noqa: FBT001, the optimizer's own signature
        for _, slot in self.place.values():
            gradient = slot.parameter.grad
            if set_to_none or gradient is None:
                slot.parameter.grad = None
            else:
                gradient.zero_()

    # --- the end ---------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Lets go of all that the plan made; only the store stays, for the next plan.

        May be repeated.
        """
        self.has_begun = False
        # Threads and hooks first: they use what goes next.
        self._running.close()
        for block in self.blocks:
            block.give_up()
        for states in self.states.values():
            states.home = None
        self.driver.release()
        self.house.close()

    def hand_over(self) -> None:
        """Leaves the machine and the run, which are shared, for the next assembly to end."""
        self.has_ended = True

    def give_up_on_ranks(self, ranks: RankGroup, error: BaseException) -> None:
        """Ends a fit that failed on this rank. Other ranks may be in another collective: nothing
        that only they hold comes back.
        """
        fail_together(ranks, error)
        ranks.close()
        for block in self.blocks:
            block.release(forgets_arrival=True)
        self.end(restore=False)

    def end(self, *, restore: bool) -> None:
        """Gives everything back, or gives it up; may be repeated when that fails.

        Raises:
            StoreError: something could not be read; what could be is given back.
        """
        if self.has_ended:
            return
        # First: all weights and states at once may be above the limit.
        self.machine.hard_limit.disarm()
        # Before the blocks: the updates' thread writes what is given back.
        self._running.close()
        if restore:
            self._give_back()
        else:
            for block in self.blocks:
                block.release()
        self.has_ended = True
        self.driver.release()
        self.house.close()
        run = self.setup.run
        if run is not None and self.has_started:
            run.close()
        elif run is not None:
            run.reset()

    def _give_back(self) -> None:
        """Gives back states and weights, each as soon as it was read.

        What was given back already is not read again.
        """
        try:
            self.keep_changes()
            for name in sorted(self._owed):
                self.driver.restore(name, self.gather_state(name))
                self._owed.discard(name)
            # Before the first step weights have their first values: what never was in memory need
            # not come there.
            take_back = None if self.has_begun else self.setup.sources.take_back
            self.house.give_back(as_given=not self.has_begun, take_back=take_back)
        except StoreError as error:
            failure = StoreError(
                f"not everything could be given back: {error}. Repeat job.close() when the disk can be read again; "
                "job.close(restore=False) gives up what is still in the job's homes"
            )
            failure.errno = error.errno
            raise failure from error


def assemble(
    planned: Planned, *, scaler: LossScaler | None, interrupts: Interrupts, before: RunCheckpointer | None = None
) -> Assembly:
    """Moves everything home under a plan, and makes it ready for steps.

    Args:
        planned: what was decided.
        scaler: the loss scale of a plan that computes in fp16.
        interrupts: of the job.
        before: the checkpointer of the plan that this one takes the place of.

    Raises:
        MemfitError: something could not move home; what had moved was given back.
    """
    setup, plan, machine = planned.setup, planned.plan, planned.setup.machine
    noise, sharing = RoundingNoise(seed=torch.initial_seed()), sharing_of(planned)
    blocks = tuple(
        BlockWeights(i, block.name, block.parameters, plan.compute_dtype, None if sharing is None else sharing.held(i))
        for i, block in enumerate(setup.problem.block_map.blocks)
    )
    states = _states(setup, planned, blocks, noise, sharing)
    committed = Committed(
        model=setup.problem.model,
        optimizer=setup.optimizer,
        plan=plan,
        reason=planned.choice,
        compiled=tuple(planned.prepared.profile.compiled),
        max_grad_norm=setup.max_grad_norm,
        blocks=blocks,
        states=states,
        noise=noise,
        scaler=scaler,
    )
    scheme = None if setup.run is None else scheme_of(setup.run, plan, sharing)
    if scheme is not None:
        prepare_store(scheme, committed)  # before homes are made in it
    house = House(
        plan,
        blocks,
        states,
        own_factories(
            machine.device,
            setup.directory,
            host_ledger=machine.host_ledger,
            kept=setup.run,
            further=machine.further,
            measures_links=setup.adapts,
        ),
        keeps_gradients=setup.keeps_gradients,
        keeps_norms=setup.clips_norm,
        encoded={block.name: block.encoded for block in planned.prepared.profile.blocks if block.encoded},
        sharing=sharing,
    )
    made = Assembly(planned, house, noise=noise, scaler=scaler)
    made.has_started = before is not None
    try:
        if setup.run is not None and scheme is not None:
            made.checkpointer = RunCheckpointer(
                setup.run, scheme, house, committed, phase=machine.phases, before=before
            )
        made.move_in()
        made.start(interrupts)
    except BaseException as error:
        if setup.ranks is not None:
            made.give_up_on_ranks(setup.ranks, error)
        elif before is None:
            made.end(restore=True)
        else:
            # the store has everything, and the run is still that of the assembly before
            made.give_up()
        raise
    return made


def sharing_of(planned: Planned) -> RankSharing | None:
    """Returns how ranks share the homes of a plan; None where one process trains alone."""
    plan, profile = planned.plan, planned.prepared.profile
    if plan.ranks == 1:
        return None
    assert planned.setup.ranks is not None
    cuts = [cut_of(plan, profile, block) for block in profile.blocks]
    return RankSharing(planned.setup.ranks, plan, [block.name for block in profile.blocks], cuts)


def _states(
    setup: Setup,
    planned: Planned,
    blocks: tuple[BlockWeights, ...],
    noise: RoundingNoise,
    sharing: RankSharing | None,
) -> dict[int, BlockStates]:
    """Lays out the optimizer states of the blocks that train, by block index."""
    driver = setup.problem.driver
    if planned.plan.compute_dtype.has_masters:
        driver.use_masters(torch.float32)
    trained = set(driver.names)
    rest = StateRest(format=planned.plan.state_format, kept=embedding_names(setup.problem.model), noise=noise)
    return {
        block.index: BlockStates(
            block,
            {slot.name: driver.state_layout(slot.name) for slot in block.slots if slot.name in trained},
            rest,
            None if sharing is None else sharing.states(block.index),
        )
        for block in blocks
        if any(slot.name in trained for slot in block.slots)
    }
