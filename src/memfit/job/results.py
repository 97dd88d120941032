"""Results: what a step and an evaluation give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One training step.

    Attributes:
        loss: weighted mean over microbatches, of the whole batch.
        losses: one a microbatch, as the user's function returned it: mean or sum.
        norm: global gradient norm before clipping; None without `max_grad_norm`.
        rows: rows of the batch; of `memfit.Parts` those of all parts, or the number of parts where
            they do not show rows.
        tokens: elements of the batch's (of each part's) first integer tensor; None if it has none.
        seconds: of this step, measured.
        peak_bytes: measured peak of the step: of the process without a GPU, else of the device.
        departures: what the model did that its trace did not foresee; each was served.
        is_skipped: a gradient overflowed in fp16: nothing was updated, and the loss scale was
            lowered.
        is_finite: False when the loss (or norm) is NaN or infinite: the update was made all the
            same, as plain PyTorch does.
    """

    loss: float
    losses: tuple[float, ...]
    norm: float | None
    rows: int
    tokens: int | None
    seconds: float
    peak_bytes: int
    departures: tuple[str, ...]
    is_finite: bool
    is_skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """One forward pass: weighted mean loss (NaN of a batch that counts for nothing), one loss a
    microbatch (as the user's function returned it), seconds.
    """

    loss: float
    losses: tuple[float, ...]
    seconds: float
