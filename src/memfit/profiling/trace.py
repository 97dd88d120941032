"""Traces training steps without allocating them, and tells what they would do with memory.

In: a model, a loss, a batch and the model's blocks. Out: a `Profile`. By default on fake tensors (shapes without
data): nothing is allocated, weights may be away, and the model is afterwards as it was. Where a program must see
data, on real tensors: a real step on a few rows.

[Note: two forwards]
The first row count runs forward twice, with the same random numbers and the same model state: what a program does must not change from call to call. In the
first run nothing is saved for backward, so a storage lives exactly as long as the program itself holds it (`held_until`). The second run saves, and goes
backward. Other row counts, and batches of other shapes later, run once; who holds what is told apart there as well (`recorder`, [Note: two holders]).
Real tensors always run twice.

[Note: what a trace does not see]
Memory inside operations is added from a table (`workspaces`) or measured (`measuring`); the allocator's rounding, libraries'
own caches and compiled code are not seen.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.batches.batch import UncuttableError, batch_rows, map_tensors, slice_batch
from memfit.core.errors import AwayError, MemfitError, UnsupportedError, UsageError
from memfit.core.planning_state import trial
from memfit.core.precision import ComputeDtype, stored_dtypes
from memfit.core.profile import Profile, TraceProfile
from memfit.profiling.assemble import Traced, arrange_blocks, assemble_profile
from memfit.profiling.blocks import BlockMap
from memfit.profiling.carried import ModuleMarks
from memfit.profiling.gradient_hooks import hand_on
from memfit.profiling.known import KnownOperations
from memfit.profiling.known_values import give_copy, readable_fakes
from memfit.profiling.measuring import Workspaces
from memfit.profiling.program_state import untouched_program
from memfit.profiling.recorder import TraceRecorder, storage_resizes
from memfit.profiling.records import CallRecord, Role
from memfit.profiling.standins import stand_ins, untouched_caches, untouched_generators
from memfit.profiling.summary import summarize
from memfit.profiling.traced_trees import contained_tensors
from memfit.tensors.dense import check_dense

__all__ = ["Loss", "Source", "arrange_blocks", "profile_real", "profile_step"]

Loss = Callable[[nn.Module, Any], torch.Tensor]
Source = Literal["auto", "fake", "real"]
# What fake tensors raise where data is missing, and what programs raise that stumble over the missing data later.
_MEMFIT = Path(__file__).parents[1]
_STANDARD = Path(os.__file__).parent
_SHARE_OF_FREE = 0.5
_BACKWARD_OF_ITS_OWN = (
    "the loss runs a backward of its own (torch.autograd.grad or a gradient penalty); memfit cannot place "
    "memory around it: compute the penalty without a second backward"
)
_FAKE_FAILURES = (RuntimeError, NotImplementedError, TypeError, AssertionError, AttributeError, ValueError, LookupError)


def profile_step(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    block_map: BlockMap,
    *,
    rows: Sequence[int] | None = None,
    parts: Mapping[int, Any] | None = None,
    whole_rows: int | None = None,
    state_bytes: Mapping[str, int] | None = None,
    trace: Source = "auto",
    compute_dtype: ComputeDtype = ComputeDtype.GIVEN,
    workspaces: Workspaces | None = None,
    checks_repeat: bool = True,
    program: Any = None,
) -> Profile:
    """Traces forward and backward of a microbatch of each of several sizes.

    Args:
        model: in the mode (training or not) in which it is to be profiled. It is left as it was.
        loss: `loss(model, batch)`, a scalar that requires gradients.
        batch: the batch of a whole step (see `profiling.batch`).
        block_map: from `find_blocks(model)`.
        rows: sizes of microbatches; the whole batch if None.
        parts: a microbatch of each size, the largest of them the whole batch, where batches are cut otherwise than by the dimension 0 of all tensors;
            takes the place of `rows`.
        whole_rows: rows of the whole batch, with `parts`.
        state_bytes: bytes of optimizer state by parameter name, once the states exist.
        trace: "fake" traces shapes only; "real" runs real steps, one for each size, and needs the memory and the
            weights for it; "auto" is "fake", and where that fails "real" on the smallest size, and on larger ones as far as there is
            memory. `Profile.source` tells which it was.
        compute_dtype: in which the step is to run, whatever the model's weights are now. A real trace then holds weights of that dtype
            beside the model's own.
        workspaces: what operations take inside themselves; None: only what the table knows.
        checks_repeat: a second forward shows that the program does the same again; False where another batch has shown it.
        program: the user's function, where `loss` is one around it: what it keeps is given back. None: the loss.

    Returns:
        Blocks in the order of their first call; blocks whose weights are read outside of every call are spanning.

    Raises:
        UsageError: rows outside the batch, a loss that is no scalar, parameters that the block map does not know.
        UncuttableError: the loss does not run on a part of the batch.
        UnsupportedError: the program needs data that a fake trace does not have, or does not repeat itself.
        AwayError: a real trace was asked for while weights are away.
    """
    whole = batch_rows(batch) if whole_rows is None else whole_rows
    if parts is None:
        sizes = sorted(set(rows)) if rows is not None else [whole]
        if not sizes or sizes[0] < 1 or sizes[-1] > whole:
            raise UsageError(f"rows={list(sizes)} must be sizes between 1 and the batch's {whole} rows")
        parts = {size: batch if size == whole else slice_batch(batch, 0, size) for size in sizes}
    sizes = sorted(parts)
    setting = _Setting(
        model=model,
        loss=loss,
        rows=whole,
        parts=parts,
        block_map=block_map,
        compute=compute_dtype,
        known=KnownOperations(workspaces or Workspaces()),
        program=loss if program is None else program,
        checks_repeat=checks_repeat,
    )
    _check_known_parameters(setting)
    _check_dense(setting)
    traced, source, reason = _trace_sizes(setting, sizes, trace)
    return assemble_profile(
        model,
        block_map,
        traced,
        batch_rows=whole,
        state_bytes=state_bytes or {},
        source=source,
        source_reason=reason,
        compute_dtype=compute_dtype,
    )


def profile_real(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    block_map: BlockMap,
    *,
    rows: Sequence[int] | None = None,
    state_bytes: Mapping[str, int] | None = None,
) -> Profile:
    """`profile_step` on real tensors, for programs that depend on data. Costs the memory of a plain step."""
    return profile_step(model, loss, batch, block_map, rows=rows, state_bytes=state_bytes, trace="real")


@dataclass(frozen=True, kw_only=True)
class _Setting:
    model: nn.Module
    loss: Loss
    rows: int
    parts: Mapping[int, Any]
    block_map: BlockMap
    compute: ComputeDtype
    known: KnownOperations
    program: Any = None
    checks_repeat: bool = True
    guesses: bool = False

    @property
    def whole(self) -> Any:
        """The largest part."""
        return self.parts[max(self.parts)]


def _trace_sizes(setting: _Setting, sizes: Sequence[int], trace: Source) -> tuple[list[Traced], str, str]:
    """(one result a size, "fake" or "real", why not fake)."""
    if trace == "real":
        return [_trace_one(setting, size, is_fake=False) for size in sizes], "real", ""
    try:
        return _trace_fake(setting, sizes), "fake", ""
    except (UnsupportedError, UsageError):
        raise
    except _FAKE_FAILURES as error:
        guessed = _trace_guessing(setting, sizes)
        if guessed is not None:
            return guessed, "fake", f"what the program reads of its numbers was guessed: {_why_fake_failed(error)}"
        reason = _why_fake_failed(error)
        if len(sizes) > 1:
            _check_parts(setting, sizes, reason)
        if trace == "fake":
            raise UnsupportedError(
                f"the step cannot be traced without data: {reason}. Let it be profiled on the device "
                "(trace='real', or the default)"
            ) from error
        if sizes[0] == setting.rows:
            with _named_failures(setting):
                return _trace_real(setting, sizes), "real", reason
    try:
        return _trace_real(setting, sizes), "real", reason
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except _FAKE_FAILURES as error:
        raise _uncuttable(setting, sizes[0], _why_fake_failed(error)) from error


def _trace_fake(setting: _Setting, sizes: Sequence[int]) -> list[Traced]:
    """Traces on fake tensors, the first of them twice where that is asked."""
    return [
        _trace_one(setting, size, is_fake=True, is_twice=setting.checks_repeat and size == sizes[0]) for size in sizes
    ]


def _trace_real(setting: _Setting, sizes: Sequence[int]) -> list[Traced]:
    """Real traces, the smallest size first, as far as there is memory: a size that is not traced is no candidate for a plan.

    A size is tried where its step, in proportion to the one before, takes at most half of the memory that is free; an armed limit may refuse it all the same.
    """
    traced = [_trace_one(setting, sizes[0], is_fake=False)]
    calls = [(call.site, call.blocks) for call in traced[0].profile.calls]
    for rows in sizes[1:]:
        before = traced[-1].profile
        if before.plain_peak_bytes * rows / before.rows > _SHARE_OF_FREE * _free_bytes(setting.model):
            break
        try:
            found = _trace_one(setting, rows, is_fake=False)
        except torch.OutOfMemoryError:
            break
        if [(call.site, call.blocks) for call in found.profile.calls] != calls:
            break  # which calls are made follows from the data
        traced.append(found)
    return traced


def _free_bytes(model: nn.Module) -> int:
    """Memory that nobody uses, where the model is."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _trace_guessing(setting: _Setting, sizes: Sequence[int]) -> list[Traced] | None:
    """The traces of a program that reads numbers, on likely ones ([Note: likely values] in `known_values`); None where that leads nowhere."""
    guessing = replace(setting, guesses=True)
    try:
        return _trace_fake(guessing, sizes)
    except (*_FAKE_FAILURES, ArithmeticError, MemfitError):
        return None  # a real trace tells what is wrong


