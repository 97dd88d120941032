"""Ctrl-C at the two moments at which the interpreter's wake-up descriptor changes: nothing closed is left with it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.job import interrupts


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def python_hears_ctrl_c() -> Iterator[None]:
    """As in a foreground process: a shell has what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", [1, 2], ids=["as it is set", "as it is taken back"])
def test_ctrl_c_while_the_wake_up_descriptor_changes_leaves_none_behind(
    when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, before = interrupts.Interrupts(), descriptors()
    plain: Callable[..., int] = signal.set_wakeup_fd
    calls: list[int] = []

    def interrupted(number: int, **options: Any) -> int:
        found = plain(number, **options)
        calls.append(number)
        if len(calls) == when:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(signal, "set_wakeup_fd", interrupted)
    with pytest.raises(KeyboardInterrupt), held.held():
        pass
    monkeypatch.undo()
    assert plain(-1) == -1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert descriptors() == before
    assert len(calls) == 2
