"""One run of a loss on stand-ins for the model's weights, buffers and batch, watched by a recorder.

In: the setting of a trace and a size of microbatch. Out: the recorder, full. The model, the
generators and the user's caches are afterwards as they were.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.core.errors import AwayError, UnsupportedError, UsageError
from memfit.core.process_state import trial
from memfit.core.storage_formats import ComputeDtype
from memfit.tensors.autograd_graph import Gradients, watch_gradients_of
from memfit.tensors.trees import PLAIN_TYPES, held_objects, own_attributes
from memfit.trace.batch import map_tensors
from memfit.trace.blocks import BlockMap
from memfit.trace.known import KnownOperations
from memfit.trace.known_values import readable_fakes
from memfit.trace.program_state import ProgramState, tensors_among, untouched_program
from memfit.trace.recorder import TraceRecorder
from memfit.trace.standins import (
    alias,
    fake_parameter,
    has_data,
    stand_ins,
    untouched_caches,
    untouched_generators,
    with_value,
)
from memfit.trace.storage_log import IS_VIEW, WAS_VIEW, CallRecord, Role, storage_resizes
from memfit.trace.traced_trees import contained_tensors

# Changes that a forward makes to the model's modules themselves, or to what the loss keeps, and
# that the next forward meets: counters, words, exchanged submodules.
#
# In: a model and what the loss keeps, before a forward. Out: names of what is different after it.
#
# [Note: what one forward leaves to the next]
# Microbatch by microbatch, forwards follow each other as in a plain loop. Layer by layer they run
# in descending order, and a model that counts its forwards (an annealed temperature), or exchanges
# its modules in the first one and draws random numbers for them, would give the count or the draws
# to another microbatch. A number that each forward sets to the same value (a height, a flag) tells
# no order; so what has changed is looked at over a second forward.
#
# A tensor that a forward puts on a module in the place of another (a running mean, the last hidden
# state) is handed on where the next forward both reads it and puts another one there. One that is
# only put there (an auxiliary loss) or only read (a cache of positions) tells no order. Buffers and
# parameters have rules of their own.

_ABSENT = object()


class ModuleMarks:
    """Plain attributes, tensors in attributes and submodules of a model, and the same that the loss
    keeps, as they are now.

    Memory: references; what is noted lives as long as this does, so that another one cannot be
    taken for it.

    Attributes:
        tensors: by name of the attribute, those that a forward finds there.

    Args:
        model: any.
        program: what the loss keeps beside it.
    """

    def __init__(self, model: nn.Module, program: ProgramState) -> None:
        self._model = model
        self._program = program
        self._modules = _modules_of(model)
        self._plain = _plain_of(self._values())
        self.tensors = tensors_among(self._values())

    def exchanged(self) -> tuple[str, ...]:
        """Names of the submodules that are others now, the outermost only."""
        now = _modules_of(self._model)
        names = [n for n in sorted(self._modules.keys() | now.keys()) if self._modules.get(n) is not now.get(n)]
        return tuple(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))

    def changed(self) -> tuple[str, ...]:
        """Names of numbers, flags and words that are others now."""
        now = _plain_of(self._values())
        return tuple(
            name
            for name in sorted(self._plain.keys() | now.keys())
            if not _is_same(self._plain.get(name, _ABSENT), now.get(name, _ABSENT))
        )

    def replaced(self, written: AbstractSet[int], read: AbstractSet[int] | None = None) -> tuple[str, ...]:
        """Names under which other tensors lie now, or changed ones.

        Args:
            written: ids of those that were changed in place.
            read: only those of which one with such an `id` was found; None: all.
        """
        now = tensors_among(self._values())
        found: list[str] = []
        for name in sorted(self.tensors.keys() | now.keys()):
            before = [*map(id, self.tensors.get(name, ()))]
            is_other = before != [*map(id, now.get(name, ()))] or not written.isdisjoint(before)
            if is_other and (read is None or not read.isdisjoint(before)):
                found.append(name)
        return tuple(found)

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield from _attributes_of(_modules_of(self._model))
        yield from self._program.values()


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _attributes_of(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """(name, value) of what modules have beside torch's own, and of what objects hold that they
    have.
    """
    for place, module in modules.items():
        outer = f"{place}." if place else ""
        for name, value in own_attributes(module):
            yield f"{outer}{name}", value
        for name, held in held_objects(module):
            for inner, value in vars(held).items():
                yield f"{outer}{name}.{inner}", value


def _plain_of(values: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in values if type(value) in PLAIN_TYPES}


def _is_same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and left == right)


Loss = Callable[[nn.Module, Any], torch.Tensor]
_BACKWARD_OF_ITS_OWN = (
    "the loss runs a backward of its own (torch.autograd.grad, .backward()), around which memfit cannot place memory. Where its gradients are numbers, "
    "give memfit.fit(lines=True) a loss without it, and run it in the loop; or leave it out where memfit.is_tracing(), if the model's forward has it. A "
    "gradient of a gradient (create_graph=True) trains in plain PyTorch alone"
)


@dataclass(frozen=True, kw_only=True)
class TraceSetting:
    """Arguments that the runs of one trace share: `parts` are the microbatches by their number of
    rows.
    """

    model: nn.Module
    loss: Loss
    rows: int
    parts: Mapping[int, Any]
    block_map: BlockMap
    compute: ComputeDtype
    known: KnownOperations
    program: Any = None
    checks_repeat: bool = True
    counts_python: bool = True
    guesses: bool = False
    left_bytes: Callable[[], int | None] = lambda: None

    @property
    def whole(self) -> Any:
        """The largest part."""
        return self.parts[max(self.parts)]


def run_traced(
    setting: TraceSetting, rows: int, *, is_fake: bool, is_whole: bool, repeats: bool = False
) -> TraceRecorder:
    """One run of the loss on stand-ins: forward, and backward if `is_whole`.

    If `repeats`, after another forward that left its notes on the modules.
    """
    sites = {id(site.module): site for site in setting.block_map.sites}
    recorder = TraceRecorder(sites, follows_values=is_fake, guesses=setting.guesses, known=setting.known)
    with ExitStack() as stack:
        # Last: torch's queue holds what a failed backward had ready, and with it the step's
        # tensors, until another backward runs.
        stack.callback(lambda: torch.ones((), requires_grad=True).backward())
        stack.enter_context(trial())
        has_drawn = stack.enter_context(untouched_generators())
        stack.enter_context(untouched_caches(setting.model))
        program = stack.enter_context(untouched_program(setting.program, setting.model))
        # Code that was asked to compile would find a mode that it cannot, and stay eager for good.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(storage_resizes(recorder.log))
        made, batch = _place_stand_ins(stack, recorder, setting, setting.parts[rows], is_fake=is_fake)
        _declare(recorder, setting, made, batch)
        _place_hooks(stack, recorder, setting, made, is_whole=is_whole)

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            return recorder.python.uncounted(keep, tensor)

        def keep(tensor: torch.Tensor) -> torch.Tensor | None:
            recorder.note_saved(tensor)
            if not is_whole:
                return None
            if is_fake:
                return recorder.log.saved_apart(tensor, setting.known)
            # Without its graph: a node that saves its own output would hold itself for good where
            # the step fails before its backward.
            with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
                return tensor.detach()

        def unpack(saved: torch.Tensor | None) -> torch.Tensor:
            if saved is None or not recorder.log.is_backward:
                raise UnsupportedError(_BACKWARD_OF_ITS_OWN)
            _note_asked(recorder, saved)
            return saved

        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder)
        with saved_tensors_hooks(pack, unpack):
            if repeats:
                setting.loss(setting.model, batch)
            marks = ModuleMarks(setting.model, program)
            recorder.watch_left(tensor for tensors in marks.tensors.values() for tensor in tensors)
            with recorder.python.counted() if setting.counts_python else nullcontext():
                value = setting.loss(setting.model, batch)
        recorder.exchanged, recorder.changed = marks.exchanged(), marks.changed()
        read, written = recorder.left_used()
        recorder.replaced = marks.replaced(written, read if repeats else None)
        recorder.uses_random |= has_drawn()
        _check_loss(value)
        if is_whole:
            weights = {n: made[id(p)] for block in setting.block_map.blocks for n, p in block.parameters}
            recorder.end_forward(value, dict(setting.model.named_buffers(remove_duplicate=False)), weights)
            recorder.begin_backward()
            names = {id(p): name for block in setting.block_map.blocks for name, p in block.parameters}
            names |= {id(stand_in): name for name, stand_in in weights.items()}
            with recorder.gradient_reads.watched(names, made):
                value.backward()
        # The graph goes first: functions keep tensors in it that nobody else holds.
        del value
        recorder.log.end()
    return recorder


def _note_asked(recorder: TraceRecorder, tensor: torch.Tensor) -> None:
    """Autograd asks for a tensor that it saved."""
    segment = recorder.backward[-1]
    if segment.asked is None and recorder.log.record_of(tensor, Role.INPUT).role is Role.MADE:
        segment.asked = len(recorder.events)


def _place_stand_ins(
    stack: ExitStack, recorder: TraceRecorder, setting: TraceSetting, part: Any, *, is_fake: bool
) -> tuple[Mapping[int, torch.Tensor], Any]:
    """Puts stand-ins in place of weights and buffers.

    Returns them by `id` of the real tensor, and the batch's.
    """
    device = next((t.device for t in contained_tensors(part)), torch.device("cpu"))
    if is_fake:
        stack.enter_context(_without_torchs_log())
        stack.enter_context(_masks_as_for_real_tensors())
        stack.enter_context(setting.known.mode)
        if setting.guesses and recorder.values is not None:
            stack.enter_context(readable_fakes(recorder.values))
        made = stack.enter_context(
            stand_ins(
                setting.model,
                lambda p: fake_parameter(setting.known, p, device, setting.compute),
                lambda b: with_value(setting.known.like(b, device), b),
            )
        )
        batch = map_tensors(part, lambda t: with_value(setting.known.like(t, device), t))
    else:
        assert weight_without_bytes(setting) is None
        made = stack.enter_context(
            stand_ins(setting.model, lambda p: alias(p, setting.compute), lambda b: b.detach().clone())
        )
        batch = map_tensors(part, lambda t: t.detach().clone())
    return made, batch


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        told = (
            f"{value.numel()} numbers (a tensor of shape {tuple(value.shape)}): take its mean() or sum()"
            if isinstance(value, torch.Tensor)
            else f"a {type(value).__name__}"
        )
        raise UsageError(f"loss(model, batch) must return a scalar tensor, not {told}")
    if value.is_complex():
        raise UsageError(f"loss(model, batch) must return a real number, not one of {value.dtype}")
    if not value.requires_grad:
        raise UsageError(
            "loss(model, batch) returned a value without gradient: are all parameters frozen, or is it detached? "
            "Unfreeze one (requires_grad_()), or return the loss as it was computed"
        )


def weight_without_bytes(setting: TraceSetting) -> str | None:
    """Returns the name of a weight that the loss cannot be run with; None: all are there."""
    for block in setting.block_map.blocks:
        for name, parameter in block.parameters:
            try:
                is_here = parameter.device.type != "meta" and has_data(parameter)
            except AwayError:  # it wears the class of weights that are away
                is_here = False
            if not is_here:
                return name
    return None


@contextmanager
def _without_torchs_log() -> Iterator[None]:
    """Keeps torch from logging an operation that fails on fake tensors, a hundred lines each time:
    the failure is answered here.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def drops(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log.addFilter(drops)
    try:
        yield
    finally:
        log.removeFilter(drops)


@contextmanager
def _masks_as_for_real_tensors() -> Iterator[None]:
    """Lets transformers skip attention masks as it does for real tensors: its fake ones have values
    to look at here.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if module is None or not hasattr(module, "is_fake_tensor"):
        yield
        return
    original = module.is_fake_tensor
    module.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        module.is_fake_tensor = original


def _declare(recorder: TraceRecorder, setting: TraceSetting, made: Mapping[int, torch.Tensor], batch: Any) -> None:
    for block in setting.block_map.blocks:
        for name, parameter in block.parameters:
            stand_in = made[id(parameter)]
            recorder.register(stand_in, Role.WEIGHT, block.name)
            recorder.register_real(parameter, name, block.name)
            if stand_in.requires_grad:
                stand_in.register_hook(partial(recorder.note_arrival, name))
                stand_in.register_post_accumulate_grad_hook(recorder.log.note_gradient)
                recorder.gradient_reads.hand_on(parameter, stand_in)
    recorder.register_buffers(dict(setting.model.named_buffers(remove_duplicate=False)))
    for tensor in contained_tensors(batch):
        recorder.register(tensor, Role.INPUT, is_batch=True)


def _place_hooks(
    stack: ExitStack,
    recorder: TraceRecorder,
    setting: TraceSetting,
    made: Mapping[int, torch.Tensor],
    *,
    is_whole: bool,
) -> None:
    leaves = {
        block.name: frozenset(id(made[id(p)]) for _, p in block.parameters if made[id(p)].requires_grad)
        for block in setting.block_map.blocks
    }
    for name, module in setting.model.named_modules():
        stack.callback(_hook_module(recorder, module, name, leaves if is_whole else None))


def _hook_module(
    recorder: TraceRecorder, module: nn.Module, name: str, leaves: Mapping[str, frozenset[int]] | None
) -> Callable[[], None]:
    def enter(entered: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.python.uncounted(recorder.enter_module, entered, name, args, kwargs)

    def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del args, kwargs
        recorder.python.uncounted(left, output)

    def left(output: Any) -> None:
        call = recorder.leave_module(output)
        if call is not None and leaves is not None:
            _watch_gradients(recorder, call, output, leaves)

    before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    after = module.register_forward_hook(leave, with_kwargs=True, always_call=True)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


def _watch_gradients(
    recorder: TraceRecorder, call: CallRecord, output: Any, leaves: Mapping[str, frozenset[int]]
) -> None:
    """Hooks on nodes, as the engine's: a tensor that is changed in place later gets another node.

    Of a view, only the base's node may remain. Nodes of earlier calls are not this one's, whose
    outputs a skipped layer hands on.
    """
    outputs = [t for t in contained_tensors(output) if t.requires_grad and not isinstance(t, nn.Parameter)]
    outputs += [t._base for t in outputs if t._is_view() and t._base is not None]
    begun: list[bool] = []

    def begins(_gradients: Any) -> None:
        if not begun:
            begun.append(True)
            recorder.begin_backward(call)

    for node in {t.grad_fn for t in outputs if t.grad_fn is not None and t.grad_fn._sequence_nr() >= call.began_at}:
        node.register_prehook(begins)
    earlier = {name for before in recorder.calls[: call.index] for name in before.reads}
    shared = frozenset[int]().union(*(leaves[name] for name in earlier.intersection(call.reads) if name in leaves))
    if shared:
        watch_gradients_of(lambda leaf: id(leaf) in shared, outputs, call.began_at, _without_bases)


def _without_bases(made: Gradients, given: Gradients) -> None:
    """As `without_bases` will, in the run."""
    del given
    for gradient in made:
        if gradient is not None and getattr(gradient, IS_VIEW, False):
            setattr(gradient, IS_VIEW, False)
            setattr(gradient, WAS_VIEW, True)
