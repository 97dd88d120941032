"""Pieces of updates, which are held for a moment: they come from their homes, are worked on, and go
back.

In: `Plan` and `Profile`, and which updates are under way. Out: the most bytes of their pieces, on
the device and on the host.

[Note: three pieces]
Updates are made one after the other, piece by piece (`homes.updates`). While a piece is updated,
the next one comes and the one before it leaves, also from one block to the next. So at the worst
there are at once: what leaves of one piece, all of the next, and what comes of the one after it.
What rests on the device, and the weights of a block that visits, are worked on where they lie and
take nothing. An update on the host has its pieces there, and what rests there takes nothing;
weights at home on the device pass through pinned pieces that stay (`moved_weight_bytes`). In a
stream of the updates' own what leaves last stays until the next update, or to the step's end.

[Note: states made beside their home]
A parameter has no states before its first update: the optimizer's class makes them, wherever it
likes. Where they rest beside the processor, their home is there already, and both exist until the
new ones have been copied. Elementwise updates are made in smaller pieces then
(`FIRST_PIECE_ELEMENTS`); one that needs the whole parameter holds all its states twice. The most of
the two updates is counted in every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memfit.core.layout import MOVED_PIECES, PIECE_ELEMENTS, Share
from memfit.core.plan import Plan
from memfit.core.profile import BlockProfile, Profile, TensorProfile, UpdateProfile
from memfit.core.storage_formats import records_of
from memfit.core.tiers import Tier, is_processor
from memfit.step.segment_facts import KnownFacts
from memfit.step.sizes import cut_of, master_home_bytes

_WIDE_BYTES = 4
# Of each encoded element of a state: its fp32 value, while the piece is worked on; and for a moment
# what encoding makes. Source: `homes.state_codecs`.
_DECODED_BYTES = 4
_ENCODING_BYTES = 10
# Noise (4) and what is rounded with it (4), its result (2), where it was not a number (1). Source:
# `tensors.noise`.
_ROUNDING_BYTES = 11
# Of a split master (`homes.masters`), by parameter: the difference, and a mark of one bit.
_DIFFERENCE_BYTES = 2 + 1 / 8


@dataclass(frozen=True, kw_only=True)
class PieceBytes:
    """One piece's bytes, where it is worked on.

    Attributes:
        coming: memory that it is brought into, until it has been worked on.
        working: made while it is worked on.
        leaving: what is on its way home while the next piece is worked on.
    """

    coming: int
    working: int
    leaving: int


@dataclass(frozen=True, kw_only=True)
class PieceRow:
    """The pieces of a block's update in order; of many equal ones only as many as the peak depends
    on.

    Attributes:
        pieces: in order, at least one.
        first_bytes: held while the first one is worked on, beside what leaves of one before it.
        later_bytes: the most that is held while one of the others is, but for what comes behind the
            last one.
        lasting_bytes: what leaves of the last one, where that stays when the update has been waited
            for, until the next one's first piece has been worked on or the step ends.
    """

    pieces: tuple[PieceBytes, ...]
    first_bytes: int
    later_bytes: int
    lasting_bytes: int

    @classmethod
    def of(cls, pieces: Sequence[PieceBytes], *, lasts: bool) -> PieceRow | None:
        """Returns a row; None of no pieces. `lasts`: what leaves last stays for a while."""
        if not pieces:
            return None
        held = [
            piece.coming + piece.working + (after.coming if after else 0)
            for piece, after in zip(pieces, (*pieces[1:], None), strict=True)
        ]
        later = [before.leaving + nbytes for before, nbytes in zip(pieces, held[1:], strict=False)]
        return cls(
            pieces=tuple(pieces),
            first_bytes=held[0],
            later_bytes=max(later, default=0),
            lasting_bytes=pieces[-1].leaving if lasts else 0,
        )


class UpdatePieces:
    """The pieces of a plan's updates, by block.

    Args:
        plan: the decisions.
        profile: with `updates`; a parameter without an entry is not updated.
        known: facts about the profile that were found before.
        is_summed: gradients on the device are in the masters' dtype.
        device: as `core.tiers.is_processor` takes it.
    """

    def __init__(
        self, plan: Plan, profile: Profile, known: KnownFacts, *, is_summed: bool, device: str = "cpu"
    ) -> None:
        self._known = known
        self._plan = plan
        self._device = device
        self._profile = profile
        self._is_summed = is_summed
        self._found: dict[tuple[int, bool], PieceRow | None] = {}

    def place(self, block: int) -> Tier:
        """The tier whose processor works on a block's pieces."""
        homes = self._plan.block(self._profile.blocks[block].name)
        return Tier.HOST if homes.updates_on_host(self._device) else Tier.DEVICE

    def takes_turns(self, block: int) -> bool:
        """Tells whether a block's update waits for those that were asked for before. One by an
        accelerator does not wait for those that the host makes, unless files are read or written
        for it (`homes.updates`, [Note: what goes first]).
        """
        if not self._is_by_accelerator(block):
            return True
        profile, plan = self._profile.blocks[block], self._plan
        homes = plan.block(profile.name)
        # A block without states and masters has no home for them.
        has_states = self._profile.state_bytes.get(profile.name) or master_home_bytes(plan, profile)
        tiers = homes.weight_home, homes.gradient_home, *([homes.state_home] if has_states else [])
        return any(tier.traits.is_files for tier in tiers)

    def of(self, block: int, *, is_here: bool) -> PieceRow | None:
        """Returns the pieces of a block; None if it has none.

        Args:
            block: by index.
            is_here: its weights are on the device while it is updated.
        """
        key = block, is_here
        if key not in self._found:
            name, updates = self._profile.blocks[block].name, self._profile.updates
            whole = "pieces", is_here, self._is_summed, self._device
            self._found[key] = self._known.of_update(
                self._plan,
                name,
                whole,
                lambda: PieceRow.of(
                    self._pieces_of(block, updates, is_here=is_here), lasts=self._lasts(block, updates)
                ),
                like=self._known.alike(self._profile, name),
            )
        return self._found[key]

    def _pieces_of(self, block: int, updates: Mapping[str, UpdateProfile], *, is_here: bool) -> tuple[PieceBytes, ...]:
        profile = self._profile.blocks[block]
        # The largest first, as updates take them where anything comes or goes.
        held = sorted(zip(profile.parameters, self._held(profile), strict=True), key=lambda pair: -pair[1])
        is_beside = not is_processor(self._device)
        found: list[_Sized] = []
        for parameter, numel in held:
            if parameter.name in updates and parameter.requires_grad:
                update = updates[parameter.name]
                cut = _cut(numel, update)
                may_join = is_beside and len(cut) == 1 and not update.needs_whole
                dtype = "master" if parameter.master_nbytes else parameter.dtype
                pieces = (self._piece(profile, parameter, update, elements, is_here=is_here) for elements in cut)
                found += [_Sized(piece, elements, dtype, may_join) for piece, elements in zip(pieces, cut, strict=True)]
        return tuple(_together(found))

    def _is_by_accelerator(self, block: int) -> bool:
        return self.place(block) is Tier.DEVICE and not is_processor(self._device)

    def _lasts(self, block: int, updates: Mapping[str, UpdateProfile]) -> bool:
        """Tells whether an accelerator makes a block's update in a stream of the updates' own."""
        trained = [
            updates[p.name] for p in self._profile.blocks[block].parameters if p.requires_grad and p.name in updates
        ]
        # Of whole ones it does not; but where these get no gradient, it is made so.
        return self._is_by_accelerator(block) and not all(update.needs_whole for update in trained)

    def _held(self, block: BlockProfile) -> Sequence[int]:
        """Returns how many elements of each parameter a rank updates: the rank that has most of
        it.
        """
        if self._plan.block(block.name).states_over is Share.WHOLE:
            return [math.prod(parameter.shape) for parameter in block.parameters]
        cut = cut_of(self._plan, self._profile, block)
        return [max(map(len, of_ranks)) for of_ranks in zip(*map(cut.held, range(cut.ranks)), strict=True)]

    def _piece(
        self, block: BlockProfile, parameter: TensorProfile, update: UpdateProfile, elements: int, *, is_here: bool
    ) -> PieceBytes:
        plan, homes = self._plan, self._plan.block(block.name)
        on_host = homes.updates_on_host(self._device)
        place = Tier.HOST if on_host else Tier.DEVICE
        # What does not rest where it is worked on comes in pieces. On the host a weight at home on
        # the device goes, but where a master is made of it, through the pinned pieces that
        # `moved_weight_bytes` counts.
        is_read_here = homes.weight_home is Tier.HOST if on_host else is_here
        is_here = homes.weight_home is not Tier.DISK if on_host else is_here
        numel = math.prod(parameter.shape)
        has_master = bool(parameter.master_nbytes)
        whole = parameter.master_nbytes or parameter.nbytes

        def share(nbytes: float) -> int:
            return math.ceil(nbytes * elements / numel)

        coming = working = leaving = 0
        made = 0  # at the end of the work: what goes home and is not what came
        # The master, or the weight where it is its own.
        rounded = share(parameter.nbytes) if has_master and not is_here else 0
        has_state_away = homes.state_home is not place
        if has_master and (plan.splits_masters or plan.drops_masters):
            # Made of the weight, and of what is kept beside it.
            kept = share(_DIFFERENCE_BYTES * numel) if plan.splits_masters else 0
            coming += share(whole) + (0 if is_read_here else share(parameter.nbytes)) + kept
            made += kept
            leaving += kept if has_state_away else 0
        elif has_state_away if has_master else not is_here:
            coming += share(whole)
            leaving += share(whole)
        if rounded and not plan.drops_masters:
            made += rounded
        leaving += rounded if homes.weight_home is not Tier.DEVICE else 0
        # The gradient; sums over ranks are wide already.
        if homes.gradient_home is not place:
            coming += share(whole)
        elif whole != parameter.nbytes and not self._is_summed and not on_host and plan.ranks == 1:
            working += share(whole)
        # States: what is encoded is decoded to work on it, and encoded into other memory.
        coming += share(update.state_bytes) if has_state_away else 0
        leaving += share(update.state_bytes) if has_state_away else 0
        working += share(_DECODED_BYTES * update.encoded_elements)
        encoded = share(update.state_bytes) if update.encoded_elements and has_state_away else 0
        # One after the other: the optimizer's class, encoding state by state, rounding.
        scratch_bytes = update.host_scratch_bytes if on_host else update.scratch_bytes
        scratch = math.ceil(scratch_bytes * elements / max(update.piece_elements, 1))
        encoding = encoded + share(_ENCODING_BYTES * numel) if update.encoded_elements else 0
        rounding = share(_ROUNDING_BYTES * numel) if plan.drops_masters else 0
        working += max(scratch, encoding, encoded + rounding + made)
        if not has_state_away:
            # The first update makes its states beside where they rest; encoded ones are among the
            # decoded values.
            rests = update.encoded_elements and records_of(plan.state_format).size(update.encoded_elements)
            made_beside = share(max(0, update.state_bytes - rests))
            first = min(update.first_piece_elements or elements, elements)
            working = max(working, math.ceil((working + made_beside) * first / elements))
        return PieceBytes(coming=coming, working=working, leaving=leaving)


