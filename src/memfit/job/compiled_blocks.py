"""Compiles blocks with torch.compile where that pays: `fit(compile="blocks")`.

In: a problem and its sample. Out: `CompiledBlocks`: what was measured of each class of blocks, and
the compiled calls of those that gain.

[Note: compiled blocks]
torch.compile fuses the point-wise operations inside of a block, makes them again in backward and
keeps results of products. Whether that pays is measured before a plan is chosen: of each class of
repeated blocks (equal structure, arguments of equal shapes, of which the same need gradients) one
is copied, with random weights, and run forward and backward on random arguments of the sample's
shapes, plain and compiled in turn; the least seconds of each count. A class is compiled where it
takes at most `MOST_SHARE` of the plain seconds and neither keeps more for backward nor has a higher
peak in either: then the bytes that were traced of the plain block are an upper bound, and a plan
that is predicted to fit does. Seconds of its calls are priced by the measured shares. Bytes are
those that were measured, where a call has tensors of the sizes that it was measured with (the whole
sample in its dtype); else, those of plain blocks.

Where the device has a limit, code is compiled that keeps less: with a budget of torch's
(`torch._functorch.config.activation_memory_budget`) at which it makes what it fuses again in
backward. A Llama's layer then keeps 17 MiB and not 22, in about the same seconds. A budget that the
user has set stays. Code that the process has of the class already is used, whatever its budget was:
what is measured is measured of it.

Compiled code rounds otherwise: the bits are those of plain PyTorch with the same layers compiled by
`layer.compile()`, and `job.numerics` says so. Not compiled are blocks that draw random numbers
(compiled code draws others), that have hooks, or that a plain call cannot be made of again.

The compiled code of a copy serves the blocks of its class, since torch keeps it by the class's code
and guards: a first step with the whole sample does not compile again. One with other shapes or
another dtype (microbatches, bf16) does, once. A job's hooks put the compiled calls in place, and
take them off when it is closed.
"""

from __future__ import annotations

import gc
import importlib.util
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.activations.reads import is_compiled
from memfit.allocator.compiling import find_compiler
from memfit.batches.cutting import Whole
from memfit.batches.parts import first_part
from memfit.checkpoints.checkpointer import stored_compiled
from memfit.checkpoints.run_state import give_random, take_random
from memfit.checkpoints.run_store import RunStore
from memfit.core.compiled_calls import CompiledBytes, CompiledShare, at_shares, without_selection
from memfit.core.errors import MemfitWarning, TierUnavailableError, UnsupportedError, UsageError
from memfit.core.profile import CallProfile, Profile
from memfit.core.units import format_bytes, format_seconds
from memfit.job.block_costs import BlockCost, GivenCall, copied_block, least_of, note_given
from memfit.job.machine import Machine
from memfit.profiling.blocks import BlockMap, ModuleSite

BACKEND = "inductor"
"""Backend of torch.compile."""
MOST_SHARE = 0.97
"""Share of the plain seconds that a compiled block takes at most where it pays."""
_LEAN = 0.9
"""Budget of torch.compile's for activations, of what a compiled block keeps without one."""
_ROUNDS = 5
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True)
class MeasuredClass:
    """A class of blocks, plain and compiled.

    Attributes:
        name: class of the module.
        sites: of its blocks.
        plain, compiled: of one of them; None: it was not run.
        compile_s: seconds until it had run compiled for the first time.
        why_not: why it stays plain; empty: it is compiled.
        calls: as they were traced, by site.
    """

    name: str
    sites: tuple[str, ...]
    plain: BlockCost | None = None
    compiled: BlockCost | None = None
    compile_s: float = 0.0
    why_not: str = ""
    calls: Mapping[str, CallProfile] = field(default_factory=dict[str, CallProfile])

    def in_words(self) -> str:
        """Says what was measured, and decided."""
        which = f"{len(self.sites)} block{'s' * (len(self.sites) > 1)} {self.name}"
        if self.plain is None or self.compiled is None:
            return f"{which}: {self.why_not}"
        plain, compiled = self.plain, self.compiled
        told = (
            f"{which}: one takes {compiled.seconds / plain.seconds:.2f} of its plain seconds and keeps "
            f"{format_bytes(compiled.saved_bytes)} of {format_bytes(plain.saved_bytes)}"
        )
        if self.why_not:
            return f"{told}: {self.why_not}"
        gained = len(self.sites) * (plain.seconds - compiled.seconds)
        return f"{told}; compiling took {format_seconds(self.compile_s)}, which {max(1, round(self.compile_s / gained))} steps earn back"


@dataclass(frozen=True, kw_only=True)
class CompiledBlocks:
    """Blocks of a job that are compiled.

    Attributes:
        classes: that were looked at.
        shares: seconds and bytes of the calls that are compiled, by site.
        calls: that take the place of modules' own, by site.
        peak_bytes: most that the process held while they were compiled and measured, the
            compiler's processes included; 0 where it is not counted.
    """

    classes: tuple[MeasuredClass, ...] = ()
    shares: Mapping[str, CompiledShare] = field(default_factory=dict[str, CompiledShare])
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    peak_bytes: int = 0

    def in_words(self) -> str:
        """A sentence for a reason."""
        compiled = [one.in_words() for one in self.classes if not one.why_not]
        plain = [one.in_words() for one in self.classes if one.why_not]
        parts = [
            f"Compiled: {'; '.join(compiled)}." if compiled else "",
            f"Not compiled: {'; '.join(plain)}." if plain else "",
        ]
        return " ".join(filter(None, parts)) or "Nothing is compiled: no block is repeated."


