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

import copy
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
from torch.utils import _pytree as pytree

from memfit import devices
from memfit.core.compiled_calls import CompiledBytes, CompiledShare, at_shares, without_selection
from memfit.core.errors import MemfitWarning, TierUnavailableError, UnsupportedError, UsageError
from memfit.core.limits import format_bytes, format_seconds
from memfit.core.profile import CallProfile, Profile
from memfit.devices.compiling import find_compiler
from memfit.engine.writes import is_compiled
from memfit.machine.machine import Machine
from memfit.runs.checkpointer import stored_compiled
from memfit.runs.run_state import give_random, take_random
from memfit.runs.run_store import RunStore
from memfit.tensors.trees import tensors_in
from memfit.trace.batch import first_part
from memfit.trace.blocks import BlockMap, ModuleSite
from memfit.trace.cutting import Whole

# Costs of one block, forward and backward, plain or compiled.
#
# In: what a trace calls a block with. Out: seconds and bytes of runs of a copy of it on random
# numbers. Which blocks are compiled then, says `planner.compiled_blocks`.


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One block, forward and backward.

    Attributes:
        forward_s, backward_s: least seconds of some runs.
        saved_bytes: kept from forward to backward, without arguments and outputs; of a compiled
            block, those among that which the plain one lets go.
        forward_peak_bytes: of the forward, above what was there before.
        backward_peak_bytes: of the backward, above what was there before it, the outputs' gradients
            among that.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int

    @property
    def peak_in_backward_bytes(self) -> int:
        """Peak of the backward, with what the forward keeps for it."""
        return self.saved_bytes + self.backward_peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of both, without outputs and their gradients."""
        return max(self.forward_peak_bytes, self.peak_in_backward_bytes)

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class GivenCall:
    """Arguments of a call, described in place of tensors; and the autocast around it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None

    @property
    def key(self) -> str:
        """Equal for calls that one measurement serves."""
        return repr(pytree.tree_map(_key_of, (self.args, dict(self.kwargs)))) + str(self.autocast)

    def made(self, module: nn.Module, machine: Machine) -> MadeCall:
        """Makes tensors of the descriptions, for runs of a copied block."""

        def make(leaf: Any) -> Any:
            return leaf.made(machine.device) if isinstance(leaf, _Described) else leaf

        args, kwargs = pytree.tree_map(make, (self.args, dict(self.kwargs)))
        return MadeCall(args=args, kwargs=kwargs, autocast=self.autocast, module=module, machine=machine)


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


def note_given(
    found: dict[str, GivenCall], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Notes what a module is called with: the hook before its forward, with the first two given."""
    device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _describe, (args, kwargs))
    found[name] = GivenCall(args=args, kwargs=kwargs, autocast=autocast)


def _describe(tensor: torch.Tensor) -> _Described:
    return _Described(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _key_of(leaf: Any) -> Any:
    plain = isinstance(leaf, _Described | bool | int | float | str) or leaf is None
    return leaf if plain else type(leaf).__qualname__


def copied_block(module: nn.Module, device: torch.device) -> nn.Module:
    """Copies a block with random weights: its own may be away."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if made.is_floating_point():
            made.normal_(0.0, 0.02)
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Tensors that a block's forward keeps for its backward.

    Attributes:
        own_bytes: without arguments, outputs, parameters and buffers.
        arguments: bytes of arguments among them, by position among the call's tensors.
        outputs: likewise of outputs that are no arguments.
    """

    own_bytes: int
    arguments: Mapping[int, int]
    outputs: Mapping[int, int]

    def beyond(self, plain: Kept) -> int:
        """Bytes of arguments and outputs that are kept here and not by the plain block."""
        mine = [*_without(self.arguments, plain.arguments), *_without(self.outputs, plain.outputs)]
        return sum(mine)


@dataclass(frozen=True, kw_only=True)
class MadeCall:
    """A call of a copied block that is run again and again.

    Attributes:
        args, kwargs: of the call.
        autocast: dtype of an autocast around it.
        module: that has the parameters.
        machine: whose meter and phases are read.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None
    module: nn.Module
    machine: Machine

    def run(self, call: Callable[..., Any]) -> BlockCost:
        """Runs one forward and backward of the block's call, plain or compiled."""
        for tensor in (*tensors_in((self.args, self.kwargs)), *self.module.parameters()):
            tensor.grad = None
        device, before = self.machine.device, self.machine.meter.live_bytes()
        with self.machine.phases("compile"):
            began = time.perf_counter()
            outputs = self._forward(call)
            devices.finish(device)
            forward_s = time.perf_counter() - began
        forward = _peak_of(self.machine)
        given = _storages((self.args, self.kwargs))
        made = {where: nbytes for where, nbytes in _storages(outputs).items() if where not in given}
        saved = self.machine.meter.live_bytes() - before - sum(made.values())
        leaves = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in leaves]
        between = self.machine.meter.live_bytes()
        with self.machine.phases("compile"):
            began = time.perf_counter()
            torch.autograd.backward(leaves, gradients)
            devices.finish(device)
            backward_s = time.perf_counter() - began
        backward = _peak_of(self.machine)
        return BlockCost(
            forward_s=forward_s,
            backward_s=backward_s,
            saved_bytes=saved,
            forward_peak_bytes=forward - before,
            backward_peak_bytes=backward - between,
        )

    def kept_by(self, call: Callable[..., Any]) -> Kept:
        """Runs one forward, and notes what it keeps."""
        outputs = self._forward(call)
        found, given, made = _storages(_saved_for(outputs)), _storages((self.args, self.kwargs)), _storages(outputs)
        lasting = _storages([*self.module.parameters(), *self.module.buffers()])
        own = {where: nbytes for where, nbytes in found.items() if where not in given | made | lasting}
        made = {where: nbytes for where, nbytes in made.items() if where not in given}
        return Kept(
            own_bytes=sum(own.values()),
            arguments={i: nbytes for i, (where, nbytes) in enumerate(given.items()) if where in found},
            outputs={i: nbytes for i, (where, nbytes) in enumerate(made.items()) if where in found},
        )

    def _forward(self, call: Callable[..., Any]) -> Any:
        kind, dtype = self.machine.device.type, self.autocast
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            return call(*self.args, **self.kwargs)


def _saved_for(outputs: Any) -> list[torch.Tensor]:
    """Tensors that the graph behind outputs keeps. Hooks of saved tensors would have compiled code
    compiled anew.
    """
    left: list[Any] = [tensor.grad_fn for tensor in tensors_in(outputs)]
    seen: set[Any] = {None}
    saved: list[torch.Tensor] = []
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                saved += tensors_in([getattr(node, name)])
    return saved


def _without(some: Mapping[int, int], others: Mapping[int, int]) -> list[int]:
    return [nbytes for i, nbytes in some.items() if i not in others]


def _storages(tree: Any) -> dict[int, int]:
    """Bytes of storages by where they lie, in order."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(tree)}


def _peak_of(machine: Machine) -> int:
    """Peak of the phase that has ended."""
    assert machine.phases.last is not None, "a phase has ended"
    return machine.phases.last.peak_bytes


def least_of(runs: Sequence[BlockCost]) -> BlockCost:
    """The least seconds, and the most bytes."""
    return BlockCost(
        forward_s=min(one.forward_s for one in runs),
        backward_s=min(one.backward_s for one in runs),
        saved_bytes=max(one.saved_bytes for one in runs),
        forward_peak_bytes=max(one.forward_peak_bytes for one in runs),
        backward_peak_bytes=max(one.backward_peak_bytes for one in runs),
    )


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
