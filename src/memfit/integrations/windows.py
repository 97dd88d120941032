"""Windows of accumulation of transformers' `Trainer`, each made as one step.

In: the batches of a window, which the trainer asks for one by one. Out: the losses, the norm and
the update that its own loop would have come to.

[Note: collected windows]
The first `training_step` of a window makes all of it, by one `job.step(memfit.Parts(...))`: weights
that travel come once a window, where the parts pass layer by layer. A part's loss is the host's own
`training_step` up to its backward, so that what it divides by, counts and logs is the host's. What
the host does from there to the update (backward, clipping, `optimizer.step`) has been done by then,
and gives what it came to. Callbacks that look between backward and update would see neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from memfit.api import Job, Parts
from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.planning_state import is_tracing
from memfit.tensors.with_frozen import saved_model


@dataclass
class Window:
    """A window of accumulation, of which the host asks batch by batch.

    Attributes:
        batches: all of it.
        items: the host's count of what their losses are means over; None: it does not count.
        losses: of batches that the host has not asked for yet.
        norm: of the gradients, before they were clipped.
        is_running: its step is being made.
    """

    batches: list[Any]
    items: Any
    losses: list[float] = field(default_factory=list[float])
    norm: float | None = None
    is_running: bool = False


class CollectedWindows:
    """The part of `MemfitMixin` that makes a window at once. See [Note: collected windows].

    Attributes:
        job: the trainer's.
    """

    job: Job | None
    args: Any
    accelerator: Any
    optimizer: Any
    callback_handler: Any
    _memfit_window: Window | None = None
    _memfit_loss: torch.Tensor | None = None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Trainer.training_step`. The first one of a window makes its step."""
        window = self._memfit_window
        if window is None or self.job is None or window.is_running:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if not window.losses:
            window.is_running = True
            try:
                result = self.job.step(Parts([dict(batch) for batch in window.batches]))
            finally:
                window.is_running = False
            window.losses, window.norm = list(result.losses), result.norm
        return torch.tensor(window.losses.pop(0), device=self.args.device)

    def _memfit_part(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the loss that the host's `training_step` would run back."""
        window = self._memfit_window
        assert window is not None
        with uncounted(self) if is_tracing() else nullcontext():
            super().training_step(saved_model(model), dict(batch), window.items)  # type: ignore[misc]
        # Parts take turns at the entries of blocks, and between the host's backward and here is
        # none: it is this part's.
        loss, self._memfit_loss = self._memfit_loss, None
        assert loss is not None
        return loss

    @contextmanager
    def _memfit_collecting(self) -> Iterator[None]:
        """Context in which the host's backward notes the loss, its clipping gives the window's
        norm, and its update is made already.

        Raises:
            UnsupportedError: a callback looks between backward and update.
        """
        asking = TrainerCallback.on_pre_optimizer_step
        looking = [c for c in self.callback_handler.callbacks if type(c).on_pre_optimizer_step is not asking]
        if looking:
            raise UnsupportedError(
                f"the callback {type(looking[0]).__name__} looks at gradients before the update (on_pre_optimizer_step), which has been made by then with "
                "memfit={'mode': 'collected'}: leave 'mode' out, or the callback"
            )

        def note(loss: torch.Tensor, **_: Any) -> None:
            self._memfit_loss = loss

        def norm(*_: Any, **__: Any) -> torch.Tensor | None:
            window = self._memfit_window
            return None if window is None or window.norm is None else torch.tensor(window.norm)

        def nothing(*_: Any, **__: Any) -> None:
            """Updates nothing: `job.step` has."""

        places = [
            (self.accelerator, "backward", note),
            (self.accelerator, "clip_grad_norm_", norm),
            (self.optimizer, "step", nothing),
        ]
        before = [vars(owner).get(name) for owner, name, _ in places]
        for owner, name, stand_in in places:
            setattr(owner, name, stand_in)
        try:
            yield
        finally:
            for (owner, name, _), own in zip(places, before, strict=True):
                if own is None:
                    del vars(owner)[name]
                else:
                    setattr(owner, name, own)


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Context in which TRL's trainers count into metrics that are dropped."""
    kept = {name: getattr(trainer, name) for name in ("_metrics", "_total_train_tokens") if hasattr(trainer, name)}
    if "_metrics" in kept:
        trainer._metrics = {mode: type(found)(list) for mode, found in kept["_metrics"].items()}  # noqa: SLF001, TRL's
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)


def collects(mode: object) -> bool:
    """Tells whether windows are collected.

    Raises:
        UsageError: an unknown mode.
    """
    if mode not in ("lines", "collected"):
        raise UsageError(
            f"memfit={{'mode': {mode!r}}}: it is 'lines', in which the trainer's own loop runs, or 'collected', in which a window of accumulation is one step"
        )
    return mode == "collected"