def _check_parts(setting: _Setting, sizes: Sequence[int], reason: str) -> None:
    """Raises `UncuttableError` where the loss takes the largest size but no smaller one: then dimension 0 does not count rows."""
    try:
        _run(setting, sizes[-1], is_fake=True, is_whole=True)
    except _FAKE_FAILURES:
        return
    raise _uncuttable(setting, sizes[0], reason)


def _uncuttable(setting: _Setting, rows: int, reason: str) -> UncuttableError:
    return UncuttableError(
        f"the loss takes {setting.rows} rows, but no part of {rows} of them ({reason:.200}). What counts rows in the batch was not found: stack a list of samples "
        "into tensors (torch.stack), give fit(split=...), which cuts it, or a plan with microbatches=1"
    )


@contextmanager
def _named_failures(setting: _Setting) -> Iterator[None]:
    """Errors of the user's program on real tensors become `UsageError`, with the error and its place in the program.

    Raises:
        UsageError: the loss failed. What memfit raises, and a limit that was met, pass.
    """
    try:
        yield
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001, whatever the user's program raises
        place = error.__traceback__
        frames = [frame for frame in traceback.extract_tb(place) if _is_of_users(frame.filename)]
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
        told = str(error).strip().splitlines()
        # From the user's function on: what memfit did before it says nothing about the error. Its own attempt without data says the same twice.
        while place is not None and place.tb_next is not None and not _is_of_users(place.tb_frame.f_code.co_filename):
            place = place.tb_next
        error.__context__ = None
        if "BatchedTensor" in str(error) or "torch.func" in str(error):
            raise UnsupportedError(
                f"the loss uses transforms of torch.func (vmap, grad) around what memfit follows{where}: its tensors have no storages, and saved tensors cannot be "
                "placed. Compute the loss without them (a batched product for vmap; memfit makes the gradients itself)"
            ) from error.with_traceback(place if frames else error.__traceback__)
        raise UsageError(
            f"loss(model, batch) fails: {type(error).__name__}: {told[0] if told else ''}{where}. Nothing was changed; see that "
            "it runs on this batch in plain PyTorch"
        ) from error.with_traceback(place if frames else error.__traceback__)


