"""Gradients and updates of a step: accumulates, checks, norms, updates, and the waits for them.

In: the blocks, their gradients, the optimizer's worker. Out: gradients at home, weights updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from memfit.core.errors import StoreError, UnsupportedError
from memfit.core.schedule import Accumulate, Clear, Commit
from memfit.core.step import Operation, Token, UpdatePlace
from memfit.homes.gradients import GradientHomes
from memfit.homes.home import DONE, TransferGroup, TransferHandle
from memfit.homes.updates import Gate, UpdateWorker
from memfit.homes.weights import BlockWeights, check_untouched, check_unwritten


class UpdatePhase:
    """Gradients and updates of one engine.

    Args:
        blocks: by the schedule's block index.
        gradients: their homes; None for an engine that only runs forward.
        updates: the worker; None likewise.
        parameter_order: names in the model's order (norms are summed in it).
        depart: called with a description of what the schedule did not foresee.

    Attributes:
        skips: a gradient is infinite or NaN, so that updates do nothing.
    """

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        gradients: GradientHomes | None,
        updates: UpdateWorker | None,
        parameter_order: Sequence[str],
        depart: Callable[[str], None],
    ) -> None:
        self._blocks = tuple(blocks)
        self._gradients = gradients
        self._updates = updates
        self._parameter_order = tuple(parameter_order)
        self._depart = depart
        self._updating: dict[int, TransferHandle] = {}
        self.skips = False

    def begin(self) -> None:
        """Begins a run: nothing is skipped."""
        self.skips = False

    def do(self, action: Accumulate | Clear | Commit) -> None:
        """Executes an accumulate, a clear or a commit."""
        assert self._gradients is not None
        match action:
            case Accumulate(b):
                self._gradients.accumulate(self._blocks[b])
            case Clear(b):
                # The update reads this gradient.
                self.wait_for_device(b)
                self._gradients.clear(self._blocks[b])
            case Commit():
                if self.skips:
                    # No update takes them: they would be added to the next step's.
                    self._gradients.here.drop(self._blocks)
                self._update_late()
                # Behind the late ones, which it waits for too.
                for b in tuple(self._updating):
                    self.wait(b)
                if self._updates is not None:
                    self._updates.catch_up()

    def update(self, b: int, place: UpdatePlace = UpdatePlace.BESIDE, after: TransferHandle = DONE) -> None:
        """Begins the update of a block; with `UpdatePlace.AT_ONCE` it is done when this
        returns.
        """
        assert self._gradients is not None and self._updates is not None
        block = self._blocks[b]
        self._accumulate_late([block])
        # The update reads it at its home, from another thread.
        self._gradients.wait()
        if self.skips:
            return
        # A visit that nobody waited for, because its call was left out: what still arrives would
        # overwrite what is updated in place.
        block.wait()
        self._keep_written(block, is_decided=after is not DONE)
        self._updating[b] = self._updates.submit(
            block, after, is_beside=after is not DONE or place is not UpdatePlace.AT_ONCE
        )

    def _keep_written(self, block: BlockWeights, *, is_decided: bool) -> None:
        """Writes home what the user's code wrote to a block that is here, before its update: from
        here on the engine writes.

        Refused where the update would not see it: a step that is decided is made from its journal,
        and what is written to a spare slot is read in the next step.
        """
        masters = block.master_home
        reads_at_home = block.has_masters or block.updates_on_host
        if is_decided or (reads_at_home and masters is not None and masters.has_spare_slot):
            check_unwritten(block)
        written = block.written_since_watch()
        leaving = block.write_home(written) if written else None
        if leaving is not None:
            leaving.wait()

    def spread(self, b: int) -> None:
        """Begins to give all processes the new weights that this one has made of a block, once its
        update is done.
        """
        # Before it is submitted: the others read what the update writes.
        self.wait(b)
        home = self._blocks[b].home
        assert home is not None and self._updates is not None
        # Here too where nothing was this process's: what others made is newer than a commit.
        if not self.skips:
            self._updates.note_updated(b)
        self._updating[b] = home.spread()

    def gather(self) -> bool:
        """Waits until all gradients are at home and no visit is under way. Returns False if this
        step's updates do nothing.
        """
        assert self._gradients is not None
        self._accumulate_late(self._blocks)
        for block in self._blocks:
            block.wait()
        self._gradients.wait()
        return not self.skips

    def wait(self, b: int) -> None:
        """Waits for the block's update, if one is under way."""
        # Off the table first: an error is told once.
        handle = self._updating.pop(b, None)
        if handle is not None:
            handle.wait()

    def wait_for_device(self, b: int) -> None:
        """Waits until the block's update no longer uses what the block has on the device: not at
        all for one on the host, which works at the homes.
        """
        if not self._blocks[b].updates_on_host:
            self.wait(b)

    def multiply(self, factor: float) -> None:
        """Multiplies gradients by a factor from now on. See `engine.backward`, [Note: counts that
        come late].
        """
        assert self._gradients is not None
        if factor != 1.0:
            self._gradients.scaling.multiply(factor)

    def unscale(self, scale: float) -> None:
        """Divides gradients by the loss scale from now on."""
        assert self._gradients is not None
        self._gradients.scaling.unscale(scale)

    def check(self) -> bool:
        """Checks that all gradients of what is updated are finite. If not, returns False, and
        updates do nothing until the next run.
        """
        assert self._gradients is not None and self._updates is not None
        self._accumulate_late(self._blocks)
        # Late ones included: an infinity in one of them must skip the others too.
        self.skips = not self._gradients.is_finite(self._updates.trained)
        return not self.skips

    def norm(self, max_norm: float | None) -> torch.Tensor:
        """Returns the global norm of all gradients. With `max_norm`, updates clip to it from now
        on.
        """
        assert self._gradients is not None
        self._accumulate_late(self._blocks)
        norm = self._gradients.norm(self._parameter_order)
        if max_norm is not None:
            self._gradients.scaling.clip(norm, max_norm)
        return norm

    def abandon(self) -> None:
        """Ends the updates under way and frees the gradients on the device, after an error. Errors
        of updates are reported.
        """
        updating, self._updating = self._updating, {}
        try:
            # Nothing may write weights or states once the caller takes the step back.
            TransferGroup(list(updating.values())).wait()
        except Exception as error:  # noqa: BLE001, reported beside the first error
            self._depart(f"an update failed as well: {error!r}")
        if self._updates is not None:
            # Also where one of them failed: others have left last writes.
            self._updates.catch_up()
        if self._gradients is not None:
            self._gradients.here.drop(self._blocks)

    def _accumulate_late(self, blocks: Iterable[BlockWeights]) -> None:
        """Accumulates gradients that came after their block's accumulate, in a step that left the
        traced order.

        Gradients move home by accumulates only. Processes that share a home must know of each:
        those of the schedule are known to all, and these are reported as departures.
        """
        assert self._gradients is not None
        for block in blocks:
            if self._gradients.awaits_accumulate(block):
                if self._gradients.are_exchanged:
                    # Whether something is collective must not depend on what one rank computes.
                    raise UnsupportedError(
                        f"the gradient of block {block.name!r} came where the schedule had passed its accumulate, and other ranks know nothing of it: "
                        "models whose calls vary from step to step train on one process"
                    )
                self._depart(f"the gradient of block {block.name!r} came where the schedule had passed its accumulate")
                self.do(Accumulate(block.index))

    def _update_late(self) -> None:
        """Updates blocks whose gradients came after their update, in a step that left the traced
        order.
        """
        assert self._gradients is not None and self._updates is not None
        for block in self._blocks:
            if not self._gradients.here.has(block) or self._gradients.are_exchanged:
                continue
            if block.index in self._updates.updated_blocks:
                raise UnsupportedError(
                    f"the calls of this step left the traced order so far that block {block.name!r} was updated before all of its gradient had come: "
                    "plan update='after-backward' for models whose calls vary from step to step"
                )
            self._depart(f"the gradient of block {block.name!r} came where the schedule had passed its update")
            self.update(block.index)
            self.do(Clear(block.index))


