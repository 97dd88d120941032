"""Placement of every tensor that outlives its block's visit into homes, as the plan says.

In: a plan, the blocks, the optimizer's state layouts, a table of factories of homes
(`homes.factories`). Out: a `House`: weights moved in, gradient homes, state homes. What is
committed, and when, is decided elsewhere (`runs`).

[Note: what an atomic step changes]
With `is_atomic` a region on disk has two slots. Reads give the committed version, writes go to the
other slot, and `commit` flips all that were written at once. So a version must be whole, alignment
between tensors included: a region that is filled in part would go on being written in place.
Changes that are made between two steps (`job.weights()`, `load_state_dict`) are a version as well;
`keep_changes` commits them under the step's own number before anything reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType

import torch

from memfit.core.errors import StoreError
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from memfit.homes import ByteHome
from memfit.homes.encoded_weights import EncodedWeights, layout_at_home
from memfit.homes.exchanged_gradients import ExchangedGradients, Sharing
from memfit.homes.factories import HomeFactory, HomeRequest
from memfit.homes.gradients import GradientHomes
from memfit.homes.masters import RoundedMasters, SplitMasters, rest_ends, rest_nbytes, round_masters
from memfit.homes.offloaded import HomePool
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.regions import gradient_region, master_region, state_region, weight_region
from memfit.homes.weights import BlockWeights, StagedBlock
from memfit.tensors.trees import bytes_view


class House:
    """All homes of a job.

    Memory: what the plan puts on the device and the host, and what the factories of other tiers
    stage with.

    Args:
        plan: the decisions.
        blocks: their weights still in ordinary memory.
        states: by block index, without homes yet.
        factories: factories of homes, by tier; closed with the house.
        keeps_gradients: gradients can be read after the step.
        keeps_norms: gradients are clipped by their norm.
        encoded: by block, the names of the frozen weights that rest in the plan's format.
        sharing: of the homes between ranks; None: this process is alone.

    Attributes:
        factories: makers of homes, by tier.
        placed: by region, the block and the home of its bytes, in any tier.
        step: the number of the last step whose versions are current.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[BlockWeights],
        states: Mapping[int, BlockStates],
        factories: Mapping[Tier, HomeFactory],
        *,
        keeps_gradients: bool,
        keeps_norms: bool,
        encoded: Mapping[str, Collection[str]] = MappingProxyType({}),
        sharing: Sharing | None = None,
    ) -> None:
        self.plan = plan
        self._encoded = dict(encoded)
        self._sharing = sharing
        self.placed: dict[str, tuple[int, ByteHome]] = {}
        self.blocks = tuple(blocks)
        self.states = dict(states)
        self.step = 0
        # Before the requests: a home that the host updates gets a stream of its own.
        for block in self.blocks:
            on_host = plan.block(block.name).updates_on_host(block.device.type)
            block.updates_on_host = on_host and block.index in self.states
        self.factories = dict(factories)
        self._requests = {r.region: (block, r) for block in self.blocks for r in self._wanted(block)}
        leaving = {c.boundary_home for c in plan.calls} | {c.saved_home for c in plan.calls if c.saved.policy.offloads}
        self._leaving = tuple(tier for tier in leaving if not tier.traits.is_device)
        try:
            for tier in {*self._leaving, *(r.tier for _, r in self._requests.values())}:
                wanted = [_own(sharing, block, r) for block, r in self._requests.values() if r.tier is tier]
                self.factories[tier].prepare(wanted, offloads=tier in leaving)
            self.gradients = self._gradient_homes(keeps_norms=keeps_norms, keeps_gradients=keeps_gradients)
        except BaseException:
            # Nobody has this object yet who could close it: files and pinned memory would stay.
            self.close()
            raise

    def _gradient_homes(self, *, keeps_norms: bool, keeps_gradients: bool) -> GradientHomes:
        plan, sharing = self.plan, self._sharing
        homes = {block.index: self._place(r.region) for block, r in self._requests.values() if r.tag == "gradient"}
        has_masters = any(block.has_masters for block in self.blocks)
        # A norm is taken of what the update gets: of gradients in the masters' dtype.
        adds_apart = plan.adds_apart(has_masters=has_masters, clips_norm=keeps_norms)
        make = GradientHomes
        if sharing is not None:
            exchange = sharing.exchange(keeps_norms=keeps_norms, keeps_peaks=plan.scales_losses)
            make = partial(ExchangedGradients, exchange=exchange)
        return make(
            self.blocks,
            homes,
            keeps_norms=keeps_norms,
            keeps_gradients=keeps_gradients,
            keeps_peaks=plan.scales_losses,
            adds_apart=adds_apart,
        )

    def _wanted(self, block: BlockWeights) -> Iterator[HomeRequest]:
        """Yields requests for all homes of a block. Gradients at home on the device stay on
        `.grad`.
        """
        homes, states, name = self.plan.block(block.name), self.states.get(block.index), block.name
        versioned = self.plan.is_atomic
        ends = tuple(slot.offset_bytes + slot.nbytes for slot in block.slots)
        master_ends = tuple(slot.master_offset_bytes + slot.master_nbytes for slot in block.slots)
        nbytes, encoded = block.nbytes, self._encoded.get(name)
        if encoded:
            _, ends, nbytes = layout_at_home(block, self.plan.frozen_format, encoded)
        yield HomeRequest(
            region=weight_region(name), nbytes=nbytes, tier=homes.weight_home, tag="weight", ends=ends,
            is_versioned=versioned, is_updated_on_host=block.updates_on_host,
        )  # fmt: skip
        if block.has_masters and not self.plan.drops_masters:
            is_split = self.plan.splits_masters
            yield HomeRequest(
                region=master_region(name), nbytes=rest_nbytes(block) if is_split else block.master_nbytes,
                tier=homes.state_home, tag="master", ends=tuple(rest_ends(block)) if is_split else master_ends,
                is_versioned=versioned,
            )  # fmt: skip
        if states is not None and states.nbytes:
            yield HomeRequest(
                region=state_region(name), nbytes=states.nbytes, tier=homes.state_home, tag="state",
                ends=tuple(states.ends), is_versioned=versioned,
            )  # fmt: skip
        if states is not None and self.plan.accumulates(name):
            yield HomeRequest(
                region=gradient_region(name), nbytes=block.master_nbytes, tier=homes.gradient_home, tag="gradient",
                ends=master_ends,
            )  # fmt: skip

    def _place(self, region: str) -> ByteHome:
        """Makes the home of a region."""
        sharing = self._sharing
        block, request = self._requests[region]
        home = self.factories[request.tier].home(_own(sharing, block, request))
        if sharing is not None:
            home = sharing.home(block, request, home)
        self.placed[region] = block.index, home
        return home

    def move_in(
        self,
        bring: Callable[[Iterable[torch.nn.Parameter]], None] | None = None,
        take_back: Callable[[str, torch.nn.Parameter], bool] | None = None,
        stage: Callable[[BlockWeights, int], StagedBlock | None] = lambda _, __: None,
        moved: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Moves the weights home.

        Args:
            bring: materializes a parameter without bytes (put aside, or deferred); called for one
                at a time.
            take_back: see `BlockWeights.move_out`; for the block in which a failure occurred.
            stage: puts the values of a block on the host where the device has no room for so many
                bytes beside them.
            moved: told of each block that has moved, and of how many bytes.

        Raises:
            StoreError: the disk failed.
            torch.OutOfMemoryError: the limit was hit. After both, `give_back` makes the model
                complete again.
        """
        # What leaves the device goes first: it makes room for what stays.
        for block in sorted(self.blocks, key=lambda b: self.plan.block(b.name).weight_home.traits.is_device):
            stays = sum(r.nbytes for b, r in self._requests.values() if b is block and _is_of_weights(r))
            staged = stage(block, stays) if stays else None
            home: ByteHome | None = None
            masters: ByteHome | None = None
            try:
                home, masters = self._weight_homes(block)
                block.move_in(home, masters, bring, None if staged is None else staged.values)
            except BaseException:
                # While its home is still open: what has left is read back from there.
                if staged is not None:
                    staged.give_back()
                elif home is not None:
                    _undo_move(block, masters or home, take_back)
                raise
            moved(block.nbytes)

    def place_states(self, indices: Iterable[int] | None = None) -> None:
        """Makes homes for the states of blocks of these indices, or of all, where there are none
        yet: behind the weights, beside which they would stand until those have left.
        """
        for index in self.states if indices is None else indices:
            states = self.states[index]
            if states.nbytes and states.home is None:
                states.home = self._place(state_region(self.blocks[index].name))

    def _weight_homes(self, block: BlockWeights) -> tuple[ByteHome, ByteHome | None]:
        home = self._place(weight_region(block.name))
        if encoded := self._encoded.get(block.name):
            home = EncodedWeights(block, home, self.plan.frozen_format, encoded)
        if not block.has_masters:
            return home, None
        if self.plan.drops_masters:
            return home, RoundedMasters(block, home)
        rest = self._place(master_region(block.name))
        return home, SplitMasters(block, home, rest) if self.plan.splits_masters else rest

    def take_over(
        self,
        load: Callable[[str, ByteHome], None],
        forget: Callable[[Iterable[torch.nn.Parameter]], None] | None,
        *,
        has_weights: Callable[[str], bool],
        step: int,
    ) -> None:
        """Moves in as `move_in` does, with the values of the given store; the parameters' own
        values are dropped.

        Args:
            load: fills a home in memory with the bytes of a region; homes on disk have them.
            forget: called with parameters whose own values are no longer needed.
            has_weights: the store has the current weights of the block of this name, not only its
                masters.
            step: number of the step of these values.

        Raises:
            StoreError: the disk failed.
            torch.OutOfMemoryError: the limit was hit. After both, blocks that were reached have the
                store's values, the others their own.
        """
        for block in sorted(self.blocks, key=lambda b: self.plan.block(b.name).weight_home.traits.is_device):
            home, masters = self._weight_homes(block)
            region = master_region(block.name)
            # Masters first: the weights are rounded from them where the store has none.
            if region in self.placed:
                load(region, self.placed[region][1])
            if masters is None or self.plan.splits_masters or self.plan.drops_masters:
                load(weight_region(block.name), home)
            elif not (home.is_stored and has_weights(block.name)):
                round_masters(masters, block, home)  # whole masters say all of the weights
            # Behind the loads: where one fails, the block has its own values still.
            if forget is not None:
                forget([slot.parameter for slot in block.slots])
            block.rest_in(home, masters)
        for index, states in self.states.items():
            if states.nbytes:
                region = state_region(self.blocks[index].name)
                states.home = self._place(region)
                load(region, states.home)
        self.step = step

    def begin_versions(self, regions: Iterable[str]) -> None:
        """Begins a new version of these regions, which later writes belong to."""
        for region in regions:
            self.placed[region][1].begin_version()

    def give_back(
        self, *, as_given: bool = False, take_back: Callable[[str, torch.nn.Parameter], bool] | None = None
    ) -> None:
        """Gives every parameter ordinary memory again. May be repeated if a read failed.

        Memory: all weights on the device, but for those that are taken back.

        Args:
            as_given: returns parameters in the dtype that they had before; else as masters.
            take_back: see `BlockWeights.move_out`.

        Raises:
            StoreError: some weights could not be read; the others are restored.
        """
        first: StoreError | None = None
        for block in self.blocks:
            if block.home is None:
                continue
            try:
                block.move_out(as_given=as_given, take_back=take_back)
            except StoreError as error:
                first = first or error
        if first is not None:
            raise first

    def pools(self) -> dict[Tier, HomePool]:
        """Pools of homes for offloaded activations, in the tiers to which the plan offloads."""
        return {tier: self.factories[tier].pool() for tier in self._leaving}

    def first_commit(self) -> None:
        """Declares what has been moved in version 0."""
        for factory in self.factories.values():
            factory.begin()
        self.begin_versions(self.placed)

    def commit(self) -> None:
        """Makes the step's new versions current, all at once."""
        self._publish(self.step + 1)

    def keep_changes(self) -> None:
        """Makes what was written between two steps current. See [Note: what an atomic step
        changes].
        """
        if any(home.is_dirty for _, home in self.placed.values()):
            self._publish(self.step)

    def _publish(self, step: int) -> None:
        dirty = {region: home for region, (_, home) in self.placed.items() if home.is_dirty}
        # All before the first is published: a version with gaps must never become current.
        for home in dirty.values():
            home.complete()
        for tier, factory in self.factories.items():
            changed = [region for region, home in dirty.items() if home.tier is tier]
            factory.publish(step, changed, is_new=step != self.step)
        # Only now: it forgets which bytes were written, and a publish that failed needs them again.
        for home in dirty.values():
            home.begin_version()
        # Last: an interrupt before this line leaves the old number, by which `forget_step` finds
        # that the new version counts.
        self.step = step

    def forget_step(self) -> bool:
        """Drops what an unfinished step wrote into spare slots.

        Returns:
            True if its version is current nevertheless, because the interrupt came after the
            commit.
        """
        # First: the next version must not take what this step wrote for its own.
        self.begin_versions(self.placed)
        found = (factory.published_since(self.step) for factory in self.factories.values())
        published = next((step for step in found if step is not None), None)
        if published is None:
            return False
        self.step = published
        return True

    def held(self) -> Iterator[torch.Tensor]:
        """The bytes of all homes on the device."""
        for _, home in self.placed.values():
            if home.tier.traits.is_device and (held := home.bytes) is not None:
                yield bytes_view(held, 0, held.nbytes())

    @property
    def bytes_moved(self) -> tuple[dict[str, int], dict[str, int]]:
        """(read, written) bytes of the disk, and of other tiers that count them, since the
        beginning, by purpose.
        """
        moved: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        for factory in self.factories.values():
            for total, part in zip(moved, factory.bytes_moved, strict=True):
                total.update(part)
        return dict(moved[0]), dict(moved[1])

    def close(self) -> None:
        """Waits for all transfers and frees all homes; temporary files are deleted. Weights must
        have moved out before. May be repeated.

        Raises:
            StoreError: files could not be removed. All else is freed nevertheless.
        """
        self.placed.clear()
        with ExitStack() as stack:
            # The stack calls in reverse, so files first: what passes through memory of the host on
            # its way to them has ended before that is freed.
            for factory in self.factories.values():
                stack.callback(factory.close)


def _own(sharing: Sharing | None, block: BlockWeights, request: HomeRequest) -> HomeRequest:
    """Returns the request for what this process has of a region."""
    return request if sharing is None else sharing.request(block, request)


def _is_of_weights(request: HomeRequest) -> bool:
    """Tells whether a home of weights or masters is memory of the device."""
    return request.tag in ("weight", "master") and request.tier.traits.is_device


def _undo_move(
    block: BlockWeights, home: ByteHome, take_back: Callable[[str, torch.nn.Parameter], bool] | None
) -> None:
    """Restores the parameters that had left when a move failed; the others have not been
    touched.
    """
    if block.home is not None:
        return  # it has moved: `give_back` knows it
    for slot in block.slots:
        parameter = slot.parameter
        if (take_back is not None and take_back(slot.name, parameter)) or parameter.numel() == slot.numel:
            continue
        own = torch.empty_strided(slot.shape, slot.stride, dtype=slot.master_dtype, device=parameter.device)
        # Waited for: `to` reads it at once, and may be the last to hold it.
        home.read(slot.master_offset_bytes, slot.master_nbytes, own.untyped_storage()).wait()
        parameter.data = own.to(slot.given_dtype)
