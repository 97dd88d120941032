"""The machine a job runs on: its allocator, its meters, its budget.

In: a limit and a device. Out: `Machine`: what is left to tensors, the hard limit armed, peaks
measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType

import torch

from memfit import devices
from memfit.core.errors import LimitBreachError, MemfitWarning, TierUnavailableError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import (
    EMULATED_RESERVE_BYTES,
    FIRST_STEP_BYTES,
    LIBRARY_BYTES,
    MIB,
    PLANNING_BYTES,
    RESERVE_BYTES,
    RESERVE_BYTES_PER_THREAD,
    Budget,
    Limits,
    device_reserve_bytes,
    format_bytes,
)
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator, install
from memfit.devices.compiled_kernels import bound_kernels, compute_once, is_to_compute, panels_to_come, widest
from memfit.devices.fallback import FallbackAllocator, tame_malloc
from memfit.devices.kernel import REFUSALS, KernelLimit, is_refusal, refusal_words
from memfit.homes.factories import FurtherTier
from memfit.homes.home import is_dense
from memfit.machine.hard_limit import HardLimit, outside_bytes
from memfit.machine.meters import AcceleratorMeter, CpuMeter, DeviceMeter, Phases, ProcessMeter
from memfit.tensors.guard import is_away
from memfit.tensors.trees import spanned_bytes

# Beside the model as it was built on an emulated device: small tensors, rounding. What is tried out
# and probed is host memory there (see `planner.problem`).
_EMULATED_LOAD_SCRATCH_BYTES = 2 * MIB
# Staging of the disk's workers, the probe's matrices and buffers, code pages, Python's own growth
# while a model is traced: 15 to 62 MiB seen. Pages that had left before are up to 16 more.
_LOAD_SCRATCH_BYTES = 80 * MIB
# The probe's matrices, and what a caching allocator reserves for tensors that come and go.
_ACCELERATOR_LOAD_SCRATCH_BYTES = 64 * MIB
# Where less than that is left, weights are put aside first: more than was seen, since other models
# are larger.
_LOAD_ROOM_BYTES = 128 * MIB
# Putting weights aside stages a piece for each of the disk's workers.
_ASIDE_SCRATCH_BYTES = 8 * MIB
# Weights that have moved home, whose pages malloc may keep.
_MOST_FREED_BYTES = 8 * MIB


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
    bound_kernels()
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
    `devices.kernel`.

    Memory: none.

    Args:
        device: where compute runs.
        limits: by tier.
        meter: of the device.
        allocator: of tensors in host memory; None beside an accelerator.
        is_emulated: see above.
        uses_kernel: see above.
        further: tiers that are handed in.

    Attributes:
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
        # An object of its own: in a cycle with this machine the limit would be lifted late.
        self._reserve = _Reserve(counts_process=self.counts_process, is_emulated=is_emulated)
        self.hard_limit = HardLimit(
            limits.device_bytes,
            meter,
            self.process,
            allocator,
            reserve_bytes=self._reserve.nbytes,
            # Without a compiler the allocator's limit is the kernel's already.
            kernel=KernelLimit() if uses_kernel and isinstance(allocator, Allocator) else None,
        )

    def change_limit(self, limit_bytes: int) -> None:
        """Changes the limit of the device; see `HardLimit.change`."""
        self.hard_limit.change(limit_bytes)
        self.limits = replace(self.limits, by_tier={**self.limits.by_tier, Tier.DEVICE: limit_bytes})

    def base_bytes(self) -> int:
        """Bytes of the process that our allocator did not give: interpreter, libraries, what was
        allocated before. 0 elsewhere.
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
        others = max(self.others_bytes(beside) - weight_bytes, min(0, live - weight_bytes))
        outside = self.base_bytes()
        # Without weights that another allocator gave: they are outside now, and not when they have
        # moved home.
        self.hard_limit.note_planned(max(0, outside + min(0, live - weight_bytes)), max(0, others))
        reserve = self.hard_limit.reserve_left_bytes
        usual = 0 if self.hard_limit.has_stepped else self._reserve.usual_bytes
        return Budget(
            limit_bytes=self.limits.device_bytes,
            base_bytes=max(0, outside + others) + usual,
            reserve_bytes=reserve - usual,
            others_bytes=max(0, others),
        )

    def others_bytes(self, counted: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of live tensors on the device that no prediction of the job counts: of
        the user, of other jobs. Less than 0 where another allocator gave what is counted: that is
        not among what is alive here.

        Args:
            counted: tensors that predictions count.
        """
        return self.meter.live_bytes() - spanned_bytes(counted, self.device)

    def left_bytes(self) -> int | None:
        """Returns what the limit leaves to tensors beside all that is there; None without one."""
        limit, reserve = self.limits.device_bytes, RESERVE_BYTES if self.counts_process else 0
        return None if limit is None else limit - self.base_bytes() - self.meter.live_bytes() - reserve

    def reserve_bytes(self) -> int:
        """Returns what plans leave free beside tensors and what the process held when they were
        made.
        """
        return self._reserve.nbytes()

    def planned_budget(
        self,
        model: torch.nn.Module,
        beside: Iterable[torch.Tensor],
        *,
        kernel_bytes: int = 0,
        libraries: Iterable[str] = (),
    ) -> Budget:
        """Returns what is left to tensors when a model has been traced: what planning takes of the
        process is there, and part of the base.

        See [Note: what a process takes] in `core.limits`.

        Args:
            model: its weights may be away.
            beside: as in `budget`.
            kernel_bytes: that a step's kernels take, as traced.
            libraries: that a step computes with; they compute once before, so that what they take
                is there.
        """
        libraries = tuple(libraries)
        if self.process is not None:
            compute_once(libraries)
            self.process.note_used_files()
        self._reserve.end_planning(kernel_bytes + panels_to_come(libraries, torch.get_num_threads()), libraries)
        here = [p for p in model.parameters() if p.device == self.device and not is_away(p)]
        return self.budget([p for p in here if p.untyped_storage().nbytes()], beside)

    @property
    def lacks_room(self) -> bool:
        """True if what is there leaves no room below the limit for the scratch of planning."""
        limit = self.limits.device_bytes
        if not self.counts_process:
            return limit is not None and limit < self._device_bytes()
        return limit is not None and limit <= self.base_bytes() + self.meter.live_bytes() + _LOAD_ROOM_BYTES

    def lacks_room_for(self, nbytes: int) -> bool:
        """Tells whether a device beside the host has no room for so many bytes more."""
        limit = self.limits.device_bytes
        return self.has_host and limit is not None and self._device_bytes() + nbytes > limit

    def _device_bytes(self) -> int:
        """Bytes that a device beside the host holds, with scratch for the load."""
        if isinstance(self.meter, AcceleratorMeter):
            return self.meter.held_bytes() + _ACCELERATOR_LOAD_SCRATCH_BYTES
        return self.meter.live_bytes() + _EMULATED_LOAD_SCRATCH_BYTES

    def load_bytes(self, model: torch.nn.Module, *, leaves: bool = False, encoding_bytes: int = 0) -> int:
        """Returns what is there when `fit` begins to move weights home.

        Of a process all that is resident, scratch, and the largest weight that is still to be made;
        of a device what it holds, a weight that is to be made or copied into another memory order,
        and scratch.

        Args:
            model: still whole, or built empty: then its weights come one at a time.
            leaves: its weights are put aside before there is scratch (see `files.weight_sources`).
            encoding_bytes: of a device, that encoding weights on their way home takes.
        """
        to_come = max((p.nbytes for p in model.parameters() if is_away(p)), default=0)
        if not self.counts_process:
            copied = max((p.nbytes for p in model.parameters() if not is_away(p) and not is_dense(p)), default=0)
            return self._device_bytes() + max(to_come, copied) + encoding_bytes
        # Not only weights: some optimizers make their states when they are built.
        here = self.base_bytes() + (0 if self.allocator is None else self.allocator.stats().mapped_bytes)
        return here + to_come + (_ASIDE_SCRATCH_BYTES if leaves else _LOAD_SCRATCH_BYTES)

    def load_peak_bytes(self, model: torch.nn.Module, home_bytes: int) -> int:
        """Returns what is held at most while weights move home, when a plan has been made: what was
        held until now, what is there with a weight that is to come and the disk's staging, or what
        is there when they have come.

        Less than `load_bytes`, which is told before anything was traced and holds for whatever that
        may take.

        Args:
            model: as in `load_bytes`.
            home_bytes: held with all weights at home.
        """
        return max(self.held_bytes, self.load_bytes(model, leaves=True), home_bytes + _MOST_FREED_BYTES)

    @property
    def held_bytes(self) -> int:
        """Most that the process held since the phase began that runs; 0 where it is not counted."""
        return 0 if self.process is None else self.process.peak_bytes().whole_bytes

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

    def give_back_libraries(self) -> None:
        """Gives clean pages of libraries back to the kernel where a limit counts them.

        See [Note: pages that come back] in `machine.meters`.
        """
        if self.process is not None and self.limits.device_bytes is not None:
            self.process.give_back_libraries()

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
) -> Machine:
    """Puts memfit's allocator under torch and opens a device.

    What building the model left in pools is given back.

    Args:
        device: of the model.
        limits: by tier.
        is_emulated: see `Machine`.
        uses_kernel: see `Machine`.
        further: tiers that are handed in.

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
    if devices.is_accelerator(device):
        # a backend without streams is refused before it is measured and emptied
        devices.of(device).new_stream(device)
        meter = AcceleratorMeter(device)
        meter.release()
        return Machine(device, limits, meter, None, is_emulated=is_emulated, further=further)
    bound_kernels()
    allocator: Allocator | FallbackAllocator
    try:
        allocator = install()
    except TierUnavailableError as unavailable:
        if is_emulated:
            raise
        allocator = FallbackAllocator.create()
        _tell_fallback(unavailable)
    allocator.trim()
    meter = CpuMeter(allocator)
    machine = Machine(
        device,
        limits,
        meter,
        allocator,
        is_emulated=is_emulated,
        uses_kernel=uses_kernel,
        further=further,
    )
    machine.give_back_libraries()  # before anything is measured
    return machine


def _tell_fallback(reason: TierUnavailableError) -> None:
    """Says what is lost without memfit's allocator."""
    warnings.warn(
        # What to do about it stands at the end here.
        f"this process has no allocator of memfit's ({str(reason).splitlines()[0].split(';')[0]:.300}). Training goes on; "
        "memory is read from /proc instead of counted, so that "
        "figures are off by up to 65 MB, steps are not measured action by action, freed memory costs more time, and emulate_device is not there. "
        "Install g++, or a wheel that was built for this torch (make wheel)",
        MemfitWarning,
        stacklevel=4,
    )


@contextmanager
def guard(machine: Machine, phase: str, *, enforces: bool) -> Iterator[None]:
    """Arms the limit, and turns an allocation that it refuses into a breach of that phase. Where it
    ends by an error, there is no job to hold to the limit, and it is taken off.
    """
    limit = machine.limits.device_bytes
    # Where planning has no room, it says what would be needed.
    if enforces and limit is not None and not machine.lacks_room:
        machine.hard_limit.arm()
    try:
        yield
    except BaseException as error:
        is_refused = isinstance(error, REFUSALS) and is_refusal(error)
        machine.hard_limit.disarm()
        if not is_refused:
            raise
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
    if any(device.type == "meta" for device in found):
        raise UsageError(
            "the model is on the device meta: its weights have no values and none to come. Build it with memfit.empty(lambda: Model(...)), which takes no memory "
            "either, or on the CPU"
        )
    if len(found) != 1:
        raise UsageError(
            f"the model must have parameters on one device, not on {sorted(map(str, found)) or 'none'}: move it with model.to(...), or give a model that has some"
        )
    return found.pop()


def library_bytes_to_come(libraries: Iterable[str]) -> int:
    """Returns what libraries will take of the process when they first compute."""
    return sum(LIBRARY_BYTES[name] for name in widest(libraries) if is_to_compute(name))


class FreedPages:
    """Gives pages back that malloc keeps of freed tensors, which the user's code made, when they
    are many.

    Args:
        machine: whose process it is.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._nbytes = 0

    def note(self, nbytes: int) -> None:
        """Notes that tensors of so many bytes were freed."""
        self._nbytes += nbytes
        if self._machine.counts_process and self._nbytes >= _MOST_FREED_BYTES:
            self._nbytes = 0
            self._machine.forget_peak()


class _Reserve:
    """Bytes beside tensors and the base that plans leave free: for scratch of kernels and libraries
    that no trace sees, and, until a plan is made, for planning.

    Little of it on an emulated device, whose meter counts tensors alone.

    Args:
        counts_process: the device is this process.
        is_emulated: the device is emulated.

    """

    def __init__(self, *, counts_process: bool, is_emulated: bool) -> None:
        self._counts_process = counts_process
        self._is_emulated = is_emulated
        # Once planning is over, what it took is in the base.
        self._usual_bytes: int | None = None
        self._libraries: Sequence[str] = ()

    def end_planning(self, kernel_bytes: int, libraries: Sequence[str]) -> None:
        """Notes what kernels and libraries will take, now that a step was traced."""
        self._usual_bytes = FIRST_STEP_BYTES + kernel_bytes
        self._libraries = libraries

    def nbytes(self) -> int:
        """Returns the whole of it."""
        if not self._counts_process:
            return EMULATED_RESERVE_BYTES if self._is_emulated else device_reserve_bytes(self._libraries)
        threads = RESERVE_BYTES_PER_THREAD * (torch.get_num_threads() - 1)
        return RESERVE_BYTES + threads + (PLANNING_BYTES if self._usual_bytes is None else self._usual_bytes)

    @property
    def usual_bytes(self) -> int:
        """Part of it that a first step usually takes."""
        return (self._usual_bytes or 0) if self._counts_process else 0