# Gates of a journal's turns: the updates of a turn change nothing before the previous turn is
# committed.
#
# In: updates and keeps as a run reaches them. Out: handles that updates wait for, in their own
# thread.


class TurnGates:
    """Gates of one run, by the token of the keep that opens them."""

    def __init__(self) -> None:
        self._gates: dict[Token, Gate] = {}

    def before(self, update: Operation) -> TransferHandle:
        """Returns the handle that an update waits for: of the keep of the previous turn, if the
        list has it later than the update.
        """
        turn = next((token for token in update.after if token.kind == "keep"), None)
        return DONE if turn is None else self._gates.setdefault(turn, Gate())

    def open(self, keep: Operation) -> None:
        """Opens the gate of a turn that was committed."""
        if keep.gives is not None and keep.gives in self._gates:
            # Only now may the next turn's blocks be written over the versions that were just
            # replaced.
            self._gates[keep.gives].open()

    def shut(self) -> None:
        """Ends all waits with an error. Must come before updates are waited for, which would wait
        for these gates.
        """
        for gate in self._gates.values():
            # In the thread of the run; the updates' thread wakes up with the error and changes
            # nothing.
            gate.shut(StoreError("the step was given up before this block's turn"))


# Visits of weights while a schedule runs: as it says, and on demand if the model does what its
# trace did not foresee.
#
# In: the blocks, and waits for their updates. Out: weights that are on the device when code reads
# them.