class _Sized(NamedTuple):
    """A piece, its elements and their dtype; whether it may be updated together with others of
    that.
    """

    piece: PieceBytes
    elements: int
    dtype: str
    may_join: bool


def _together(pieces: Sequence[_Sized]) -> list[PieceBytes]:
    """Joins neighbours as updates do (`homes.update_pieces.PieceUpdates.groups`): not more elements
    than the largest piece of their dtype has.
    """
    largest: dict[str, int] = {}
    for one in pieces:
        largest[one.dtype] = max(largest.get(one.dtype, 0), one.elements)
    found: list[PieceBytes] = []
    elements, joins = 0, ""
    for one in pieces:
        if one.may_join and one.dtype == joins and elements + one.elements <= largest[one.dtype]:
            elements += one.elements
            before, piece = found.pop(), one.piece
            found.append(
                PieceBytes(
                    coming=before.coming + piece.coming,
                    working=before.working + piece.working,
                    leaving=before.leaving + piece.leaving,
                )
            )
        else:
            found.append(one.piece)
            elements, joins = one.elements, one.dtype if one.may_join else ""
    return found


def _cut(numel: int, update: UpdateProfile) -> Sequence[int]:
    """Elements of the pieces of so many elements of a parameter; of whole ones, all alike, three at
    most.
    """
    size = update.piece_elements
    if not numel or not size:
        return ()
    whole = (numel - 1) // size
    return [size] * min(whole, 3) + [numel - whole * size]


