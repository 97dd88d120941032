"""Steps of a run with a journal: decided once all gradients are durable, then made block by block,
in this process or the next.

In: gradients at home, the optimizer, a `House` whose store has a journal. Out: new weights and
states; after a crash, the same.

[Note: a step from its journal]
The store's part, what is durable when, is [Note: journal] in `store.journal`. Here is what a step
is beside its blocks. Its record holds every number that updates use: settings of the groups as the
optimizer took them, counters before the step, what gradients are multiplied by (clipping, loss
scale), which parameters have one, the step of counted noise; and what `job.step` gives and leaves:
losses, norm, where the generators stood after backward. The buffers that forward changed are
committed with it.

When a process ends between that commit and the step's own commit, the run goes on one step earlier,
for what its loop did after the step is lost (schedulers, averages), and what it did before (drawing
the batch) is done again. `fit` makes the updates that are left; the next `job.step` takes the
batch, runs the optimizer's hooks, puts generators where the step had left them and gives its
result, without computing anything. Until then, weights are those of the step to come: `fit` says
so.

So an update must be a function of what the record has. An optimizer that draws random numbers is
refused when that shows, after the first update.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.core.errors import MemfitWarning, StoreError, UnsupportedError
from memfit.engine.housing import House
from memfit.engine.work import Outcome
from memfit.homes import TransferGroup
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.updates import Gate, UpdateWorker
from memfit.optimizers import OptimizerDriver
from memfit.runs import run_state
from memfit.runs.run_state import part
from memfit.runs.run_store import RunStore
from memfit.runs.schemes import StoreCopies
from memfit.store.state import encode_state
from memfit.tensors.noise import RoundingNoise


class StepJournal:
    """The journal of one job.

    Memory: the record (some 100 kB), and what the updates take.

    Args:
        run: whose scheme is "journal".
        house: the homes.
        copies: of what rests in memory.
        model: the user's.
        driver: the optimizer.
        optimizer: the user's.
        updates: the worker.
        states: by block index.
        noise: of stochastic rounding and of encoded states.
    """

    def __init__(
        self,
        run: RunStore,
        house: House,
        copies: StoreCopies,
        *,
        model: nn.Module,
        driver: OptimizerDriver,
        optimizer: torch.optim.Optimizer,
        updates: UpdateWorker,
        states: Mapping[int, BlockStates],
        noise: RoundingNoise,
    ) -> None:
        self._house = house
        self._copies = copies
        self._directory = run.directory
        self._model = model
        self._driver = driver
        self._optimizer = optimizer
        self._updates = updates
        self._states = dict(states)
        self._noise = noise
        # Of the step that is being made, and where torch's generator stood when its updates began.
        self._record: dict[str, Any] = {}
        self._random_before = torch.empty(0, dtype=torch.uint8)
        self._by_name = {block.name: block for block in house.blocks}
        self._journal = run.journal({b.name: copies.updated_regions(b) for b in house.blocks if b.index in states})

    @property
    def is_waiting(self) -> bool:
        """A step is decided that `job.step` has not given back."""
        return self._journal.step == self._house.step + 1

    def begin_step(self) -> None:
        """Prepares the journal for a step's gradients."""
        self._journal.begin_step()

    def decide(self, outcome: Outcome) -> None:
        """Decides a step, all of whose gradients are at home.

        Its updates are listed behind it, and a `keep` for each turn.

        Args:
            outcome: of its forward and backward.

        Raises:
            StoreError: the disk. If the step `is_waiting` then, `finish` goes on.
            UnsupportedError: settings that cannot be kept, or an optimizer that draws random
                numbers.
        """
        gradients = self._house.gradients
        record: dict[str, Any] = {
            "step": self._house.step + 1,
            "settings": self._driver.settings,
            "counters": {self._house.blocks[index].name: self._counters(index) for index in self._states},
            "gradients": list(gradients.arrived),
            "scale": None if gradients.scaling.value is None else float(gradients.scaling.value),
            "noise step": self._noise.step,
            "random": run_state.take_random(),
            "extra state": run_state.take_extra(self._model),
            "losses": [float(loss) for loss in outcome.losses],
            "shares": [float(share) for share in outcome.shares],
            "norm": None if outcome.norm is None else float(outcome.norm),
        }
        self._journal.begin(record["step"], record, self._copies.write_buffers())
        self._begin_turns(record)

    def take_up(self) -> None:
        """Makes the updates of a step that was decided before the run goes on; counters are those
        after it.

        Raises:
            StoreError: the disk, or a record that cannot be used.
        """
        if self.is_waiting:
            self.finish()
            run_state.give_extra(self._journal.read().get("extra state", {}), self._model)
            warnings.warn(
                f"step {self._house.step + 1} of the run in {self._directory} had been decided when the process ended: its updates are made now, and "
                "the next job.step gives its result without computing it again. Until then weights are already those of that step",
                MemfitWarning,
                stacklevel=2,
            )

    def finish(self) -> None:
        """Makes what is left of the updates of a step that was decided.

        Nothing to do for any other.

        Raises:
            StoreError: the disk, or a record that cannot be used; may be repeated.
        """
        if not self.is_waiting:
            return
        self._copies.begin_versions(self._house.blocks)
        record = self._journal.read()
        for states in self._states.values():
            states.numbers.clear()
        run_state.give_numbers(run_state.numbers_in_record(record), self._states, self._optimizer)
        pending = [self._by_name[name] for name in self._journal.pending]
        if not pending:
            return
        for block in pending:
            self._copies.restore_block(block)
        self._house.gradients.take_up(part(record, "gradients", list), _number(record, "scale"))
        self._noise.step = part(record, "noise step", int)
        self._driver.abandon_step()
        settings = part(record, "settings", list)
        if not all(isinstance(group, dict) for group in settings):
            raise StoreError(
                "the record of the step has no proper 'settings': it is damaged; take another save, or begin anew in another directory"
            )
        self._driver.begin_again(settings)
        try:
            self._make(record)
        finally:
            self._driver.abandon_step()

    def random(self) -> dict[str, Any]:
        """Returns where the generators stand after the step that is waiting.

        Raises `StoreError` for a record that cannot be used.
        """
        return part(self._journal.read(), "random", dict)

    def give(self) -> Outcome:
        """Returns what the step that is waiting came to; generators stand where it had left them.

        Its updates must be made.

        Raises:
            StoreError: the record cannot be used.
        """
        record = self._journal.read()
        run_state.give_random(part(record, "random", dict))
        norm, scale = _number(record, "norm"), _number(record, "scale")
        self._house.gradients.scaling.value = None if scale is None else torch.tensor(scale)
        return Outcome(
            losses=[torch.tensor(loss, dtype=torch.float64) for loss in _numbers(record, "losses")],
            shares=_numbers(record, "shares"),
            norm=None if norm is None else torch.tensor(norm, dtype=torch.float64),
            departures=[
                "the step had been decided before: it was finished from its journal, with the gradients of the batch that it had then"
            ],
        )

    def _make(self, record: Mapping[str, Any]) -> None:
        """Makes the updates that are left, as many blocks at a time as the spare room takes."""
        self._begin_turns(record)
        turns = [[self._by_name[name] for name in names] for names in self._journal.turns()]
        gates = [Gate() for _ in turns]
        try:
            # All at once: while the blocks of a turn are committed, what the next ones need comes.
            updates = [[self._updates.submit(b, gate) for b in turn] for turn, gate in zip(turns, gates, strict=True)]
            for turn, gate, handles in zip(turns, gates, updates, strict=True):
                gate.open()
                TransferGroup(handles).wait()
                self.keep([block.index for block in turn])
        finally:
            # Also after an error: the updates' thread would wait for these gates for ever.
            for gate in gates:
                gate.shut(StoreError("the step was given up before this block's turn"))

    def turns(self) -> list[tuple[int, ...]]:
        """Returns the next step's blocks, in the order in which the store has room for them."""
        return [tuple(self._by_name[name].index for name in turn) for turn in self._journal.turns(of_next=True)]

    def keep(self, blocks: Sequence[int]) -> None:
        """Commits the new versions of a turn's blocks, whose updates are through.

        Raises:
            StoreError: the disk; `finish` goes on.
            UnsupportedError: they were the last, and the optimizer has drawn random numbers.
        """
        turn = [self._house.blocks[index] for index in blocks]
        for block in turn:
            # Before the commit: the new version must be whole when it becomes current.
            self._copies.write_block(block)
        self._record["counters"] |= {block.name: self._counters(block.index) for block in turn}
        self._journal.moved([block.name for block in turn], self._record)
        # Behind the commit: later writes must not go to the version that is current now.
        self._copies.begin_versions(turn)
        if not self._journal.pending and not torch.equal(self._random_before, torch.get_rng_state()):
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} draws random numbers while it updates, so that an update that is made again from the journal would be another: "
                "begin the run with scheme='generations'"
            )

    def _begin_turns(self, record: Mapping[str, Any]) -> None:
        self._record = {**record, "counters": dict(record["counters"])}
        self._random_before = torch.get_rng_state()

    def _counters(self, index: int) -> bytes:
        """Returns the counters of one block, as the record has them: each turn writes it again, and
        most are what they were.
        """
        return encode_state(run_state.take_numbers({index: self._states[index]}))


def _number(record: Mapping[str, Any], key: str) -> float | None:
    """Returns a number of the record, or None where it says so. Raises `StoreError` for anything
    else.
    """
    found = record.get(key)
    if found is None or isinstance(found, float):
        return found
    raise StoreError(
        f"the record of the step has no proper {key!r}: it is damaged, or of another version of memfit; take another save, or begin anew in another directory"
    )


def _numbers(record: Mapping[str, Any], key: str) -> list[float]:
    found = part(record, key, list)
    if all(isinstance(one, float) for one in found):
        return found
    raise StoreError(
        f"the record of the step has no proper {key!r}: it is damaged, or of another version of memfit; take another save, or begin anew in another directory"
    )
