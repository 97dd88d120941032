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
peak: then the bytes that were traced of the plain block are an upper bound, and a plan that is
predicted to fit does. Seconds of its calls are priced by the measured shares.

Compiled code rounds otherwise: the bits are those of plain PyTorch with the same layers compiled by
`layer.compile()`, and `job.numerics` says so. Not compiled are blocks that draw random numbers
(compiled code draws others), that have hooks, or that a plain call cannot be made of again.

The compiled code of a copy serves the blocks of its class, since torch keeps it by the class's code
and guards: a first step with the whole sample does not compile again. One with other shapes or
another dtype (microbatches, bf16) does, once. A job's hooks put the compiled calls in place, and
take them off when it is closed.
"""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit import devices
from memfit.activations.reads import is_compiled
from memfit.allocator.compiling import find_compiler
from memfit.batches.cutting import Whole
from memfit.batches.parts import first_part
from memfit.checkpoints.checkpointer import stored_compiled
from memfit.checkpoints.run_state import give_random, take_random
from memfit.checkpoints.run_store import RunStore
from memfit.core.compiled_calls import CompiledShare, at_shares, without_selection
from memfit.core.errors import MemfitWarning, TierUnavailableError, UnsupportedError, UsageError
from memfit.core.profile import CallProfile, Profile
from memfit.core.units import format_bytes, format_seconds
from memfit.job.machine import Machine
from memfit.profiling.blocks import BlockMap, ModuleSite
from memfit.tensors.trees import tensors_in

BACKEND = "inductor"
"""Backend of torch.compile."""
MOST_SHARE = 0.97
"""Share of the plain seconds that a compiled block takes at most where it pays."""
_ROUNDS = 5
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One block, forward and backward.

    Attributes:
        forward_s, backward_s: least seconds of some runs.
        saved_bytes: kept from forward to backward, without outputs.
        peak_bytes: above what was there before.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class MeasuredClass:
    """A class of blocks, plain and compiled.

    Attributes:
        name: class of the module.
        sites: of its blocks.
        plain, compiled: of one of them; None: it was not run.
        compile_s: seconds until it had run compiled for the first time.
        why_not: why it stays plain; empty: it is compiled.
    """

    name: str
    sites: tuple[str, ...]
    plain: BlockCost | None = None
    compiled: BlockCost | None = None
    compile_s: float = 0.0
    why_not: str = ""

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
        shares: seconds of the calls that are compiled, by site.
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


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Arguments of a call, described in place of tensors; and the autocast around it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None

    @property
    def key(self) -> str:
        """Equal for calls that one measurement serves."""
        return repr(pytree.tree_map(_key_of, (self.args, dict(self.kwargs)))) + str(self.autocast)

    def made(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes tensors of the descriptions."""

        def make(leaf: Any) -> Any:
            return leaf.made(device) if isinstance(leaf, _Described) else leaf

        args, kwargs = pytree.tree_map(make, (self.args, dict(self.kwargs)))
        return args, kwargs