class Line:
    """Updates under way, in order, and the most that their pieces take.

    See [Note: three pieces].
    """

    def __init__(self, pieces: UpdatePieces) -> None:
        self.pieces = pieces
        self._waiting: list[tuple[int, bool]] = []
        # By place: the last piece that was submitted, and what leaves of the one before it.
        self._last: dict[Tier, tuple[PieceBytes, int]] = {}
        # What lasts of updates that have ended, and of the last one that was submitted.
        self._lasting_bytes = self._kept_bytes = 0
        self.peak_bytes: dict[Tier, int] = dict.fromkeys((Tier.DEVICE, Tier.HOST), 0)

    def submit(self, block: int, *, is_here: bool) -> None:
        """Begins a block's update; nothing if it has no pieces."""
        row = self.pieces.of(block, is_here=is_here)
        if row is not None:
            self._waiting.append((block, is_here))
            self._join(self.pieces.place(block), row)

    def wait(self, block: int) -> None:
        """Ends a block's update, and with it those that began before, but for those that it went
        before.
        """
        for index, (waiting, _) in enumerate(self._waiting):
            if waiting == block:
                front = self._waiting[: index + 1]
                rows = [self.pieces.of(b, is_here=here) for b, here in front if self.pieces.place(b) is Tier.DEVICE]
                lasting = [row.lasting_bytes for row in rows if row is not None and row.lasting_bytes]
                self._lasting_bytes = lasting[-1] if lasting else self._lasting_bytes
                left = [] if self.pieces.takes_turns(block) else self._passed(front)
                self._restart([*left, *self._waiting[index + 1 :]])
                return

    def _passed(self, front: Sequence[tuple[int, bool]]) -> list[tuple[int, bool]]:
        """Returns those of the host that the last of these went before."""
        passed: list[tuple[int, bool]] = []
        for one in front:
            if self.pieces.takes_turns(one[0]):
                passed = [*passed, one] if self.pieces.place(one[0]) is Tier.HOST else []
        return passed

    def wait_for_all(self) -> None:
        """Ends all updates, and what lasts of them."""
        self._lasting_bytes = 0
        self._restart([])

    def _restart(self, left: list[tuple[int, bool]]) -> None:
        self._waiting, self._last = [], {}
        self.peak_bytes = dict.fromkeys(self.peak_bytes, 0)
        self._kept_bytes = self._lasting_bytes
        if self._lasting_bytes:
            self._last[Tier.DEVICE] = PieceBytes(coming=0, working=0, leaving=self._lasting_bytes), 0
            self.peak_bytes[Tier.DEVICE] = self._lasting_bytes
        for block, is_here in left:
            self.submit(block, is_here=is_here)

    def _join(self, place: Tier, row: PieceRow) -> None:
        first, last = row.pieces[0], row.pieces[-1]
        # What lasts of an update stays until another one in that stream takes its place.
        is_beside = bool(row.lasting_bytes)
        kept = self._kept_bytes if place is Tier.DEVICE and not is_beside else 0
        highest = max(self.peak_bytes[place], row.later_bytes + kept)
        left = 0
        # Those of the other processor that lie between two of this one's only take time: the two
        # are counted as neighbours.
        if place in self._last:
            before, left_before = self._last[place]
            highest = max(highest, left_before + before.coming + before.working + first.coming)
            left = before.leaving
        self.peak_bytes[place] = max(highest, left + row.first_bytes)
        leaves_last = replace(last, leaving=last.leaving + kept) if kept else last
        self._last[place] = leaves_last, row.pieces[-2].leaving + kept if len(row.pieces) > 1 else left
        self._kept_bytes = row.lasting_bytes if is_beside else self._kept_bytes


