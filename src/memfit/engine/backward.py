"""Backward passes of one run: of tails, of all microbatches jointly from the cuts of their tails,
or of whole losses.

In: losses with their factors. Out: gradients on the parameters; hooks tell the run meanwhile which
call autograd has come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.core.errors import UnsupportedError
from memfit.core.schedule import Schedule
from memfit.engine.crossing import differentiate_on_host, refuse_detours
from memfit.engine.seeding import Seeds
from memfit.engine.tail import CutEdge, TailAliases, differentiate_tail, hooks_of, withheld
from memfit.engine.work import EngineParts
from memfit.tensors.autograd_graph import sequence_number

_NO_BYTES = ("storage of size 0", "data is not allocated yet")
"""Part of torch's message when it reads a tensor whose storage was freed."""


class BackwardPasses:
    """Passes of one run. See `engine.tail`, [Note: tail at once].

    Args:
        parts: of the engine.
        schedule: of the run.
        is_new: no run of this step has come to its end yet.

    Attributes:
        tail: first call of the tail; None: there is none.
        aliases: of weights that the tail shares with calls before it.
    """

    def __init__(self, parts: EngineParts, schedule: Schedule, *, is_new: bool) -> None:
        self.tail = schedule.tail
        self.aliases = _aliases(parts, schedule)
        self._blocks = parts.blocks
        self._has_accelerator = parts.has_accelerator
        self._is_new = is_new
        self._cuts: list[CutEdge] = []
        self._hooks_before_tail: list[dict[int, Any]] = []
        self._tail_began: dict[int, int] = {}

    @property
    def has_cuts(self) -> bool:
        """True if a tail has left gradients for a joint backward."""
        return bool(self._cuts)

    def is_in_tail(self, call: int) -> bool:
        """Tells whether the call belongs to the tail."""
        return self.tail is not None and call >= self.tail

    def begin_tail(self, microbatch: int) -> None:
        """Marks the beginning of a microbatch's tail: nodes that are made later belong to it, also
        if its first call is left out.
        """
        self._tail_began.setdefault(microbatch, sequence_number())

    def watch_cut(self, outputs: Iterable[torch.Tensor]) -> None:
        """Withholds the hooks on outputs of a call before the tail until the joint backward."""
        # The dictionaries, not the tensors: holding an output would keep its graph past the joint
        # backward.
        self._hooks_before_tail += [hooks_of(t) for t in outputs if t.grad_fn is not None]

    def run_tail(self, microbatch: int, seeds: Seeds) -> None:
        """Runs the backward of a microbatch's tail to its cut."""
        began = self._tail_began.get(microbatch, sequence_number())
        # Withheld: the tail's backward asks for the gradients of these tensors, which would advance
        # the list to their calls' backward too early.
        with withheld(self._hooks_before_tail), self._absent_weights_told():
            self._cuts.extend(differentiate_tail(seeds.losses.pop(), seeds.factors[0], began, self.aliases))
        # The next microbatch's tail makes aliases of its own.
        self.aliases.forget()

    def run_joint(self) -> None:
        """Runs one backward from the cuts of all microbatches."""
        # Off this object before autograd runs: nothing of the graph may outlive its backward.
        cuts, self._cuts = self._cuts, []
        self._run_from(cuts)

    def run_whole(self, seeds: Seeds) -> None:
        """Runs one backward of the sum of these losses."""
        if len(seeds.losses) > 1 and self._has_accelerator:
            # All roots must lie in the accelerator's queue. See `engine.crossing`, [Note: one
            # ready queue].
            pairs = zip(seeds.losses, seeds.factors, strict=True)
            starts = [start for loss, factor in pairs for start in differentiate_on_host(loss, factor)]
            # The starts hold what is still needed; a loss would hold its whole graph.
            seeds.losses.clear()
            self._run_from(starts)
        else:
            with self._absent_weights_told():
                torch.autograd.backward(seeds.losses, seeds.factors)
            seeds.losses.clear()

    def _run_from(self, starts: list[CutEdge]) -> None:
        """Runs backward from these starts, and empties the list, so that nothing of the graph
        outlives its backward.
        """
        if self._has_accelerator and self._is_new:
            refuse_detours(start.edge.node for start in starts)
        edges, gradients = [start.edge for start in starts], [start.gradient for start in starts]
        # The caller's list: it would keep nodes and gradients past their backward.
        starts.clear()
        with self._absent_weights_told():
            torch.autograd.backward(edges, gradients)

    @contextmanager
    def _absent_weights_told(self) -> Iterator[None]:
        """Context that translates torch's error about a storage without bytes. See
        `engine.side_tensors`,
        [Note: side tensors].
        """
        try:
            yield
        except RuntimeError as error:
            away = [block.name for block in self._blocks if block.travels and not block.is_here]
            if not away or not any(words in str(error) for words in _NO_BYTES):
                raise
            names = ", ".join(repr(name) for name in away[:3]) + (", ..." if len(away) > 3 else "")
            raise UnsupportedError(
                f"backward reads weights that are away (of {names}): in this step a gradient reached a call by a tensor that it does not return and that "
                "the traced batch gave none (kept by a hook or in a closure, for instance). Plan weight_home='device' for these blocks, or give `fit` a "
                "sample batch that takes this way, so that it is planned for"
            ) from error

    def forget(self) -> None:
        """Drops all references to the graph."""
        self._cuts.clear()
        self._hooks_before_tail.clear()
        self.aliases.forget()


def _aliases(parts: EngineParts, schedule: Schedule) -> TailAliases:
    if schedule.tail is None:
        return TailAliases((), set())
    calls = schedule.calls
    before = {b for call in calls[: schedule.tail] for b in call.blocks}
    tail_names = {call.site for call in calls[schedule.tail :]}
    return TailAliases(
        [site.module for site in parts.sites if site.name in tail_names],
        {id(slot.parameter) for b in before for slot in parts.blocks[b].slots},
    )
