"""The work of a server: one thread for each worker, which answers what it asks.

In: connections to the workers, the parameters that are served. Out: pushes taken, pulls answered,
until all workers have left or are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from memfit.distributed.transport import BrokenTransportError
from memfit.parameter_server.pairs import Ask, Head, Pair
from memfit.parameter_server.push_clocks import Clocks, ServerFailedError
from memfit.parameter_server.served import ServedParameters


class Serving:
    """Answers workers, each in a thread of its own. See `push_clocks`, [Note: clocks].

    Args:
        served: the parameters.
        pairs: by worker, the connection to it.
        staleness: of the clocks.

    Attributes:
        lost: workers that ended without leaving.
        received: bytes of gradients that have come.
        sent: bytes of weights that have gone.
    """

    def __init__(self, served: ServedParameters, pairs: Mapping[int, Pair], staleness: int) -> None:
        self._served = served
        self._pairs = dict(pairs)
        self._numbers = {worker: number for number, worker in enumerate(sorted(pairs))}
        self._clocks = Clocks(sorted(pairs), sorted(served.trained), staleness, served.update)
        self.lost: list[int] = []
        self.received = self.sent = 0
        self._counting = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"memfit-serve-{worker}", daemon=True)
            for worker in self._pairs
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> BaseException | None:
        """Why the server failed; None while all is well."""
        return self._clocks.failure

    def fail(self, error: BaseException) -> None:
        """Ends all that workers wait for: the error is the answer."""
        self._clocks.fail(error)

    def wait(self) -> None:
        """Returns when all workers have left or are lost."""
        for thread in self._threads:
            # In turns: a wait without an end would not see Ctrl-C on every platform.
            while thread.is_alive():
                thread.join(0.2)

    def _serve(self, worker: int) -> None:
        pair = self._pairs[worker]
        try:
            while self._answer(worker, pair, pair.receive_head()):
                pass
        except BrokenTransportError:
            # Its sockets have closed: what it had begun to push does not count.
            self.lost.append(worker)
        except BaseException as error:  # noqa: BLE001, told to the other workers, and raised by `close`
            self.fail(error)
        finally:
            self._leave(worker)
            pair.close()

    def _leave(self, worker: int) -> None:
        try:
            self._clocks.leave(worker)
        except ServerFailedError:
            return
        except BaseException as error:  # noqa: BLE001, as above: an update failed that waited for this worker
            self.fail(error)

    def _answer(self, worker: int, pair: Pair, head: Head) -> bool:
        """Answers a request; returns False when the worker leaves."""
        if head.what == Ask.PUSH:
            self._take(worker, pair, head)
        elif head.what == Ask.PULL:
            self._give(worker, pair, head.index)
        else:
            self._say(pair, lambda: pair.send_head(Head(0)))
        return head.what != Ask.LEAVE

    def _take(self, worker: int, pair: Pair, head: Head) -> None:
        index, has_come = head.index, not head.has_bytes
        nbytes = self._served.nbytes(index) if head.has_bytes else 0
        try:
            with self._clocks.push(worker, index, has_gradient=head.has_bytes) as is_first:
                if head.has_bytes:
                    sink = self._served.gradient_sink(index, self._numbers[worker], is_first=is_first)
                    pair.receive_bytes(nbytes, sink.part, sink.take)
                    has_come = True
                    sink.add()
        except ServerFailedError:
            # Told with the worker's next pull; until then it must find somebody who listens.
            if not has_come:
                pair.drop_bytes(nbytes)
        except BrokenTransportError:
            raise
        except Exception as error:  # noqa: BLE001, told to all workers, and raised by `close`
            self.fail(error)
        with self._counting:
            self.received += nbytes

    def _give(self, worker: int, pair: Pair, index: int) -> None:
        nbytes = self._served.nbytes(index)

        def give() -> None:
            with self._clocks.pull(worker, index) as lag:
                pair.send_head(Head(0, lag, has_bytes=True))
                pair.send_bytes(nbytes, self._served.weight_part(index))
            with self._counting:
                self.sent += nbytes

        self._say(pair, give)

    def _say(self, pair: Pair, answer: Callable[[], None]) -> None:
        """Gives an answer, or says why the server cannot."""
        if self.failure is None:
            try:
                answer()
            except ServerFailedError:
                pass
            else:
                return
        assert self.failure is not None
        pair.send_text(f"{type(self.failure).__name__}: {self.failure}")
