"""The legal order of forwards and backwards: what autograd will do, whatever a schedule says.

In: starts, forwards, seeds, the joint and backwards one by one. Out: why one is out of order; what
is still to come.
"""

from __future__ import annotations

from memfit.core.schedule import Backward, Forward, Joint, Seed, Start
from memfit.core.shape import StepShape


class Passes:
    """Follows forwards and backwards.

    Autograd runs the latest-made node first, so within one backward (of one loss or of a sum)
    segments come back in the exact reverse of the order in which they went forward, over all its
    microbatches.

    Attributes:
        segment_index: by first call: the segment.
    """

    def __init__(self, shape: StepShape, microbatches: int) -> None:
        self.segment_index = {first: i for i, (first, _) in enumerate(shape.segments)}
        self._shape = shape
        self._microbatches = microbatches
        self._has_tail = shape.tail_segment < len(shape.segments)
        self._started: set[int] = set()
        self._seeded: set[int] = set()
        self._forwards: list[tuple[int, int]] = []
        self._progress: dict[int, int] = {}
        self._returned: set[tuple[int, int]] = set()
        self._has_joined = False
        # Backwards of the pass that runs, next one last.
        self._pending: list[tuple[int, int]] = []
        # Backwards of the whole step that contribute to a block and have not run, by block.
        self._remaining: dict[int, int] = {}
        for segment in range(len(shape.segments)):
            for block in {*shape.contributes[segment]}:
                if shape.has_backward[segment]:
                    self._remaining[block] = self._remaining.get(block, 0) + microbatches

    @property
    def is_over(self) -> bool:
        """All backwards of the step have run."""
        return len(self._seeded) == self._microbatches and not self._pending and not self._joint_backwards()

    @property
    def has_seeded(self) -> bool:
        """A backward has begun."""
        return bool(self._seeded)

    @property
    def is_in_tail(self) -> bool:
        """The tail of a microbatch is running back: what it makes is not whole before its last
        backward.
        """
        return self._has_tail and bool(self._pending) and self._pending[0][0] >= self._shape.tail_segment

    def has_run(self, segment: int, microbatch: int) -> bool:
        """Tells whether the segment went forward for this microbatch."""
        return self._progress.get(microbatch, 0) > segment

    def has_returned(self, segment: int, microbatch: int) -> bool:
        """Tells whether the segment came back for this microbatch."""
        return (segment, microbatch) in self._returned

    def contributes_later(self, block: int) -> bool:
        """Tells whether a backward still to come in this step adds to the gradient."""
        if block in self._shape.loose:
            return not self.is_over
        return self._remaining.get(block, 0) > 0

    def contributes_in_stage(self, block: int) -> bool:
        """Tells whether a backward still to come in the running pass adds to the gradient."""
        if block in self._shape.loose:
            return bool(self._pending)
        return any(block in self._shape.contributes[segment] for segment, _ in self._pending)

    def refuse(self, action: Start | Forward | Seed | Joint | Backward) -> str | None:
        """Returns why an action is out of order; None if it is not."""
        match action:
            case Start(microbatch=m):
                return None if m in range(self._microbatches) and m not in self._started else "it cannot start (again)"
            case Forward():
                return self._refuse_forward(action)
            case Seed():
                return self._refuse_seed(action)
            case Joint():
                return self._refuse_joint(action)
            case Backward():
                return self._refuse_backward(action)

    def take(self, action: Start | Forward | Seed | Joint | Backward) -> None:
        """Takes the effect of an action that was not refused."""
        match action:
            case Start(microbatch=m):
                self._started.add(m)
            case Forward(first=first, microbatch=m):
                self._forwards.append((self.segment_index[first], m))
                self._progress[m] = self.segment_index[first] + 1
            case Seed(first=first, last=last):
                self._seeded.update(range(first, last + 1))
                begin = self._shape.tail_segment if self._has_tail else 0
                self._pending = self._backwards(range(first, last + 1), begin, len(self._shape.segments))
            case Joint():
                self._pending = self._joint_backwards()
                self._has_joined = True
            case Backward(first=first, microbatch=m):
                segment, _ = self._pending.pop()
                self._returned.add((segment, m))
                for block in self._shape.contributes[segment]:
                    self._remaining[block] -= 1

    def missing(self, *, is_training: bool) -> str | None:
        """Names what is still to come before the end of the step; None if nothing is."""
        for m in range(self._microbatches):
            if self._progress.get(m, 0) < len(self._shape.segments):
                return f"microbatch {m} has not run forward to its end"
        return None if self.is_over or not is_training else "backwards are still to come"

    def _refuse_forward(self, action: Forward) -> str | None:
        m = action.microbatch
        if m not in self._started:
            return f"microbatch {m} has not started"
        segment = self.segment_index.get(action.first)
        if segment is None or self._shape.segments[segment] != (action.first, action.last):
            return "this is not a segment of the plan"
        if self._progress.get(m, 0) != segment:
            return f"microbatch {m} is at segment {self._progress.get(m, 0)}, not at {segment}"
        if self._pending:
            return "a backward is running"
        return None

    def _refuse_seed(self, action: Seed) -> str | None:
        chosen = range(action.first, action.last + 1)
        if not chosen or chosen[-1] >= self._microbatches or self._seeded & set(chosen):
            return "these microbatches cannot be seeded (again)"
        if self._pending:
            return "a backward is running"
        if any(self._progress.get(m, 0) < len(self._shape.segments) for m in chosen):
            return "their forwards have not all run"
        is_whole = len(chosen) == self._microbatches
        is_together = self._shape.takes_turns and not self._has_tail
        if not is_together and len(chosen) > 1:
            return "in this order each microbatch is seeded alone"
        if is_together and not is_whole:
            return "in layer-major order without a tail all microbatches are seeded together"
        return None

    def _refuse_joint(self, action: Joint) -> str | None:
        if not self._has_tail:
            return "there is no tail, so the seeds run through all backwards"
        if self._pending:
            return "a backward is running"
        if (action.first, action.last) != (0, self._microbatches - 1):
            return "it takes all microbatches"
        if len(self._seeded) < self._microbatches:
            return "the tails of all microbatches have not run back"
        return None if self._joint_backwards() else "no backward is left for it"

    def _refuse_backward(self, action: Backward) -> str | None:
        if not self._pending:
            return "no backward is running that it belongs to"
        segment, m = self._pending[-1]
        first, last = self._shape.segments[segment]
        if (action.first, action.last, action.microbatch) != (first, last, m):
            return f"autograd comes to {Backward(first, last, m)} next"
        return None

    def _joint_backwards(self) -> list[tuple[int, int]]:
        """Backwards of the pass from the tail's cut, if it is still to come."""
        if not self._has_tail or self._has_joined:
            return []
        return self._backwards(range(self._microbatches), 0, self._shape.tail_segment)

    def _backwards(self, microbatches: range, begin: int, end: int) -> list[tuple[int, int]]:
        """Lists backwards in the order of their forwards, so that the next one stands last."""
        return [
            (segment, m)
            for segment, m in self._forwards
            if m in microbatches and begin <= segment < end and self._shape.has_backward[segment]
        ]
