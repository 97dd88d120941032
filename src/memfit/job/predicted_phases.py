"""Predictions of a job's phases, from its plan: loading or resuming, steps, evaluation, saves.

In: an assembly. Out: `PhasePrediction`s by the names of phases.
"""

from __future__ import annotations

from memfit.core.phase_proof import PhasePrediction
from memfit.files.writer import PIECE_BYTES
from memfit.job.assembly import Assembly

_SAVE_PIECES = 2
"""A piece is written while the next one is read."""


def predicted_phases(assembly: Assembly) -> dict[str, PhasePrediction]:
    """Returns what each phase is predicted to take by itself, over all shapes of batches so far.

    Not predicted are commits, the check that a loss adds up, inference, and looking for another
    plan.
    """
    planned = assembly.planned
    shapes = assembly.shapes.known
    step = max(each.peak_bytes for each in shapes)
    evaluation = max(each.evaluation_peak_bytes for each in shapes)
    rest = planned.prepared.resting_bytes
    save = rest + _SAVE_PIECES * PIECE_BYTES
    own = {"first step": step, "steady": step, "evaluate": evaluation, "save": save}
    # Resuming also brings optimizer states home, which else come up in the first step.
    resume = max(planned.load_bytes, rest + PIECE_BYTES + planned.beside_bytes)
    return {
        "load": PhasePrediction(whole_bytes=planned.load_bytes),
        "resume": PhasePrediction(whole_bytes=resume),
        **{
            name: PhasePrediction(
                whole_bytes=nbytes + planned.beside_bytes, tensor_bytes=nbytes + planned.budget.others_bytes
            )
            for name, nbytes in own.items()
        },
    }