def moved_weight_bytes(plan: Plan, profile: Profile, device: str) -> int:
    """Host memory through which updates on the host take new weights to the device, and bring them
    where no master says them: `MOVED_PIECES` of the largest.
    """
    largest = 0
    for block in profile.blocks:
        homes = plan.block(block.name)
        if not homes.updates_on_host(device) or homes.weight_home is not Tier.DEVICE:
            continue
        for parameter in block.parameters:
            if parameter.name in profile.updates and parameter.requires_grad and (numel := math.prod(parameter.shape)):
                elements = max(_cut(numel, profile.updates[parameter.name]), default=0)
                largest = max(largest, parameter.nbytes // numel * elements)
    return MOVED_PIECES * largest


def added_bytes(block: BlockProfile) -> int:
    """The largest piece that a gradient of a block is added by: what comes from its home, or is
    widened to be added here.
    """
    return _WIDE_BYTES * min(block.largest_gradient_elements, PIECE_ELEMENTS)


def widened_bytes(block: BlockProfile) -> tuple[int, int]:
    """Returns what is made to take a block's gradients home where they are narrower here than
    there: a parameter's pieces are widened one by one.

    Returns:
        Bytes of the last piece of each parameter, which leave together, and of the largest piece
        before these.
    """
    sizes = [
        (_WIDE_BYTES * ((math.prod(p.shape) - 1) % PIECE_ELEMENTS + 1), math.prod(p.shape) > PIECE_ELEMENTS)
        for p in block.parameters
        if p.requires_grad and p.nbytes < p.master_nbytes
    ]
    return sum(size for size, _ in sizes), _WIDE_BYTES * PIECE_ELEMENTS * any(is_cut for _, is_cut in sizes)
