"""An operation in the making.

In: what lowering finds out about an action, piece by piece. Out: an `Operation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.schedule import Action
from memfit.core.step import ByteChange, Operation, Token, Transfer, UpdatePlace
from memfit.core.tiers import NETWORK, Tier, crossed_tier
from memfit.core.work_kinds import Work
from memfit.scheduling.activation_bytes import Effect


class OperationDraft:
    """Collects what one operation says; `begin` starts the next one.

    One object for a whole step: whoever tells of changes of bytes holds it from the beginning.

    Args:
        device: as `core.tiers.is_processor` takes it.

    Attributes:
        changes: as in `Operation`, like all others.
    """

    changes: list[ByteChange]
    during: list[ByteChange]
    transfers: list[Transfer]
    awaited: Sequence[Transfer]
    waits: Sequence[Token]
    waits_after: Sequence[Token]
    after: Sequence[Token]
    is_chain: bool
    behind: Sequence[Token]
    gives: Token | None
    work: Work
    host_work: Work
    update_place: UpdatePlace | None
    needs: tuple[int, ...]
    adds_to: tuple[int, ...]

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._ended: Sequence[ByteChange] = ()
        self.begin()

    def begin(self) -> None:
        """Empties the draft. The lists that were given out belong to the operation before."""
        self.changes, self.during, self.transfers = list(self._ended), [], []
        self._ended = ()
        self.awaited = self.waits = self.waits_after = self.after = self.behind = ()
        self.is_chain = True
        self.gives = self.update_place = None
        self.work = self.host_work = ()
        self.needs = self.adds_to = ()

    def change(self, category: str, owner: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Notes bytes that come or go, if there are any."""
        if nbytes:
            self.changes.append(ByteChange(tier, category, owner, nbytes))

    def change_gradient(self, block: int, nbytes: int) -> None:
        """Notes bytes of a block's gradient on the device that come or go."""
        self.change("gradient", f"B{block}", nbytes)

    def rise(self, tier: Tier, category: str, owner: str, nbytes: int) -> None:
        """Notes bytes that are held while the operation runs, above those before it."""
        self.during.append(ByteChange(tier, category, owner, nbytes))

    def rise_behind(self, gone: Sequence[ByteChange], category: str, owner: str, nbytes: int) -> None:
        """Notes bytes of the device that are held while the operation runs, but not before others
        have gone that it waits for.
        """
        if nbytes + sum(change.nbytes for change in gone) > 0:
            self.during += gone
            self.rise(Tier.DEVICE, category, owner, nbytes)

    def take(self, effect: Effect, highest: int) -> None:
        """Notes what the operation does to activations, which rise so high while it runs, above
        what is there with the changes so far.
        """
        self.during = list(self.changes)
        self.changes += effect.changes
        self._ended = effect.ends
        if highest > 0:
            self.rise(Tier.DEVICE, effect.category, effect.owner, highest)
        elif highest < 0:
            # Activations go while gradients, counted from the begin on, come.
            self.rise(Tier.DEVICE, "gradient", "gradients that come later", highest)

    def transfer(self, tier: Tier, direction: str, category: str, nbytes: int) -> None:
        """Notes a transfer that the operation begins, if it moves anything, to or from the
        device.
        """
        if nbytes:
            self.transfers.append(self.way(tier, direction, category, nbytes))

    def receive(self, category: str, nbytes: int) -> None:
        """Notes bytes that come from other ranks."""
        if nbytes:
            self.transfers.append(Transfer(NETWORK, "read", category, nbytes))

    def way(self, tier: Tier, direction: str, category: str, nbytes: int) -> Transfer:
        """Returns a transfer to or from the device, by all links that it passes."""
        return Transfer(tier, direction, category, nbytes, crossed_tier(tier, self._device))

    def finish(self, action: Action) -> Operation:
        """Returns the operation, which changes no more."""
        # By position: a step of a large model has thousands, and a planner lowers hundreds of them.
        return Operation(
            action,
            tuple(self.changes),
            tuple(self.during),
            tuple(self.waits),
            tuple(self.waits_after),
            tuple(self.transfers),
            tuple(self.awaited),
            self.is_chain,
            tuple(self.after),
            tuple(self.behind),
            self.gives,
            self.work,
            self.host_work,
            self.update_place,
            self.needs,
            self.adds_to,
        )