def check_compile(asked: str, numerics: str, *, lines: bool, is_alone: bool) -> None:
    """Raises `UsageError` or `UnsupportedError` where blocks cannot be compiled as `fit` was
    asked.
    """
    if asked != "blocks":
        raise UsageError(f'compile is "blocks" or None, not {asked!r:.80}')
    if numerics == "exact":
        raise UsageError('compile="blocks" rounds otherwise than plain PyTorch: leave it out, or numerics="exact"')
    if lines or not is_alone:
        raise UnsupportedError(
            f'compile="blocks" is for job.step of one process: leave it out{", or lines=True" if lines else " on several ranks"}'
        )


def check_compiler(device: torch.device) -> None:
    """Raises `UnsupportedError` where torch.compile has nothing to compile with."""
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedError(
                'compile="blocks" needs triton to compile for this device, and it is not installed: install it, or leave compile= out'
            )
        return
    try:
        find_compiler()
    except TierUnavailableError:
        raise UnsupportedError(
            'compile="blocks" needs a C++ compiler (g++, c++ or clang++ on the PATH, or $CXX) to compile for a processor, and there is none: '
            "install one, or leave compile= out"
        ) from None


def with_compiled(profile: Profile, block_map: BlockMap, compiled: CompiledBlocks | None) -> Profile:
    """Returns the profile with these blocks compiled.

    What a compiled call computes cannot be looked at one by one: for those that the user compiled,
    too, there is no policy that selects.
    """
    by_user = frozenset(site.name for site in block_map.sites if is_compiled(site.module))
    shares = {} if compiled is None else compiled.shares
    return without_selection(at_shares(profile, shares), by_user) if by_user else at_shares(profile, shares)


def tell_compiled(run: RunStore, now: Collection[str]) -> None:
    """Warns where a run goes on with others of its blocks compiled: they round otherwise."""
    before = stored_compiled(run)
    if set(before) == set(now):
        return
    warnings.warn(
        f"the run in {run.directory} had {len(before)} blocks compiled, and goes on with {len(now)} (compile= of fit, and what was measured of them here): they "
        "round otherwise from here on",
        MemfitWarning,
        stacklevel=4,
    )


def compile_blocks(problem: Any, sample: Any, machine: Machine) -> CompiledBlocks:
    """Measures one block of each class, and compiles the classes that gain. See [Note: compiled
    blocks].

    Memory: weights, gradients and activations of one block, for the whole sample; on a processor
    the compiler's own, some 100 MiB that stay, and its processes.

    Args:
        problem: a `Problem` whose weights need not be there.
        sample: a batch; of several parts the first is taken.
        machine: of the job.

    Raises:
        UnsupportedError: no compiler is here.
    """
    check_compiler(machine.device)
    before, is_lean = take_random(), machine.limits.device_bytes is not None
    try:
        with machine.phases("compile"), _keeping_less(is_lean=is_lean):
            found = _compile(problem, first_part(sample), machine)
    finally:
        give_random(before)
        # Copies of blocks, and their gradients, lie in cycles of the compiler's.
        gc.collect()
    last = machine.phases.last
    shares: dict[str, CompiledShare] = {}
    calls: dict[str, Callable[..., Any]] = {}
    modules = {site.name: site.module for site in problem.block_map.sites}
    for one in found:
        if one.why_not or one.plain is None or one.compiled is None:
            continue
        taken = one.compiled
        for site in one.sites:
            shares[site] = CompiledShare(
                forward=taken.forward_s / one.plain.forward_s,
                backward=taken.backward_s / one.plain.backward_s,
                bytes=CompiledBytes(
                    saved=taken.saved_bytes,
                    plain_saved=one.plain.saved_bytes,
                    forward_peak=taken.forward_peak_bytes,
                    backward_peak=taken.backward_peak_bytes,
                    plain=one.calls[site],
                ),
            )
        calls |= {name: _call_of(modules[name], is_lean=is_lean) for name in one.sites}
    peak = 0 if last is None or not machine.counts_process else last.process_peak_bytes or 0
    return CompiledBlocks(classes=tuple(found), shares=shares, calls=calls, peak_bytes=peak)


