"""Facts of single operations that a trace asks for.

In: an operation that has run, with its arguments and results. Out: `Facts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.core.limits import KERNELS_KEPT
from memfit.core.operators import argument_of, policies_that_keep, written_arguments
from memfit.core.saved_policies import Saved
from memfit.core.work_kinds import Work
from memfit.trace.measuring import Workspaces
from memfit.trace.operations import is_random, operation_flops, operation_work, reads_batch_statistics
from memfit.trace.traced_trees import operator_tensors

# Follows what values are made from: the batch, random numbers, each buffer as the forward found it.
#
# In: operations with their storages, as the recorder sees them. Out: which buffers forbid that the
# batch is cut.
#
# [Note: buffers and microbatches]
# A forward may change buffers. Cut into k microbatches, a step changes them k times instead of
# once, from parts of the rows, and in an order that the plan chooses (layer-major order meets the
# microbatches last to first). That is as good as the whole batch only where neither the rows nor
# the order can be told from what comes out:
#
# - a buffer whose new value is made from the batch or from random numbers forbids it: running means
#   and ranges of activations, codebooks, "the last input";
# - so does a changed buffer whose value at the forward's entry reaches the loss, or a decision of
# the
#   program: each microbatch would meet what the one before it left behind (power iterations,
#   annealing by a count);
# - so does a buffer that is written in place and saved for backward: the next microbatch would
#   overwrite what the backward of this one needs;
# - counts of forwards that nothing reads, and caches made from weights and constants (masks,
#   positions, rotations), are free. Counts then count microbatches, as they do in plain
# accumulation.
#
# Values are followed by storage, through operations; where a part is overwritten, the origins of
# the whole stay. What a program learns as a Python number is taken to reach the loss, and a
# floating-point number of the batch that it learns to reach every buffer that changes (`mask.all()`
# and lengths are not).

aten = torch.ops.aten

# An origin is a bit: these two, and from there on one for each buffer.
_BATCH, _RANDOM, _FIRST_BUFFER = 1, 2, 4
# Results that take nothing but shapes from their tensors.
_OF_SHAPES = {
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like, aten.randint_like,
    aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full,
}  # fmt: skip
# What these find in the tensor that they change is gone.
_OVERWRITING = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_}


class Traceable(Protocol):
    """A storage, as the recorder knows it."""

    nbytes: int
    origins: int
    is_written: bool

    @property
    def is_saved(self) -> bool:
        """Autograd saved it."""
        ...


class Origins:
    """The origins of all storages of one forward.

    Memory: an integer a storage, with a bit for each buffer.
    """

    def __init__(self) -> None:
        self._found: dict[str, Traceable] = {}
        self._bits: dict[str, int] = {}
        self._read = 0
        self._is_told_of_batch = False

    def declare_batch(self, record: Traceable) -> None:
        """The record is of the batch."""
        record.origins |= _BATCH

    def declare_buffer(self, name: str, record: Traceable) -> None:
        """The record is of a buffer. Several may be views of one storage."""
        self._found[name] = record
        if not record.origins:
            record.origins = _FIRST_BUFFER << len(self._bits)
        self._bits[name] = record.origins

    def follow(
        self,
        func: Any,
        read: Sequence[tuple[torch.Tensor, Traceable]],
        made: Iterable[Traceable],
        overwritten: Collection[int],
        changed: Collection[int],
        *,
        is_random: bool,
    ) -> None:
        """An operation of the forward.

        Args:
            func: the operator.
            read: its tensors with their records.
            made: the records of its results.
            overwritten: ids of the tensors that it writes without having looked.
            changed: ids of all that it writes.
            is_random: it draws random numbers.
        """
        came = _RANDOM if is_random else 0
        if func._overloadpacket not in _OF_SHAPES:
            for tensor, record in read:
                if id(tensor) not in overwritten:
                    came |= record.origins
        if torch.Tag.data_dependent_output in func.tags:
            self._note_told(read, came)
        known = {id(record) for _, record in read}
        for record in made:
            if id(record) not in known:
                record.origins |= came
        for tensor, record in read:
            if id(tensor) in overwritten and tensor.nbytes == record.nbytes:
                record.origins, record.is_written = came, True
            elif id(tensor) in changed:
                record.origins, record.is_written = record.origins | came, True

    def _note_told(self, read: Sequence[tuple[torch.Tensor, Traceable]], came: int) -> None:
        """Python learns a number."""
        self._read |= came
        if came & _BATCH and any(tensor.is_floating_point() for tensor, _ in read):
            self._is_told_of_batch = True

    def unsplittable(self, buffers: Mapping[str, Traceable], loss: Traceable) -> tuple[str, ...]:
        """Names of the buffers that forbid cutting the batch; see [Note: buffers and microbatches].

        Args:
            buffers: as the forward left them, by the names under which they were declared; new ones
                too.
            loss: its result.
        """
        changed = [name for name, now in buffers.items() if now.is_written or now is not self._found.get(name)]
        read = self._read | loss.origins
        return tuple(
            name
            for name in changed
            if buffers[name].origins & (_BATCH | _RANDOM)
            or self._is_told_of_batch
            or self._bits.get(name, 0) & read
            or (buffers[name].is_written and buffers[name].is_saved)
        )


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """Ids of the tensors that an operation writes without reading, and of all that it writes."""
    changed = {id(t) for t in operator_tensors(written_arguments(func, args, kwargs))}
    if not changed or func._overloadpacket in _OVERWRITING:
        return changed, changed
    outs = (argument_of(func, a.name, args, kwargs) for a in func._schema.arguments if a.is_out)
    return {id(t) for value in outs for t in operator_tensors(value)}, changed


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


# Kernels that a step uses, and what libraries take for them outside of tensors.
#
# In: operations as a trace meets them. Out: bytes. See [Note: kernels that are kept] in
# `devices.compiled_kernels`.

# The sizes of their results, or of the products inside them, depend on values.
_OF_VALUES = {torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default}
_GROUPED = torch.ops.aten._grouped_mm.default


class KernelsUsed:
    """Kernels of one trace; operations that are alike share one."""

    def __init__(self) -> None:
        # By identity: operations that are alike share their facts, others may have equal ones.
        self._kernels: dict[int, Facts] = {}
        # Held, so that an address is not another one's.
        self._noted: dict[int, Facts] = {}
        self._libraries: set[str] = set()
        self._sizes_vary = False
        self._outside_bytes = 0

    def note(self, func: Any, facts: Facts) -> None:
        """Notes an operation."""
        if id(facts) in self._noted:
            return
        self._noted[id(facts)] = facts
        # In fp32 the BLAS computes them, and compiles nothing.
        self._sizes_vary |= func in _OF_VALUES or (func is _GROUPED and facts.kernel_bytes > 0)
        if facts.kernel_bytes:
            self._kernels[id(facts)] = facts
        self._outside_bytes = max(self._outside_bytes, facts.outside_bytes)
        if facts.library:
            self._libraries.add(facts.library)

    @property
    def nbytes(self) -> int:
        """Bytes that libraries keep of kernels: of as many as are ever kept where sizes depend on
        values, so that each step brings other ones. And the most that an operation takes outside
        of tensors: it may come beside all that the allocator keeps.
        """
        found = sorted((facts.kernel_bytes for facts in self._kernels.values()), reverse=True)
        kept = KERNELS_KEPT * found[0] if found and self._sizes_vary else sum(found[:KERNELS_KEPT])
        return kept + self._outside_bytes

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the libraries that take memory when they first compute."""
        return tuple(sorted(self._libraries))
