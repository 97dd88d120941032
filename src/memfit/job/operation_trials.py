"""Where operations are tried to find out what they take inside (see `profiling.measuring`).

In: a machine, if there is one. Out: `Workspaces`.
"""

from __future__ import annotations

from functools import partial

from memfit.allocator import Allocator, install
from memfit.core.errors import TierUnavailableError
from memfit.job.machine import Machine
from memfit.profiling.measuring import Workspaces


def workspaces_of(machine: Machine | None = None) -> Workspaces:
    """Returns what tries operations by memfit's allocator; without a compiler it asks its table
    alone.

    On an emulated device trials are host memory: its limit may leave no room beside the model as it
    was built, and what a convolution is taken to hold inside must not depend on that.

    Args:
        machine: of the job; None: a process, whose limit is not looked at.
    """
    if machine is not None and machine.is_emulated and isinstance(machine.allocator, Allocator):
        return Workspaces(partial(machine.allocator.hidden_bytes, ledger="host"), machine.host_ledger)
    try:
        return Workspaces(install().hidden_bytes)
    except TierUnavailableError:
        return Workspaces()