def _call_of(module: nn.Module, *, is_lean: bool) -> Callable[..., Any]:
    """Returns the compiled call of a block, which may be compiled anew for other sizes."""
    compiled = _compiled(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _keeping_less(is_lean=is_lean):
            return compiled(*args, **kwargs)

    return call if is_lean else compiled


@contextmanager
def _keeping_less(*, is_lean: bool) -> Iterator[None]:
    """Code that is compiled in the block keeps less for backward, if `is_lean`."""
    from torch._functorch import config

    if not is_lean or config.activation_memory_budget != 1.0:
        yield
        return
    with config.patch(activation_memory_budget=_LEAN):
        yield


def _compile(problem: Any, sample: Any, machine: Machine) -> list[MeasuredClass]:
    """Measures the classes of a problem's blocks."""
    block_map: BlockMap = problem.block_map
    sites = [site for site in block_map.sites if site.is_repeated and site.blocks]
    given, traced = _note_calls(problem, sample, sites)
    classes: dict[tuple[str, str], list[ModuleSite]] = {}
    for site in sites:
        if site.name in given:
            classes.setdefault((block_map.blocks[site.blocks[0]].kind, given[site.name].key), []).append(site)
    found: list[MeasuredClass] = []
    for like in classes.values():
        obstacle = next(filter(None, (_obstacle(site, traced.get(site.name)) for site in like)), "")
        name, names = type(like[0].module).__name__, tuple(site.name for site in like)
        if obstacle:
            found.append(MeasuredClass(name=name, sites=names, why_not=obstacle))
            continue
        found.append(replace(_measured(like, given[like[0].name], machine), calls={n: traced[n] for n in names}))
    return found


def _note_calls(
    problem: Any, sample: Any, sites: Sequence[ModuleSite]
) -> tuple[dict[str, GivenCall], dict[str, CallProfile]]:
    """Traces the whole sample, and notes what each site is called with."""
    given: dict[str, GivenCall] = {}
    handles = [
        site.module.register_forward_pre_hook(partial(note_given, given, site.name), with_kwargs=True) for site in sites
    ]
    try:
        whole = replace(problem, cut=Whole("its blocks are measured with the whole sample"))
        profile = whole.profile(sample, (1,), chunk_tokens=None)
    finally:
        for handle in handles:
            handle.remove()
    trace = next(iter(profile.traces.values()))
    return given, {call.site: call for call in trace.calls}


def _obstacle(site: ModuleSite, call: CallProfile | None) -> str:
    """Says why a block is not compiled; empty if it may be."""
    modules = list(site.module.modules())
    if is_compiled(site.module) or any(hasattr(one, "_orig_mod") for one in modules):
        return "it is compiled already"
    if any(getattr(one, hooks) for one in modules for hooks in _HOOKS):
        return "it has hooks, which compiled code would run otherwise"
    if call is None or not call.has_backward:
        return "nothing goes back through it"
    if call.uses_random:
        return "it draws random numbers, and compiled code would draw others"
    if call.runs_once or call.mutates_inputs or call.must_keep:
        return "it changes what it is given, or itself"
    return ""


def _measured(like: Sequence[ModuleSite], given: GivenCall, machine: Machine) -> MeasuredClass:
    """Runs a copy of one block plain and compiled, in turn."""
    module = like[0].module
    name, names = type(module).__name__, tuple(site.name for site in like)
    try:
        copied = copied_block(module, machine.device)
        compiled = _compiled(copied)
        made = given.made(copied, machine)
        made.run(copied)
        began = time.perf_counter()
        with warnings.catch_warnings():
            # What torch's compiler says of itself is not about the user's program.
            warnings.simplefilter("ignore")
            made.run(compiled)
        compile_s = time.perf_counter() - began
        kept_plain, kept = made.kept_by(copied), made.kept_by(compiled)
        runs = [(made.run(copied), made.run(compiled)) for _ in range(_ROUNDS)]
    except Exception as error:  # noqa: BLE001, whatever user's code and compilers raise; it is told
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return MeasuredClass(name=name, sites=names, why_not=f"a copy of it does not run compiled ({reason:.200})")
    plain, other = (least_of([pair[side] for pair in runs]) for side in (0, 1))
    plain = replace(plain, saved_bytes=kept_plain.own_bytes)
    other = replace(other, saved_bytes=max(other.saved_bytes, kept.own_bytes) + kept.beyond(kept_plain))
    return MeasuredClass(
        name=name, sites=names, plain=plain, compiled=other, compile_s=compile_s, why_not=_why_not(plain, other)
    )


def _why_not(plain: BlockCost, compiled: BlockCost) -> str:
    """Says why what was measured does not pay; empty if it does."""
    if compiled.seconds > MOST_SHARE * plain.seconds:
        return "that gains too little"
    peaks = [(one.saved_bytes, one.forward_peak_bytes, one.peak_in_backward_bytes) for one in (compiled, plain)]
    if any(mine > others for mine, others in zip(*peaks, strict=True)):
        return f"it takes {format_bytes(compiled.peak_bytes)} at most, and plain {format_bytes(plain.peak_bytes)}"
    return ""


def _compiled(module: nn.Module) -> Callable[..., Any]:
    """Returns the call that `module.compile()` would put in the place of the module's own."""
    with warnings.catch_warnings():
        # The compiler is imported, which warns of what it uses itself.
        warnings.simplefilter("ignore")
        return torch.compile(module._call_impl, backend=BACKEND)  # noqa: SLF001, as `module.compile` does