def _is_of_users(file: str) -> bool:
    """The code is neither memfit's nor that of an installed package, nor the standard library's."""
    path = Path(file)
    return not (
        path.is_relative_to(_MEMFIT)
        or "site-packages" in path.parts
        or "dist-packages" in path.parts
        or path.is_relative_to(_STANDARD)
        or file.startswith("<")
    )


@contextmanager
def _without_torchs_log() -> Iterator[None]:
    """Keeps torch from logging an operation that fails on fake tensors, a hundred lines each time: the failure is answered here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def drops(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log.addFilter(drops)
    try:
        yield
    finally:
        log.removeFilter(drops)


def _why_fake_failed(error: Exception) -> str:
    operation = getattr(error, "func", None)
    told = f"{operation} needs values that a fake tensor does not have" if operation is not None else str(error)
    return told.strip().splitlines()[0] if told.strip() else type(error).__name__


def _trace_one(setting: _Setting, rows: int, *, is_fake: bool, is_twice: bool = True) -> Traced:
    forward_only = _run(setting, rows, is_fake=is_fake, is_whole=False) if is_twice else None
    step = _run(setting, rows, is_fake=is_fake, is_whole=True)
    names = [block.name for block in setting.block_map.blocks]
    profile = summarize(step, forward_only, rows, names)
    carried = _carried(setting, rows, step if forward_only is None else forward_only, is_fake=is_fake)
    for run in (forward_only, step):
        if run is not None:
            run.forget()
    return Traced(
        profile=profile,
        # What the forward writes must not be given up at the end of a visit.
        spanning=frozenset(step.spanning | _written(setting, step) | _read_beside_their_call(step, profile)),
        reads_batch_statistics=step.reads_batch_statistics,
        unsplittable_buffers=step.unsplittable_buffers,
        written_weights=step.written_weights,
        shared_weights=step.shared_weights,
        carried=carried,
        viewed_gradients=tuple(sorted(step.viewed_gradients)),
    )


def _carried(setting: _Setting, rows: int, first: TraceRecorder, *, is_fake: bool) -> tuple[str, ...]:
    """Names of what a forward leaves on modules that makes the next one another. See [Note: what one forward leaves to the next] in `carried`."""
    if not first.changed and not first.replaced:
        return first.exchanged
    second = _run(setting, rows, is_fake=is_fake, is_whole=False, repeats=True)
    second.forget()
    return (*first.exchanged, *(name for name in first.changed if name in second.changed), *second.replaced)


def _written(setting: _Setting, step: TraceRecorder) -> set[str]:
    """Blocks with a weight that the forward changes."""
    return {b.name for b in setting.block_map.blocks if any(name in step.written_weights for name, _ in b.parameters)}


def _read_beside_their_call(step: TraceRecorder, profile: TraceProfile) -> set[str]:
    """Blocks whose weights backward reads while another call's segment runs: their call's gradient came by a side door, past its outputs.

    (A tensor that a block leaves on itself, read by the loss.) Nothing tells the engine when to fetch them, so they stay.
    """
    return {block for call, block in step.backward_reads if call < 0 or block not in profile.calls[call].blocks}


def _run(setting: _Setting, rows: int, *, is_fake: bool, is_whole: bool, repeats: bool = False) -> TraceRecorder:
    """One run of the loss on stand-ins: forward, and backward if `is_whole`; if `repeats`, after another forward that left its notes on the modules."""
    sites = {id(site.module): site for site in setting.block_map.sites}
    recorder = TraceRecorder(sites, follows_values=is_fake, guesses=setting.guesses, known=setting.known)
    part = setting.parts[rows]
    device = next((t.device for t in contained_tensors(part)), torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(trial())
        has_drawn = stack.enter_context(untouched_generators())
        stack.enter_context(untouched_caches(setting.model))
        program = stack.enter_context(untouched_program(setting.program, setting.model))
        # Code that was asked to compile would find a mode that it cannot, and stay eager for good.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(storage_resizes(recorder))
        if is_fake:
            stack.enter_context(_without_torchs_log())
            stack.enter_context(_masks_as_for_real_tensors())
            stack.enter_context(setting.known.mode)
            if setting.guesses and recorder.values is not None:
                stack.enter_context(readable_fakes(recorder.values))
            made = stack.enter_context(
                stand_ins(
                    setting.model,
                    lambda p: _fake_parameter(setting.known, p, device, setting.compute),
                    lambda b: _with_value(setting.known.like(b, device), b),
                )
            )
            batch = map_tensors(part, lambda t: _with_value(setting.known.like(t, device), t))
        else:
            _check_present(setting)
            made = stack.enter_context(
                stand_ins(setting.model, lambda p: _alias(p, setting.compute), lambda b: b.detach().clone())
            )
            batch = map_tensors(part, lambda t: t.detach().clone())
        _declare(recorder, setting, made, batch)
        _place_hooks(stack, recorder, setting.model, is_whole=is_whole)

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            recorder.note_saved(tensor)
            return None if not is_whole else recorder.saved_apart(tensor) if is_fake else tensor

        def unpack(saved: torch.Tensor | None) -> torch.Tensor:
            if saved is None or not recorder.is_backward:
                raise UnsupportedError(_BACKWARD_OF_ITS_OWN)
            return saved

        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder)
        with saved_tensors_hooks(pack, unpack):
            if repeats:
                setting.loss(setting.model, batch)
            marks = ModuleMarks(setting.model, program)
            recorder.watch_left(tensor for tensors in marks.tensors.values() for tensor in tensors)
            value = setting.loss(setting.model, batch)
        recorder.exchanged, recorder.changed = marks.exchanged(), marks.changed()
        recorder.replaced = marks.replaced(recorder.left_written(), recorder.left_read() if repeats else None)
        recorder.uses_random |= has_drawn()
        _check_loss(value)
        if is_whole:
            weights = {n: made[id(p)] for block in setting.block_map.blocks for n, p in block.parameters}
            recorder.end_forward(value, dict(setting.model.named_buffers(remove_duplicate=False)), weights)
            recorder.begin_backward_phase()
            value.backward()
    return recorder


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
            "loss(model, batch) returned a value without gradient: are all parameters frozen, or is it detached?"
        )


def _check_present(setting: _Setting) -> None:
    for block in setting.block_map.blocks:
        for name, parameter in block.parameters:
            try:
                is_here = parameter.device.type != "meta" and _has_data(parameter)
            except AwayError:  # it wears the class of weights that are away
                is_here = False
            if not is_here:
                raise AwayError(
                    f"the loss fails on tensors without values, or reads numbers of them; on real ones it takes the weights, and {name!r} is away. See that the "
                    "batch is as the sample of fit was, in shapes and dtypes; or bring the weights (with job.weights(): ...), or keep them on the device"
                ) from None


def _check_known_parameters(setting: _Setting) -> None:
    known = setting.block_map.block_of_parameter()
    for name, parameter in setting.model.named_parameters():
        if id(parameter) not in known:
            raise UsageError(
                f"parameter {name!r} is not in the block map: call find_blocks(model) after the model's last change"
            )


def _check_dense(setting: _Setting) -> None:
    for name, buffer in setting.model.named_buffers():
        check_dense(buffer, f"the buffer {name!r} is")
    for tensor in contained_tensors(setting.whole):
        check_dense(tensor, "the batch holds")


# -- stand-ins -------------------------------------------------------------------------------------------------


def _fake_parameter(
    known: KnownOperations, parameter: nn.Parameter, device: torch.device, compute: ComputeDtype
) -> nn.Parameter:
    made: Any = known.like(parameter, device, _weight_dtype(parameter, compute))
    return _with_attributes(made, parameter)


def _with_attributes(stand_in: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
    """What the user's code hung on a parameter is read by its forward too (a scale, bitsandbytes' `quant_state`)."""
    for name, value in vars(parameter).items():
        if not name.startswith("_memfit"):
            setattr(stand_in, name, value)
    return stand_in


def _with_value(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    if real.device.type != "meta" and _has_data(real):
        give_copy(fake, real)
    return fake


def _has_data(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size() or tensor.numel() == 0


def _alias(parameter: nn.Parameter, compute: ComputeDtype) -> nn.Parameter:
    """The same memory (in another dtype: a copy) as another leaf, so that gradients and hooks of the real parameter stay out of the trace."""
    with torch._C.DisableTorchFunctionSubclass():
        weight = parameter.detach().to(_weight_dtype(parameter, compute)).as_subclass(torch.Tensor)
    # A class of the user's stays what it is: forwards ask for it.
    made = torch.Tensor._make_subclass(type(parameter), weight, parameter.requires_grad)
    return _with_attributes(made, parameter)  # type: ignore[arg-type]


def _weight_dtype(parameter: nn.Parameter, compute: ComputeDtype) -> torch.dtype:
    return getattr(torch, stored_dtypes(str(parameter.dtype).removeprefix("torch."), compute)[0])


@contextmanager
def _masks_as_for_real_tensors() -> Iterator[None]:
    """Lets transformers skip attention masks as it does for real tensors: its fake ones have values to look at here."""
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


# -- hooks -----------------------------------------------------------------------------------------------------


def _declare(recorder: TraceRecorder, setting: _Setting, made: Mapping[int, torch.Tensor], batch: Any) -> None:
    for block in setting.block_map.blocks:
        for name, parameter in block.parameters:
            stand_in = made[id(parameter)]
            recorder.register(stand_in, Role.WEIGHT, block.name)
            recorder.register_real(parameter, name, block.name)
            if stand_in.requires_grad:
                stand_in.register_hook(partial(recorder.note_arrival, name))
                stand_in.register_post_accumulate_grad_hook(recorder.note_gradient)
                hand_on(parameter, stand_in)
    recorder.register_buffers(dict(setting.model.named_buffers(remove_duplicate=False)))
    for tensor in contained_tensors(batch):
        recorder.register(tensor, Role.INPUT, is_batch=True)


def _place_hooks(stack: ExitStack, recorder: TraceRecorder, model: nn.Module, *, is_whole: bool) -> None:
    for name, module in model.named_modules():
        stack.callback(_hook_module(recorder, module, name, is_whole=is_whole))


def _hook_module(recorder: TraceRecorder, module: nn.Module, name: str, *, is_whole: bool) -> Callable[[], None]:
    def enter(entered: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.enter_module(entered, name, args, kwargs)

    def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del args, kwargs
        call = recorder.leave_module(output)
        if call is not None and is_whole:
            _watch_gradients(recorder, call, output)

    before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    after = module.register_forward_hook(leave, with_kwargs=True, always_call=True)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


def _watch_gradients(recorder: TraceRecorder, call: CallRecord, output: Any) -> None:
    """Hooks on nodes, as the engine's: a tensor that is changed in place later gets another node; of a view, only the base's node may remain."""
    outputs = [t for t in contained_tensors(output) if t.requires_grad and not isinstance(t, nn.Parameter)]
    outputs += [t._base for t in outputs if t._is_view() and t._base is not None]
    begun: list[bool] = []

    def begins(_gradients: Any) -> None:
        if not begun:
            begun.append(True)
            recorder.begin_backward(call)

    for node in {t.grad_fn for t in outputs if t.grad_fn is not None}:
        node.register_prehook(begins)
