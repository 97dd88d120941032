"""Policies of a plan applied to calls: which frame manages a call's saved tensors.

In: the plan's policy for each call. Out: frames for the engine (see `frames`). What a policy
is stands in `core.saved_policies`; a new one changes nothing here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memfit.core.plan import Plan
from memfit.core.profile import CallProfile
from memfit.core.shape import check_again
from memfit.core.tiers import Tier
from memfit.engine.engine import Engine
from memfit.engine.frames import CallSite, Frame, make_frame
from memfit.engine.offload import Offloader
from memfit.engine.recompute import SegmentGroup
from memfit.engine.sites import Site
from memfit.engine.writes import Writes
from memfit.homes.offloaded import HomePool
from memfit.homes.weights import BlockWeights


class CallFrames:
    """Makes frames for the calls of one job.

    Memory: one small object a call; frames hold what the plan says.

    Args:
        plan: with the policies.
        blocks: their flat buffers stay referenced, whatever the policy.
        pools: make homes of offloaded tensors, by tier.
        device: where compute runs.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[BlockWeights],
        pools: Mapping[Tier, HomePool],
        *,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._device = device
        self._writes = Writes()
        self._offloader = Offloader(pools, device=device, writes=self._writes) if pools else None
        self._blocks = tuple(blocks)
        self._staying: set[int] = set()
        self._calls: Sequence[CallProfile] = ()
        self._group_of: dict[int, int] = {}
        self._groups: dict[tuple[int, int], SegmentGroup] = {}
        self._sites: dict[tuple[str, bool], CallSite] = {}
        self._engine: weakref.ref[Engine] | None = None

    def attach(self, engine: Engine) -> None:
        """Lets recomputed calls run while this engine's hooks ignore them."""
        self._engine = weakref.ref(engine)

    def begin_step(self, plan: Plan, calls: Sequence[CallProfile], staying: Iterable[torch.Tensor]) -> None:
        """Prepares for a step.

        Args:
            plan: of the step: the job's, with fewer microbatches if the batch has fewer rows.
            calls: as traced for this batch.
            staying: tensors that are there anyway: buffers and the batch.

        Raises:
            UnsupportedError: a call that the plan recomputes cannot be run twice.
        """
        self._plan = plan
        check_again(plan, calls)
        self._calls = calls
        self._groups.clear()
        self._group_of = {
            call: first
            for first, last in self._plan.segments(len(calls))
            if last > first
            for call in range(first, last + 1)
        }
        # Each step anew: a storage that NumPy has seen is left to it.
        self._staying = {block.storage._cdata for block in self._blocks}
        self._staying.update(t.untyped_storage()._cdata for t in staying)

    def watching(self) -> AbstractContextManager[None]:
        """Returns the context of a microbatch's forward, which watches for changes in place of
        tensors that are not simply kept.
        """
        return self._writes.watching() if self.manages else nullcontext()

    @property
    def manages(self) -> bool:
        """True if something that a call of the step saves is not simply kept."""
        return any(not self._plan.call(call.index).saved.policy.keeps_all for call in self._calls)

    def note_write(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor was changed in place where `watching` did not look."""
        self._writes.note(tensor, is_certain=True)

    def begin(
        self, call: int, microbatch: int, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        """Returns the frame of one call; None if everything is kept."""
        policy = self._plan.call(call)
        if policy.saved.policy.keeps_all or not torch.is_grad_enabled():
            return None
        group = None
        if call in self._group_of:
            group = self._groups.setdefault((self._group_of[call], microbatch), SegmentGroup())
        profile = self._calls[call]
        return make_frame(
            policy,
            self._site(site, copies_inputs=profile.mutates_inputs),
            args,
            kwargs,
            offloader=self._offloader,
            group=group,
        )

    def _site(self, site: Site, *, copies_inputs: bool) -> CallSite:
        key = (site.name, copies_inputs)
        if key not in self._sites:
            assert self._engine is not None
            self._sites[key] = CallSite(
                name=site.name,
                module=site.module,
                call=_RunAgain(site, self._engine),
                device=self._device,
                stays=_Stays(weakref.ref(self)),
                copies_inputs=copies_inputs,
                writes=self._writes,
            )
        return self._sites[key]

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Tells whether the storage is a weight's, a buffer's or the batch's, which stay in any
        case.
        """
        return storage._cdata in self._staying


class _RunAgain:
    """Runs a module while the engine's hooks ignore it. Holds the engine weakly, since frames live
    in autograd's graph.
    """

    def __init__(self, site: Site, engine: weakref.ref[Engine]) -> None:
        self._module = site.module
        self._blocks = site.blocks
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        assert engine is not None, "a call is recomputed after its engine has gone"
        with engine.recomputing(self._blocks):
            # Not `module(...)`: a subclass's `__call__` (transformers' layers checkpoint themselves
            # there) is outside of the hooks.
            return torch.nn.Module.__call__(self._module, *args, **kwargs)


class _Stays:
    def __init__(self, frames: weakref.ref[CallFrames]) -> None:
        self._frames = frames

    def __call__(self, storage: torch.UntypedStorage) -> bool:
        frames = self._frames()
        return frames is not None and frames.stays(storage)
