"""Facts of single operations that a trace asks for.

In: an operation that has run, with its arguments and results. Out: `Facts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.operators import policies_that_keep
from memfit.core.saved_policies import Saved
from memfit.core.work_kinds import Work
from memfit.profiling.amounts import operation_work
from memfit.profiling.flops import operation_flops
from memfit.profiling.measuring import Workspaces
from memfit.profiling.operations import is_random, reads_batch_statistics
from memfit.profiling.origins import written_tensors


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of an operation that the recorder asks for.

    Tensors are counted as they stand among its arguments.

    Attributes:
        workspace_bytes: inside itself.
        kernel_bytes: kept by a library, once for all operations that are alike.
        outside_bytes: taken for a moment outside of tensors.
        library: that takes memory when it is first used; "": none.
        flops: of it.
        work: amounts of all classes, its products among them.
        is_random: it draws random numbers.
        reads_statistics: over the batch.
        kept_by: policies that keep its results.
        overwritten: tensors that it writes without having looked.
        written: all that it writes.
    """

    workspace_bytes: int
    kernel_bytes: int
    outside_bytes: int
    library: str
    flops: int
    work: Work
    is_random: bool
    reads_statistics: bool
    kept_by: tuple[Saved, ...]
    overwritten: tuple[int, ...]
    written: tuple[int, ...]


def facts_of(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    out: Any,
    workspaces: Workspaces,
) -> Facts:
    """The facts of an operation that has run."""
    overwritten, written = written_tensors(func, args, kwargs)
    table = workspaces.table
    flops = operation_flops(func, args, dict(kwargs), out)
    return Facts(
        workspace_bytes=workspaces.bytes_of(func, args, kwargs, out),
        kernel_bytes=table.kernel_bytes(func, args, out),
        outside_bytes=table.outside_bytes(func, args, out),
        library=table.library(func, out),
        flops=flops,
        work=operation_work(func, args, dict(kwargs), out, flops),
        is_random=is_random(func, args, kwargs),
        reads_statistics=reads_batch_statistics(func, args, kwargs),
        kept_by=policies_that_keep(func, args, kwargs),
        overwritten=tuple(i for i, tensor in enumerate(tensors) if id(tensor) in overwritten),
        written=tuple(i for i, tensor in enumerate(tensors) if id(tensor) in written),
    )
