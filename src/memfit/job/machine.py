"""The machine a job runs on: its allocator, its meters, its budget.

In: a limit and a device. Out: `Machine`: what is left to tensors, the hard limit armed, peaks
measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from memfit import devices
from memfit.allocator import Allocator, FallbackAllocator, install, tame_malloc
from memfit.allocator.kernel import REFUSALS, KernelLimit, is_refusal, refusal_words
from memfit.core.errors import DoesNotFitError, LimitBreachError, TierUnavailableError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import (
    DEVICE_RESERVE_BYTES,
    EMULATED_RESERVE_BYTES,
    RESERVE_BYTES,
    RESERVE_BYTES_PER_THREAD,
    Budget,
    Limits,
)
from memfit.core.tiers import Tier
from memfit.core.units import MIB, format_bytes
from memfit.homes.factories import FurtherTier
from memfit.job.hard_limit import HardLimit, outside_bytes
from memfit.job.planning_left import PlanningLeft
from memfit.tensors.guard import is_away
from memfit.verification.meters import AcceleratorMeter, CpuMeter, DeviceMeter, Phases, ProcessMeter

# Two matrices of the probe, tracing, and a block that moves home.
_EMULATED_LOAD_SCRATCH_BYTES = 8 * MIB
# Staging of the disk's workers, the probe's matrices and buffers, code pages and Python's own
# growth while a model is traced: 15 to 62 MiB seen.
_LOAD_SCRATCH_BYTES = 64 * MIB
# Where less than that is left, weights are put aside first: more than was seen, since other models
# are larger.
_LOAD_ROOM_BYTES = 128 * MIB
# Putting weights aside stages a piece for each of the disk's workers.
_ASIDE_SCRATCH_BYTES = 8 * MIB


def prepare_process(*, seed: int | None = None) -> ProcessMeter:
    """Puts memfit's allocator under torch now, so that what is built before `fit` is given back to
    the system when it is freed.

    Args:
        seed: of torch's default generators; None: they stay as they are.

    Returns:
        A meter of this process and its children.
    """
    if seed is not None:
        torch.manual_seed(seed)
    try:
        install()
    except TierUnavailableError:
        tame_malloc()
    return ProcessMeter(with_children=True)


class Machine:
    """One device, with its limit. Made by `open_machine`.

    Without a GPU the device is this process: the limit counts everything the operating system
    charges to it, interpreter and libraries included. `is_emulated` makes it a device of its own
    inside the process: only tensors count, host homes apart. With `uses_kernel` the kernel's limit
    on the process is armed as well, once a step has been made; see [Note: the kernel's limit] in
    `allocator.kernel`.

    Memory: none.

    Args:
        device: where compute runs.
        limits: by tier.
        meter: of the device.
        allocator: of tensors in host memory; None beside an accelerator.
        is_emulated: see above.
        uses_kernel: see above.
        further: tiers that are handed in.
        planning_left: by refused fits of the same program in this process.

    Attributes:
        reserve_bytes: tells the scratch of kernels and libraries that no trace sees, in bytes.
        hard_limit: what arms the limit, and refuses what would pass it.
    """

    def __init__(
        self,
        device: torch.device,
        limits: Limits,
        meter: DeviceMeter,
        allocator: Allocator | FallbackAllocator | None,
        *,
        is_emulated: bool,
        uses_kernel: bool = False,
        further: Mapping[Tier, FurtherTier] = MappingProxyType({}),
        planning_left: PlanningLeft,
    ) -> None:
        self.device = device
        self.limits = limits
        self.is_emulated = is_emulated
        self.further = further
        self.allocator = allocator
        self.meter = meter
        self.counts_process = device.type == "cpu" and not is_emulated
        self.process = ProcessMeter(with_children=True) if self.counts_process else None
        self.phases = Phases(meter, self.process)
        self._planning_left = planning_left
        left_bytes = planning_left.in_base(self.base_bytes()) if self.counts_process else 0
        # Without this machine: in a cycle the limit would be collected late, and lifted late.
        self.reserve_bytes = partial(
            _reserve_bytes, left_bytes, counts_process=self.counts_process, is_emulated=is_emulated
        )
        self.hard_limit = HardLimit(
            limits.device_bytes,
            meter,
            self.process,
            allocator,
            reserve_bytes=self.reserve_bytes,
            # Without a compiler the allocator's limit is the kernel's already.
            kernel=KernelLimit() if uses_kernel and isinstance(allocator, Allocator) else None,
        )

    def base_bytes(self) -> int:
        """Resident bytes of the process that our allocator did not give: interpreter, libraries,
        what was allocated before. 0 elsewhere.
        """
        return outside_bytes(self.process, self.allocator)

    def budget(self, weights: Iterable[torch.Tensor] = (), beside: Iterable[torch.Tensor] = ()) -> Budget:
        """Returns what is left to tensors: the limit without what is there and not the job's own (a
        teacher, another job, data).

        Args:
            weights: of the model, as far as they are there; they will live in homes. Those that our
                allocator did not give are part of the base until then.
            beside: what else of the job is there and in every prediction: batch, buffers,
                gradients, optimizer states. What is sparse is not weighed.
        """
        live, weight_bytes = self.meter.live_bytes(), sum(p.nbytes for p in weights)
        storages = {
            id(t.untyped_storage()): t.untyped_storage()
            for t in beside
            if t.layout is torch.strided and t.device == self.device
        }
        others = max(
            live - weight_bytes - sum(storage.nbytes() for storage in storages.values()), min(0, live - weight_bytes)
        )
        outside = self.base_bytes()
        # Without weights that another allocator gave: they are outside now, and not when they have
        # moved home.
        self.hard_limit.note_planned(max(0, outside + min(0, live - weight_bytes)))
        base = max(0, outside + others)
        reserve = self.hard_limit.reserve_left_bytes
        return Budget(limit_bytes=self.limits.device_bytes, base_bytes=base, reserve_bytes=reserve)

    @property
    def lacks_room(self) -> bool:
        """True if what is there leaves no room below the limit for the scratch of planning."""
        limit = self.limits.device_bytes
        room = _LOAD_ROOM_BYTES if self.counts_process else _LOAD_SCRATCH_BYTES
        return limit is not None and limit <= self.base_bytes() + self.meter.live_bytes() + room

    def load_bytes(self, model: torch.nn.Module, *, leaves: bool = False) -> int:
        """Returns what is there when `fit` begins to move weights home.

        Of a process all that is resident, scratch, and the largest weight that is still to be made;
        of a device what it holds, with scratch where it is emulated and small.

        Args:
            model: still whole, or built empty: then its weights come one at a time.
            leaves: its weights are put aside before there is scratch (see `deferred.aside`).
        """
        if not self.counts_process:
            return self.meter.live_bytes() + (_EMULATED_LOAD_SCRATCH_BYTES if self.is_emulated else 0)
        # Not only weights: some optimizers make their states when they are built.
        here = self.base_bytes() + (0 if self.allocator is None else self.allocator.stats().mapped_bytes)
        to_come = max((p.nbytes for p in model.parameters() if is_away(p)), default=0)
        return here + to_come + (_ASIDE_SCRATCH_BYTES if leaves else _LOAD_SCRATCH_BYTES)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Surrounds a fit: what a refused one leaves counts once.

        See [Note: what planning leaves] in `job.planning_left`.
        """
        before = self.base_bytes()
        try:
            yield
        except DoesNotFitError:
            if self.counts_process:
                self._planning_left.note(before, self.base_bytes())
            raise

    @contextmanager
    def phase(self, name: str, *, is_step: bool = False) -> Iterator[None]:
        """Measures a call of the job, inside the limit as what the process holds outside of tensors
        leaves it now.

        See [Note: memory outside of tensors].
        """
        with self.hard_limit.phase(self.phases, is_step=is_step), self.phases(name):
            yield

    @contextmanager
    def host_ledger(self) -> Iterator[None]:
        """Context in which allocations count as host memory (emulated device only)."""
        context = (
            self.allocator.ledger("host")
            if self.is_emulated and isinstance(self.allocator, Allocator)
            else nullcontext()
        )
        with context:
            yield

    @property
    def has_host(self) -> bool:
        """There is host memory beside the device."""
        return devices.is_accelerator(self.device) or self.is_emulated

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where bytes may rest, the device first."""
        own = (Tier.DEVICE, Tier.HOST, Tier.DISK) if self.has_host else (Tier.DEVICE, Tier.DISK)
        return tuple(dict.fromkeys([*own, *self.further]))

    def with_further(self, hardware: Hardware) -> Hardware:
        """Returns a machine with the tiers that this one was handed besides."""
        further = {tier: each.spec for tier, each in self.further.items()}
        return replace(hardware, tiers={**hardware.tiers, **further}) if further else hardware

    def forget_peak(self) -> None:
        """Forgets what was used until now: the pool of freed memory goes back
        and starts anew.
        """
        if self.allocator is not None:
            self.allocator.trim()
        if isinstance(self.meter, AcceleratorMeter):
            self.meter.release()  # else the pool of loading counts as held in every phase after

    def last_peak_bytes(self) -> int:
        """The peak of the phase that ended last, that time alone."""
        last = self.phases.last
        if last is None:
            return 0
        return (last.process_peak_bytes or 0) if self.counts_process else last.held_peak_bytes

    def measured_peak_bytes(self) -> int:
        """The largest peak over all phases: of the process, or of the device."""
        peaks = [(r.process_peak_bytes or 0) if self.counts_process else r.held_peak_bytes for r in self.phases.records]
        return max(peaks, default=0)


def open_machine(
    device: torch.device,
    limits: Limits,
    *,
    is_emulated: bool = False,
    uses_kernel: bool = False,
    further: Mapping[Tier, FurtherTier] = MappingProxyType({}),
    planning_left: PlanningLeft | None = None,
) -> Machine:
    """Puts memfit's allocator under torch and opens a device.

    What building the model left in pools is given back.

    Args:
        device: of the model.
        limits: by tier.
        is_emulated: see `Machine`.
        uses_kernel: see `Machine`.
        further: tiers that are handed in.
        planning_left: see `Machine`; None: nothing is known to be left.

    Raises:
        UsageError: the kernel is to limit what it does not count.
        UnsupportedError: a backend without streams. TierUnavailableError: an emulated device
            without a compiler.
    """
    if uses_kernel and (is_emulated or device.type != "cpu"):
        raise UsageError(
            'enforce="kernel" limits the memory of a process: it cannot limit that of a device (host_limit and the '
            "allocators do)"
        )
    left = PlanningLeft() if planning_left is None else planning_left
    if devices.is_accelerator(device):
        # a backend without streams is refused before it is measured and emptied
        devices.of(device).new_stream(device)
        meter = AcceleratorMeter(device)
        meter.release()
        return Machine(device, limits, meter, None, is_emulated=is_emulated, further=further, planning_left=left)
    allocator: Allocator | FallbackAllocator
    try:
        allocator = install()
    except TierUnavailableError:
        if is_emulated:
            raise
        allocator = FallbackAllocator.create()
    allocator.trim()
    meter = CpuMeter(allocator)
    return Machine(
        device,
        limits,
        meter,
        allocator,
        is_emulated=is_emulated,
        uses_kernel=uses_kernel,
        further=further,
        planning_left=left,
    )


@contextmanager
def guard(machine: Machine, phase: str, *, enforces: bool) -> Iterator[None]:
    """Arms the limit, and turns an allocation that it refuses into a breach of that phase."""
    limit = machine.limits.device_bytes
    # Where planning has no room, it says what would be needed.
    if enforces and limit is not None and not machine.lacks_room:
        machine.hard_limit.arm()
    try:
        yield
    except REFUSALS as error:
        if not is_refusal(error):
            raise
        machine.hard_limit.disarm()
        raise LimitBreachError(
            f"the limit of {format_bytes(machine.limits.device_bytes or 0)} was hit in phase {phase!r}: {refusal_words(error)} Nothing was changed "
            "on disk. Build the model inside the limit (weights on one device, nothing else alive), or raise the limit",
            phase=phase,
            where=phase,
            torn=False,
        ) from error


def device_of(model: torch.nn.Module) -> torch.device:
    """The one device of all parameters.

    Raises:
        UsageError: there are several, or no parameters, or they are on meta.
    """
    found = {p.device for p in model.parameters()}
    if len(found) != 1:
        raise UsageError(
            f"the model must lie on one device, not on {sorted(map(str, found)) or 'none (it has no parameters)'}: move it with model.to(...)"
        )
    device = found.pop()
    if device.type == "meta":
        raise UsageError(
            "the model is on the device meta: its weights have no values and none to come. Build it with memfit.empty(lambda: Model(...)), which takes no memory "
            "either, or on the CPU"
        )
    return device


def _reserve_bytes(left_bytes: int, *, counts_process: bool, is_emulated: bool) -> int:
    """Scratch of kernels and libraries that no trace sees.

    Little of it on an emulated device, whose meter counts tensors alone.

    Args:
        left_bytes: left by refused fits of this program, which the base counts already.
        counts_process: the device is this process.
        is_emulated: the device is emulated.
    """
    if not counts_process:
        return EMULATED_RESERVE_BYTES if is_emulated else DEVICE_RESERVE_BYTES
    whole = RESERVE_BYTES + RESERVE_BYTES_PER_THREAD * torch.get_num_threads()
    return whole - min(left_bytes, whole // 2)
