"""Clocks of a parameter server: who may push and pull when.

In: what workers ask, in threads of their own. Out: turns, one after the other where they must be.

[Note: clocks]
A worker's clock of a parameter is how often it has pushed it. A pull by a worker at clock c gives
weights with the pushes of all workers up to clock c - s, s being the staleness: it waits for those
that are further behind. With s = 0 the servers are synchronous: the pushes of one clock are added
up in rank order, whoever comes first, and are one update. With s > 0 each push is an update of its
own as it comes. A worker that has left, or was lost, is waited for no more; what it had pushed
whole counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class ServerFailedError(Exception):
    """The server has failed: nothing is waited for any more."""


class _ParameterClock:
    """The clock of one parameter."""

    def __init__(self, workers: Sequence[int]) -> None:
        # By worker, its pushes that the weights have.
        self.counted = dict.fromkeys(workers, 0)
        # Workers whose push of the clock that is under way has come.
        self.came: set[int] = set()
        # One of these had a gradient.
        self.has_sum = False
        self.is_receiving = False
        self.is_updating = False
        self.readers = 0


class Clocks:
    """Clocks of all parameters, and the workers that are there. See [Note: clocks].

    Args:
        workers: their ranks, ascending.
        indices: of the parameters.
        staleness: see the note.
        update: updates a parameter with the sum of its gradients that have come. Called in the
            thread of a push, or of a worker's end; never twice at once for one parameter, nor while
            it is pulled.

    Attributes:
        failure: why the server failed; None while all is well.
    """

    def __init__(
        self, workers: Sequence[int], indices: Sequence[int], staleness: int, update: Callable[[int], None]
    ) -> None:
        self._staleness = staleness
        self._update = update
        self._live = set(workers)
        self._by_index = {index: _ParameterClock(workers) for index in indices}
        self._changed = threading.Condition()
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Ends all turns, those to come too; the first error counts."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    @contextmanager
    def push(self, worker: int, index: int, *, has_gradient: bool) -> Iterator[bool]:
        """Context in which a gradient is received, by one worker at a time for each parameter.
        Where it ends without an error the push has come.

        Args:
            worker: who pushes.
            index: of the parameter.
            has_gradient: False: the worker has not used the parameter.

        Yields:
            True if it is the first of its update, whose values are not added to others.
        """
        clock = self._by_index[index]
        with self._changed:
            self._await(lambda: self._is_turn(clock, worker))
            is_first = not clock.has_sum
            clock.is_receiving = True
        try:
            yield is_first
        except BaseException:
            with self._changed:
                clock.is_receiving = False
                self._changed.notify_all()
            raise
        with self._changed:
            clock.is_receiving = False
            clock.came.add(worker)
            clock.has_sum = clock.has_sum or has_gradient
            self._changed.notify_all()
        self._update_if_complete(index)

    @contextmanager
    def pull(self, worker: int, index: int) -> Iterator[int]:
        """Context in which weights are sent.

        Yields:
            How many of its own pushes the worker is ahead of the one furthest behind.
        """
        clock = self._by_index[index]
        with self._changed:
            own = clock.counted[worker] + (worker in clock.came)
            self._await(lambda: not clock.is_updating and own - self._least(clock, own) <= self._staleness)
            clock.readers += 1
            lag = own - self._least(clock, own)
        try:
            yield lag
        finally:
            with self._changed:
                clock.readers -= 1
                self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """Ends a worker's part: nobody waits for it any more."""
        with self._changed:
            self._live.discard(worker)
            self._changed.notify_all()
        for index in self._by_index:
            self._update_if_complete(index)

    def _least(self, clock: _ParameterClock, own: int) -> int:
        return min((clock.counted[worker] for worker in self._live), default=own)

    def _is_turn(self, clock: _ParameterClock, worker: int) -> bool:
        if clock.is_receiving or clock.is_updating or worker in clock.came:
            return False
        if self._staleness:
            return not clock.came
        # In rank order, so that the bits of a sum do not depend on who comes first.
        return all(other in clock.came for other in self._live if other < worker)

    def _is_complete(self, clock: _ParameterClock) -> bool:
        if not clock.came or clock.is_receiving or clock.is_updating:
            return False
        return self._staleness > 0 or self._live <= clock.came

    def _update_if_complete(self, index: int) -> None:
        """Updates a parameter if all that its update waits for has come."""
        clock = self._by_index[index]
        with self._changed:
            if not self._is_complete(clock) or self.failure is not None:
                return
            # Before the readers are waited for: no other thread begins the same update, and no new
            # reader comes.
            clock.is_updating = True
        try:
            with self._changed:
                self._await(lambda: not clock.readers)
            if clock.has_sum:
                self._update(index)
        except BaseException as error:
            self.fail(error)
            raise
        with self._changed:
            for worker in clock.came:
                clock.counted[worker] += 1
            clock.came.clear()
            clock.has_sum = False
            clock.is_updating = False
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        """Waits until something is so; the lock is held before and after, so that it stays so until
        the caller has noted its turn.

        Raises:
            ServerFailedError: the server has failed meanwhile.
        """
        self._changed.wait_for(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise ServerFailedError