class Visits:
    """Fetches and releases for one engine. A block whose update is under way is waited for before
    it moves.

    Args:
        blocks: by the schedule's block index.
        wait_for_update: waits for a block's update, if one is under way.
        wait_on_device: the same for an update that works on the block's device bytes, and not for
            one on the host.
        depart: called with a description of what the schedule did not foresee.
    """

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        wait_for_update: Callable[[int], None],
        depart: Callable[[str], None],
        wait_on_device: Callable[[int], None] | None = None,
    ) -> None:
        self._blocks = tuple(blocks)
        self._wait_for_update = wait_for_update
        self._wait_on_device = wait_for_update if wait_on_device is None else wait_on_device
        self._depart = depart
        self._on_demand: set[int] = set()

    def fetch(self, b: int) -> None:
        """Begins a visit that the schedule asks for."""
        # Before the bytes come: until the update is through, its home has those of before it.
        self._wait_for_update(b)
        self._blocks[b].fetch()
        self._on_demand.discard(b)

    def release(self, b: int) -> None:
        """Ends a visit.

        Raises:
            UnsupportedError: the model's own code has changed a weight meanwhile, which would be
                lost.
        """
        # Before the bytes go: an update that works on them here would write into freed memory.
        self._wait_on_device(b)
        block = self._blocks[b]
        # Before the release: afterwards nothing shows what the model's code wrote.
        check_untouched([block])
        block.release()

    def ensure(self, blocks: Sequence[int], *, is_foreseen: bool = False) -> None:
        """Makes sure that the blocks' weights are here. Those that had to be fetched now are
        counted as departures, unless that was foreseen.
        """
        for b in blocks:
            block = self._blocks[b]
            if not block.is_here:
                if not is_foreseen:
                    self._depart(f"block {block.name!r} was needed where the schedule had not fetched it")
                # As for a visit of the schedule, which would have waited too.
                self._wait_for_update(b)
                block.fetch()
                self._on_demand.add(b)
            # Also for a visit that is under way: code is about to read the bytes.
            block.wait()

    def end_on_demand(self) -> None:
        """Releases what came on demand and was not asked for by the schedule since."""
        came = [self._blocks[b] for b in self._on_demand]
        self._on_demand.clear()
        try:
            check_untouched(came)
        finally:
            for block in came:
                block.release()
