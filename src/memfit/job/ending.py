"""End of a job, and what a job on several ranks cannot do.

In: an assembly. Out: the model and the optimizer, whole again; or a refusal.
"""

from __future__ import annotations

from memfit.core.errors import PeerError, UnsupportedError
from memfit.job.assembly import Assembly
from memfit.job.together import together


def check_alone(assembly: Assembly, call: str) -> None:
    """Refuses on several ranks what reads weights as it goes, which would be collective."""
    if assembly.setup.ranks is not None:
        raise UnsupportedError(
            f"{call} is for one process: on several ranks, close the job and use the model, which is whole again"
        )


def end_job(assembly: Assembly, *, restore: bool) -> None:
    """Gives everything of a job back, or gives it up; on several ranks together."""
    ranks = assembly.setup.ranks
    if ranks is None or assembly.has_ended:
        assembly.end(restore=restore)
        return
    # A group that has failed brings nothing back: what other ranks hold cannot be reached.
    is_whole = restore and ranks.failure is None
    if is_whole:
        try:
            with together(ranks, "job.close"):
                assembly.end(restore=True)
        except PeerError:
            if ranks.failure is not None:
                # Another rank was lost meanwhile: what is left here goes as well.
                end_job(assembly, restore=False)
            raise
    # First the group: until it is gone, collectives may still write to this job's memory.
    is_gone = ranks.close()
    if not is_whole and is_gone:
        for block in assembly.blocks:
            block.release(forgets_arrival=True)
        assembly.end(restore=False)
    elif not is_gone:
        assembly.machine.hard_limit.disarm()
        if assembly.setup.run is not None:
            # Memory stays until the group is gone; files need not wait for that.
            assembly.setup.run.close()
