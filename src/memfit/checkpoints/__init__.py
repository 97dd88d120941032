"""Checkpoints: when a run is committed, what belongs to a commit, and how a store holds a whole
step at every instant.

In: a directory, the homes of a job, the user's optimizer and registered objects. Out: after any
crash, the run as it stood at the top of the loop. `Checkpointer` is what a job talks to; `schemes`
has the two ways to lay a store out.
"""

from memfit.checkpoints.checkpointer import Checkpointer, CommitReport, RunCheckpointer
from memfit.checkpoints.run_store import RunStore

__all__ = ["Checkpointer", "CommitReport", "RunCheckpointer", "RunStore"]
