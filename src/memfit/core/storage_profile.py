"""Storages of a traced step: who makes, saves, receives and holds each.

In: nothing (the `profiling` package fills it). Out: a frozen dataclass, a part of
`core.profile.TraceProfile`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StorageProfile:
    """A storage that the traced step allocated (weights and their gradients excluded).

    Attributes:
        index: position in `TraceProfile.storages`.
        nbytes: its bytes.
        segment: forward segment in which it was made (see [Note: segments of
            a trace] in `core.profile`).
        saved_inside: calls that saved it for backward between their entry and their return;
            recompute drops it, offload moves it.
        saved_outside: segments whose code between calls saved it; always kept.
        argument_of: calls that receive it as an argument; a recomputed call must hold it.
        given_apart: calls among these that receive a tensor which no call returned as it is (a
            view, or a result of code between calls): also a segment in which it is made and that
            recomputes must hold it.
        last_use: last forward segment in which an operation reads it or a call receives it (or the
            one that made it).
        uses: how often operations of the forward read it, by segment; views read nothing.
        backward_uses: how often those of the backward do, where nothing is made again.
        held_until: last forward segment at whose end the program still holds it without autograd's
            having saved it (such as logits in an output object); equal to `last_use` if not held
            longer.
        leaves: an offload moves it, of the call that saved it or got it as an argument; else it
            stays until backward (see `core.leaving`).
        is_unseen: an autograd function holds it without the saved-tensor hooks, so that it stays
            until backward under every plan.
        is_input: it belongs to the batch or is a buffer, so that it exists before and after the
            step.
        is_buffer: it is a buffer of the model (then `is_input` too), which all microbatches share:
            it counts once.
        is_lasting: the program still holds it when the step is over (a module keeps it); from the
            second step on, one like it exists before the forward and all through the step.
    """

    index: int
    nbytes: int
    segment: int
    saved_inside: tuple[int, ...] = ()
    saved_outside: tuple[int, ...] = ()
    argument_of: tuple[int, ...] = ()
    given_apart: tuple[int, ...] = ()
    last_use: int = -1
    uses: tuple[tuple[int, int], ...] = ()
    backward_uses: int = 0
    held_until: int = -1
    leaves: bool = True
    is_unseen: bool = False
    is_input: bool = False
    is_buffer: bool = False
    is_lasting: bool = False
