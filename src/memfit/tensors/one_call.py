"""OneCall: the guard of an object that makes one public call at a time.

In: names of calls as they begin. Out: tokens that last as long as their calls; a refusal in words
for a call that comes from a signal handler, another thread or a forked child meanwhile.

[Note: one call at a time]
A signal handler runs between any two bytecodes of the main thread. A call that it makes meets locks
that the call below it has taken, and waits for ever, or meets blocks that are half visited. So does
a call of another thread. A public call therefore takes a token in its first line and gives it back
in its last; whoever comes meanwhile is refused before anything is touched.

[Note: tokens that cannot stay]
A handler may raise between any two bytecodes too, such as `SystemExit`. A guard that such an error
leaves closed would refuse `close`. So the token is an object whose `__exit__` is C code, inside of
which no handler runs, and the guard refers to it weakly: a token that is dropped is given back.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO

from memfit.core.errors import UsageError

_OF_OTHERS = threading._DummyThread


class OneCall:
    """Guard of one object. See [Note: one call at a time]."""

    def __init__(self) -> None:
        # Reentrant: a handler may come while the lock is held, and its call is over before that of
        # the code below goes on.
        self._lock = threading.RLock()
        self._token: weakref.ref[BytesIO] | None = None
        self._name, self._thread = "", threading.current_thread()
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True if this process is a fork of the one that made the object."""
        return os.getpid() != self._pid

    def enter(self, name: str) -> BytesIO:
        """Begins a call; `with calls.enter(name):` ends it.

        Args:
            name: of the call, as people write it.

        Raises:
            UsageError: another call is under way, or this process is a forked one.
        """
        token = self.enter_if_free(name)
        if token is not None:
            return token
        if self.is_mine:
            raise UsageError(
                f"{name} inside of {self._name}, which is under way in this thread: a signal handler or a function that it runs asks for it. "
                "Note the wish there, and fulfil it at the end of the loop's body. job.commit() may be called anywhere"
            )
        raise self._in_other_thread(name)

    def check_thread(self, name: str) -> None:
        """Refuses work of other threads while a call is under way. Threads that Python did not
        make, such as autograd's of a device, work for the call.

        Args:
            name: of the work.
        """
        thread = threading.current_thread()
        if thread is not self._thread and type(thread) is not _OF_OTHERS and self.is_under_way:
            raise self._in_other_thread(name)

    def _in_other_thread(self, name: str) -> UsageError:
        return UsageError(
            f"{name} is called in thread {threading.current_thread().name!r} while {self._name} is under way in thread {self._thread.name!r}: one call at a time. "
            "Hold a threading.Lock of your own around both calls"
        )

    def enter_if_free(self, name: str) -> BytesIO | None:
        """Begins a call as `enter` does; None where another one is under way."""
        if self.is_forked:
            raise UsageError(
                f"{name} in a forked process: the worker threads live in process {self._pid}; call memfit.fit in the process that uses the job"
            )
        with self._lock:
            if self.is_under_way:
                return None
            token = BytesIO()
            self._name, self._thread = name, threading.current_thread()
            self._token = weakref.ref(token)
            return token

    def leave(self, name: str) -> AbstractContextManager[object]:
        """Returns a context for the end of a public context, which cannot be refused: the end is a
        call, unless another one is under way.
        """
        token = None if self.is_forked else self.enter_if_free(name)
        return nullcontext() if token is None else token

    @property
    def is_mine(self) -> bool:
        """True if the caller runs inside of the call that is under way."""
        return self._thread is threading.current_thread() and self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """True if a call has begun and not ended."""
        token = None if self._token is None else self._token()
        return token is not None and not token.closed
