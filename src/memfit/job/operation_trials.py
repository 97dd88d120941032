"""Where operations are tried to find out what they take inside (see `profiling.measuring`).

In: a machine, if there is one. Out: `Workspaces`.
"""

from __future__ import annotations

from functools import partial

import torch

from memfit import devices
from memfit.allocator import Allocator, install
from memfit.core.errors import TierUnavailableError
from memfit.core.hardware import Hardware
from memfit.core.tiers import is_processor
from memfit.job.machine import Machine
from memfit.profiling.accelerator_scratch import accelerator_table
from memfit.profiling.measuring import Workspaces
from memfit.profiling.workspaces import PROCESSOR_TABLE


def workspaces_for(device: torch.device, hardware: Hardware | None = None) -> Workspaces:
    """Returns what tells the scratch of a device's kernels, or of a described machine's in its
    place.

    Without a compiler no operation is tried, and the tables alone are asked.
    """
    architecture = devices.architecture(device) if hardware is None else hardware.architecture
    is_here = hardware is None or is_processor(hardware.device)
    table = PROCESSOR_TABLE if is_here and not architecture else accelerator_table(architecture)
    try:
        return Workspaces(install().hidden_bytes, table=table)
    except TierUnavailableError:
        return Workspaces(table=table)


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
    return workspaces_for(torch.device("cpu") if machine is None else machine.device)