@dataclass(frozen=True)
class _Described:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self, device: torch.device) -> torch.Tensor:
        if not self.dtype.is_floating_point:
            # Zeros are valid places and words; a mask of ones masks nothing.
            return torch.full(self.shape, self.dtype is torch.bool, dtype=self.dtype, device=device)
        return torch.randn(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


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
            f'compile="blocks" is for job.step of one process: leave out {"it, or lines=True" if lines else "it on several ranks"}'
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
    before = take_random()
    try:
        with machine.phases("compile"):
            found = _compile(problem, first_part(sample), machine)
    finally:
        give_random(before)
    last = machine.phases.last
    shares: dict[str, CompiledShare] = {}
    calls: dict[str, Callable[..., Any]] = {}
    modules = {site.name: site.module for site in problem.block_map.sites}
    for one in found:
        if one.why_not or one.plain is None or one.compiled is None:
            continue
        share = CompiledShare(
            forward=one.compiled.forward_s / one.plain.forward_s,
            backward=one.compiled.backward_s / one.plain.backward_s,
        )
        shares |= dict.fromkeys(one.sites, share)
        calls |= {name: _compiled(modules[name]) for name in one.sites}
    peak = 0 if last is None or not machine.counts_process else last.process_peak_bytes or 0
    return CompiledBlocks(classes=tuple(found), shares=shares, calls=calls, peak_bytes=peak)


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
        found.append(_measured(like, given[like[0].name], machine))
    return found


def _note_calls(
    problem: Any, sample: Any, sites: Sequence[ModuleSite]
) -> tuple[dict[str, _Given], dict[str, CallProfile]]:
    """Traces the whole sample, and notes what each site is called with."""
    given: dict[str, _Given] = {}
    handles = [
        site.module.register_forward_pre_hook(partial(_note, given, site.name), with_kwargs=True) for site in sites
    ]
    try:
        whole = replace(problem, cut=Whole("its blocks are measured with the whole sample"))
        profile = whole.profile(sample, (1,), chunk_tokens=None)
    finally:
        for handle in handles:
            handle.remove()
    trace = next(iter(profile.traces.values()))
    return given, {call.site: call for call in trace.calls}


def _note(
    found: dict[str, _Given], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _describe, (args, kwargs))
    found[name] = _Given(args=args, kwargs=kwargs, autocast=autocast)


def _describe(tensor: torch.Tensor) -> _Described:
    return _Described(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _key_of(leaf: Any) -> Any:
    plain = isinstance(leaf, _Described | bool | int | float | str) or leaf is None
    return leaf if plain else type(leaf).__qualname__


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


def _measured(like: Sequence[ModuleSite], given: _Given, machine: Machine) -> MeasuredClass:
    """Runs a copy of one block plain and compiled, in turn."""
    module = like[0].module
    name, names = type(module).__name__, tuple(site.name for site in like)
    try:
        copied = _copy(module, machine.device)
        compiled = _compiled(copied)
        args, kwargs = given.made(machine.device)
        run = partial(_run, args=args, kwargs=kwargs, autocast=given.autocast, module=copied, machine=machine)
        run(copied)
        began = time.perf_counter()
        with warnings.catch_warnings():
            # What torch's compiler says of itself is not about the user's program.
            warnings.simplefilter("ignore")
            run(compiled)
        compile_s = time.perf_counter() - began
        runs = [(run(copied), run(compiled)) for _ in range(_ROUNDS)]
    except Exception as error:  # noqa: BLE001, whatever user's code and compilers raise; it is told
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return MeasuredClass(name=name, sites=names, why_not=f"a copy of it does not run compiled ({reason:.200})")
    plain, other = (_least([pair[side] for pair in runs]) for side in (0, 1))
    return MeasuredClass(
        name=name, sites=names, plain=plain, compiled=other, compile_s=compile_s, why_not=_why_not(plain, other)
    )


def _why_not(plain: BlockCost, compiled: BlockCost) -> str:
    """Says why what was measured does not pay; empty if it does."""
    if compiled.seconds > MOST_SHARE * plain.seconds:
        return "that gains too little"
    if compiled.saved_bytes > plain.saved_bytes or compiled.peak_bytes > plain.peak_bytes:
        return f"it takes {format_bytes(compiled.peak_bytes)} at most, and plain {format_bytes(plain.peak_bytes)}"
    return ""


def _compiled(module: nn.Module) -> Callable[..., Any]:
    """Returns the call that `module.compile()` would put in the place of the module's own."""
    return torch.compile(module._call_impl, backend=BACKEND)  # noqa: SLF001, as `module.compile` does


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Copies a block with random weights: its own may be away."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if made.is_floating_point():
            made.normal_(0.0, 0.02)
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def _run(
    call: Callable[..., Any],
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    autocast: torch.dtype | None,
    module: nn.Module,
    machine: Machine,
) -> BlockCost:
    """One forward and backward."""
    for tensor in (*tensors_in((args, kwargs)), *module.parameters()):
        tensor.grad = None
    device, before = machine.device, machine.meter.live_bytes()
    with machine.phases("compile"):
        began = time.perf_counter()
        with torch.enable_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            outputs = call(*args, **kwargs)
        _synchronize(device)
        forward_s = time.perf_counter() - began
        made = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors_in(outputs)}
        saved = machine.meter.live_bytes() - before - sum(made.values())
        leaves = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in leaves]
        began = time.perf_counter()
        torch.autograd.backward(leaves, gradients)
        _synchronize(device)
        backward_s = time.perf_counter() - began
    last = machine.phases.last
    assert last is not None, "a phase has ended"
    peak = last.peak_bytes - before
    return BlockCost(forward_s=forward_s, backward_s=backward_s, saved_bytes=saved, peak_bytes=peak)


def _least(runs: Sequence[BlockCost]) -> BlockCost:
    """The least seconds, and the most bytes."""
    return BlockCost(
        forward_s=min(one.forward_s for one in runs),
        backward_s=min(one.backward_s for one in runs),
        saved_bytes=max(one.saved_bytes for one in runs),
        peak_bytes=max(one.peak_bytes for one in runs),
    )


def _synchronize(device: torch.device) -> None:
    if devices.is_accelerator(device):
        devices.of(device).synchronize(device)
