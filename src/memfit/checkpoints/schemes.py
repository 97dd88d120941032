"""Schemes: how a store holds a whole step on disk at every instant.

In: blocks, their optimizer states, the model's buffers. Out: the regions of a run's store, and what
may be written to them when.

| scheme        | class            | slots of what trains | a crash goes back to        | between two steps   |
|---------------|------------------|----------------------|-----------------------------|---------------------|
| "generations" | `DoubleBuffered` | two                  | the last commit             | weights may be      |
|               |                  |                      |                             | changed             |
| "journal"     | `Journaled`      | on disk one, with    | the last commit, or forward | weights on disk are |
|               |                  | one spare room for   | to the step that was        | changed by steps    |
|               |                  | all; else two        | decided, from its gradients | only                |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from memfit.checkpoints.rank_layout import rank_regions, shares_of
from memfit.checkpoints.rank_stores import RankRunStore
from memfit.checkpoints.region_layout import regions_of
from memfit.checkpoints.run_state import part
from memfit.checkpoints.run_store import RunStore
from memfit.core.commits import committed_parts, masters_of
from memfit.core.errors import PlanError, UnsupportedError
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.regions import master_region, state_region, updated_regions, weight_region
from memfit.homes.sharing import Sharing
from memfit.homes.weights import BlockWeights

_REGION_OF = {"weight": weight_region, "master": master_region, "state": state_region}


class CommitScheme(Protocol):
    """One way to lay out a store."""

    def prepare(
        self,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        buffers: Sequence[tuple[str, torch.Tensor]],
        identity: Mapping[str, str],
    ) -> None:
        """Makes the store with all its room, or compares what is there with what is wanted.

        Args:
            blocks: of the model.
            states: by block index.
            buffers: the model's persistent ones, by name.
            identity: tells the run from others.

        Raises:
            StoreError: no room, or another model. PlanError: the plan does not go with how the
                store was laid out.
        """
        ...

    def copied_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """Returns the regions that a commit copies from the block's homes in memory."""
        ...

    def has_weights(self, block: str) -> bool:
        """Returns True if the last commit has the block's current weights, not only its masters."""
        ...

    def check_changeable(self, block: BlockWeights, *, trains: bool, is_deciding: bool) -> None:
        """Refuses to change a block between two steps where the store has no room for such a
        version.

        Args:
            block: that would be changed.
            trains: the optimizer updates it.
            is_deciding: a step is decided that is not finished.

        Raises:
            UnsupportedError: there is no room.
        """
        ...


class DoubleBuffered:
    """Two slots of every weight and state: a step writes the spare ones, a commit exchanges them
    ("generations").
    """

    def __init__(self, run: RunStore, plan: Plan, sharing: Sharing | None) -> None:
        self._run = run
        self._plan = plan
        self._sharing = sharing

    def prepare(
        self,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        buffers: Sequence[tuple[str, torch.Tensor]],
        identity: Mapping[str, str],
    ) -> None:
        """See `CommitScheme`."""
        regions = regions_of(blocks, states, buffers, masters=masters_of(self._plan))
        if self._sharing is not None:
            assert isinstance(self._run, RankRunStore), "ranks commit to stores of their own"
            regions = rank_regions(regions, blocks, self._sharing)
            shapes = {slot.name: slot.shape for block in blocks for slot in block.slots}
            self._run.take_shares(shares_of(regions, blocks, states, self._sharing), shapes)
        self._run.prepare(regions, identity)

    def copied_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """See `CommitScheme`."""
        parts = committed_parts(masters_of(self._plan), has_masters=block.has_masters)
        return tuple(_REGION_OF[part](block.name) for part in parts)

    def has_weights(self, block: str) -> bool:
        """See `CommitScheme`."""
        if self._run.is_new:
            return False  # its homes are filled from elsewhere
        before = Plan.from_json(part(self._run.state, "plan", str))
        return before.block(block).weight_home is Tier.DISK

    def check_changeable(self, block: BlockWeights, *, trains: bool, is_deciding: bool) -> None:
        """See `CommitScheme`. What is written is a version of its own."""


class Journaled:
    """One slot of every weight and state: gradients are durable before updates overwrite anything
    ("journal").

    See [Note: journal] in `store.journal`.
    """

    def __init__(self, run: RunStore, plan: Plan) -> None:
        self._run = run
        self._plan = plan

    def prepare(
        self,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        buffers: Sequence[tuple[str, torch.Tensor]],
        identity: Mapping[str, str],
    ) -> None:
        """See `CommitScheme`."""
        regions = regions_of(blocks, states, buffers, masters=masters_of(self._plan), scheme="journal")
        # Regions of a block that trains and rests on disk move together, through one spare room.
        moving = [b.name for b in blocks if b.index in states and self._plan.block(b.name).rests_on_disk]
        units = [[name for name in updated_regions(block) if name in regions] for block in moving]
        self._run.prepare(regions, identity, units)
        for block in blocks:
            if self._run.moves(weight_region(block.name)) and not self._plan.block(block.name).rests_on_disk:
                raise PlanError(
                    f"block {block.name!r} rests on disk in the run in {self._run.directory}, whose scheme='journal' "
                    "has no other room for it: the plan must say weight_home='disk' and state_home='disk'"
                )

    def copied_regions(self, block: BlockWeights) -> tuple[str, ...]:
        """See `CommitScheme`."""
        parts = committed_parts(masters_of(self._plan), has_masters=block.has_masters, scheme="journal")
        return tuple(_REGION_OF[part](block.name) for part in parts)

    def has_weights(self, block: str) -> bool:
        """See `CommitScheme`."""
        return True

    def check_changeable(self, block: BlockWeights, *, trains: bool, is_deciding: bool) -> None:
        """See `CommitScheme`. The one slot of a block is changed by its steps alone."""
        if is_deciding or not trains or self._plan.block(block.name).rests_on_disk:
            raise UnsupportedError(
                f"weights or states of block {block.name!r} cannot be changed between steps: with scheme='journal' the "
                "store has no room for a version of them that no step makes. The store has what it had. Change the "
                "model before a run begins, or take scheme='generations'"
            )


def scheme_of(run: RunStore, plan: Plan, sharing: Sharing | None = None) -> CommitScheme:
    """Makes the scheme that a run's store is laid out by.

    Args:
        run: the store.
        plan: of the job.
        sharing: of its homes between ranks.
    """
    return Journaled(run, plan) if run.scheme == "journal" else DoubleBuffered(run, plan, sharing)
