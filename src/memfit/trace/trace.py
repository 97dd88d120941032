"""Traces training steps without allocating them, and tells what they would do with memory.

In: a model, a loss, a batch and the model's blocks. Out: a `Profile`. By default on fake tensors
(shapes without data): nothing is allocated, weights may be away, and the model is afterwards as it
was. Where a program must see data, on real tensors: a real step on a few rows.

[Note: two forwards]
The first row count that is traced runs forward twice, with the same random numbers and the same
model state: what a program does must not change from call to call. In the first run nothing is
saved for backward, so a storage lives exactly as long as the program itself holds it
(`held_until`). The second run saves, and goes backward. Other row counts, and batches of other
shapes later, run once; who holds what is told apart there as well (`storage_log`, [Note: two
holders]). Real tensors always run twice.

[Note: what a trace does not see]
Memory inside operations is added from a table (`workspaces`) or measured (`measuring`); the
allocator's rounding, libraries' own caches and compiled code are not seen.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from memfit import devices
from memfit.core.errors import AwayError, MemfitError, UnsupportedError, UsageError
from memfit.core.process_state import without_collections
from memfit.core.profile import Profile, TraceProfile
from memfit.core.storage_formats import ComputeDtype, dtype_failure
from memfit.tensors.write_marks import check_dense
from memfit.trace.assemble import Traced, arrange_blocks, assemble_profile
from memfit.trace.batch import UncuttableError, batch_rows, slice_batch
from memfit.trace.blocks import BlockMap
from memfit.trace.known import KnownOperations
from memfit.trace.measuring import Workspaces
from memfit.trace.python_calls import operations_of, with_python
from memfit.trace.recorder import TraceRecorder
from memfit.trace.summary import note_made_once, summarize
from memfit.trace.trace_run import Loss, TraceSetting, run_traced, weight_without_bytes
from memfit.trace.traced_trees import contained_tensors

__all__ = ["Loss", "Source", "arrange_blocks", "profile_step"]

Source = Literal["auto", "fake", "real"]
_MEMFIT = Path(__file__).parents[1]
_STANDARD = Path(os.__file__).parent
_SHARE_OF_FREE = 0.5
# What fake tensors raise where data is missing, and what programs raise that stumble over the
# missing data later.
_FAKE_FAILURES = (RuntimeError, NotImplementedError, TypeError, AssertionError, AttributeError, ValueError, LookupError)


def profile_step(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    block_map: BlockMap,
    *,
    rows: Sequence[int] | None = None,
    parts: Mapping[int, Any] | None = None,
    smaller: Mapping[int, Any] = MappingProxyType({}),
    whole_rows: int | None = None,
    state_bytes: Mapping[str, int] | None = None,
    trace: Source = "auto",
    compute_dtype: ComputeDtype = ComputeDtype.GIVEN,
    workspaces: Workspaces | None = None,
    checks_repeat: bool = True,
    counts_python: bool = True,
    program: Any = None,
    suffices: Callable[[Profile], bool] | None = None,
    left_bytes: Callable[[], int | None] = lambda: None,
) -> Profile:
    """Traces forward and backward of a microbatch of each of several sizes.

    Args:
        model: in the mode (training or not) in which it is to be profiled. It is left as it was.
        loss: `loss(model, batch)`, a scalar that requires gradients.
        batch: the batch of a whole step (see `trace.batch`).
        block_map: from `find_blocks(model)`.
        rows: sizes of microbatches; the whole batch if None.
        parts: a microbatch of each size, the largest of them the whole batch, where batches are cut
            otherwise than by the dimension 0 of all tensors; takes the place of `rows`.
        smaller: further microbatches by size, with `parts`, that are traced where that takes no
            data.
        whole_rows: rows of the whole batch, with `parts`.
        state_bytes: bytes of optimizer state by parameter name, once the states exist.
        trace: "fake" traces shapes only; "real" runs real steps, one for each size, and needs the
            memory and the weights for it; "auto" is "fake", and where that fails "real" on the
            smallest size, and on larger ones as far as there is memory. `Profile.source` tells
            which it was.
        compute_dtype: in which the step is to run, whatever the model's weights are now. A real
            trace then holds weights of that dtype beside the model's own.
        workspaces: what operations take inside themselves; None: only what the table knows.
        checks_repeat: a second forward shows that the program does the same again; False where
            another batch has shown it.
        counts_python: what Python the program calls is counted, which takes a quarter of a trace.
        program: the user's function, where `loss` is one around it: what it keeps is given back.
            None: the loss.
        suffices: asked once the largest size is traced, without data, whether its profile alone is
            enough; if so the others are not traced. None: all are.
        left_bytes: tells what a limit leaves to real steps beside what lives; None: there is none.

    Returns:
        Blocks in the order of their first call; blocks whose weights are read outside of every call
        are spanning.

    Raises:
        UsageError: rows outside the batch, a loss that is no scalar, parameters that the block map
            does not know.
        UncuttableError: the loss does not run on a part of the batch.
        UnsupportedError: the program needs data that a fake trace does not have, or does not repeat
            itself.
        AwayError: only a real trace would do, and weights are away.
    """
    whole = batch_rows(batch) if whole_rows is None else whole_rows
    parts = _first_rows(batch, whole, rows) if parts is None else parts
    sizes = sorted(parts)
    setting = TraceSetting(
        model=model,
        loss=loss,
        rows=whole,
        parts={**smaller, **parts},
        block_map=block_map,
        compute=compute_dtype,
        known=KnownOperations(workspaces or Workspaces()),
        program=loss if program is None else program,
        checks_repeat=checks_repeat,
        counts_python=counts_python,
        left_bytes=left_bytes,
    )
    _check_known_parameters(setting)
    _check_dense(setting)

    def assembled(traced: Sequence[Traced], source: str = "fake", reason: str = "") -> Profile:
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

    largest = None
    if suffices is not None and len(sizes) > 1 and trace != "real":
        # Why it fails, a trace of all sizes tells.
        largest = _unless_it_fails(partial(_trace_one, setting, sizes[-1], is_fake=True, is_twice=checks_repeat))
        found = None if largest is None else assembled([largest])
        if found is not None and suffices(found):
            return found
    traced, source, reason = _trace_sizes(setting, sizes, trace, largest)
    more = _smaller_ones(setting, smaller, traced[0]) if source == "fake" and not reason else []
    return assembled([*traced, *more], source, reason)


def _first_rows(batch: Any, whole: int, rows: Sequence[int] | None) -> dict[int, Any]:
    """Returns the first rows of a batch, in each size that is asked for. Raises `UsageError`."""
    sizes = sorted(set(rows)) if rows is not None else [whole]
    if not sizes or sizes[0] < 1 or sizes[-1] > whole:
        raise UsageError(f"rows={list(sizes)} must be sizes between 1 and the batch's {whole} rows")
    return {size: batch if size == whole else slice_batch(batch, 0, size) for size in sizes}


def _unless_it_fails(traced: Callable[[], Traced]) -> Traced | None:
    """The trace of one size on fake tensors; None where that fails."""
    with suppress(MemfitError, *_FAKE_FAILURES):
        return traced()
    return None


def _smaller_ones(setting: TraceSetting, sizes: Iterable[int], beside: Traced) -> list[Traced]:
    """Traces of further sizes; without those that make other calls than the size beside them."""
    found = [_unless_it_fails(partial(_trace_beside, setting, size, beside)) for size in sizes]
    calls = [(call.site, call.blocks) for call in beside.profile.calls]
    return [one for one in found if one and [(call.site, call.blocks) for call in one.profile.calls] == calls]


def _trace_sizes(
    setting: TraceSetting, sizes: Sequence[int], trace: Source, largest: Traced | None
) -> tuple[list[Traced], str, str]:
    """(one result a size, "fake" or "real", why not fake).

    `largest` is that of the largest size where it is traced already.
    """
    if trace == "real":
        return [_trace_one(setting, size, is_fake=False) for size in sizes], "real", ""
    try:
        return _trace_fake(setting, sizes, largest), "fake", ""
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
            raise UnsupportedError(f"the step cannot be traced without data: {reason}") from error
        if (name := weight_without_bytes(setting)) is not None:
            raise AwayError(
                f"the step cannot be traced without data: {reason}. It cannot run on data "
                f"either: {name!r} has no bytes (it is away, or the model was built empty). See that the batch has the "
                "shapes and dtypes that the loss takes; read no numbers where memfit.is_tracing() says so; or fit a "
                "model that has its values, with a batch that reads them as the sample"
            ) from error
    try:
        if sizes[0] == setting.rows:
            with _named_failures(setting):
                return _trace_real(setting, sizes), "real", reason
        return _trace_real(setting, sizes), "real", reason
    except MemfitError:
        raise
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"the step cannot be traced without data: {reason}. The real step of {sizes[0]} row{'s' * (sizes[0] > 1)} that would show "
            "it instead, with everything on the device, met the limit. Read no numbers where memfit.is_tracing() says so, "
            "give a batch of smaller rows, or raise the limit"
        ) from error
    except _FAKE_FAILURES as error:
        raise _uncuttable(setting, sizes[0], _why_fake_failed(error)) from error


def _trace_fake(setting: TraceSetting, sizes: Sequence[int], largest: Traced | None = None) -> list[Traced]:
    """Traces on fake tensors, the first of them twice where that is asked."""
    known = {} if largest is None else {sizes[-1]: largest}
    if not known:
        known[sizes[0]] = _trace_one(setting, sizes[0], is_fake=True, is_twice=setting.checks_repeat)
    told = next(iter(known.values()))
    for size in sizes:
        if size not in known:
            known[size] = _trace_beside(setting, size, told)
    return [known[size] for size in sizes]


def _trace_beside(setting: TraceSetting, rows: int, told: Traced) -> Traced:
    """The trace of a further size on fake tensors, with the Python that another size has told."""
    found = _trace_one(replace(setting, counts_python=False), rows, is_fake=True, is_twice=False)
    if not setting.counts_python:
        return found
    if operations_of(found.profile) != operations_of(told.profile):
        # A loop over rows, say: it calls more functions, too.
        return _trace_one(setting, rows, is_fake=True, is_twice=False)
    return replace(found, profile=with_python(found.profile, told.profile))


def _trace_real(setting: TraceSetting, sizes: Sequence[int]) -> list[Traced]:
    """Real traces, the smallest size first, as far as there is memory: a size that is not traced is
    no candidate for a plan.

    A size is tried where its step, in proportion to the one before, takes at most half of the
    memory that is free, and fits what a limit leaves: what one that fills the limit brings into the
    process beside its tensors would pass it.
    """
    traced = [_trace_one(setting, sizes[0], is_fake=False)]
    calls = [(call.site, call.blocks) for call in traced[0].profile.calls]
    for rows in sizes[1:]:
        gc.collect()  # what the step before left in cycles
        before, left = traced[-1].profile, setting.left_bytes()
        needed = before.plain_peak_bytes * rows / before.rows
        if needed > _SHARE_OF_FREE * _free_bytes(setting.model) or (left is not None and needed > left):
            break
        try:
            found = _trace_one(setting, rows, is_fake=False)
        except torch.OutOfMemoryError:
            break
        if [(call.site, call.blocks) for call in found.profile.calls] != calls:
            break  # which calls are made follows from the data
        traced.append(found)
    gc.collect()
    return traced


def _free_bytes(model: nn.Module) -> int:
    """Memory that nobody uses, where the model is."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if devices.is_accelerator(device):
        return devices.of(device).free_bytes(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _trace_guessing(setting: TraceSetting, sizes: Sequence[int]) -> list[Traced] | None:
    """The traces of a program that reads numbers, on likely ones ([Note: likely values] in
    `known_values`); None where that leads nowhere.
    """
    guessing = replace(setting, guesses=True)
    try:
        return _trace_fake(guessing, sizes)
    except (*_FAKE_FAILURES, ArithmeticError, MemfitError):
        return None  # a real trace tells what is wrong


def _check_parts(setting: TraceSetting, sizes: Sequence[int], reason: str) -> None:
    """Raises `UncuttableError` where the loss takes the largest size but no smaller one: then
    dimension 0 does not count rows.
    """
    try:
        run_traced(setting, sizes[-1], is_fake=True, is_whole=True)
    except _FAKE_FAILURES:
        return
    raise _uncuttable(setting, sizes[0], reason)


def _uncuttable(setting: TraceSetting, rows: int, reason: str) -> UncuttableError:
    return UncuttableError(
        f"the loss takes {setting.rows} rows, but no part of {rows} of them ({reason:.200}). What counts rows in the batch was not found: stack a list of samples "
        "into tensors (torch.stack), give fit(split=...), which cuts it, or a plan with microbatches=1"
    )


@contextmanager
def _named_failures(setting: TraceSetting) -> Iterator[None]:
    """Errors of the user's program on real tensors become `UsageError`, with the error and its
    place in the program.

    Raises:
        UnsupportedError: it fails in the dtype that the plan computes in.
        UsageError: the loss failed. What memfit raises, and a limit that was met, pass.
    """
    try:
        yield
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001, whatever the user's program raises
        place = error.__traceback__
        where = _place_in_users_code(error)
        told = str(error).strip().splitlines()
        # From the user's function on: what memfit did before it says nothing about the error. Its
        # own attempt without data says the same twice.
        while place is not None and place.tb_next is not None and not _is_of_users(place.tb_frame.f_code.co_filename):
            place = place.tb_next
        error.__context__ = None
        if _names_dtype(error, setting.compute):
            raise UnsupportedError(dtype_failure(setting.compute, error)) from error.with_traceback(place)
        if "BatchedTensor" in str(error) or "torch.func" in str(error):
            raise UnsupportedError(
                f"the loss uses transforms of torch.func (vmap, grad) around what memfit follows{where}: its tensors have no storages, and saved tensors cannot be "
                "placed. Compute the loss without them (a batched product for vmap; memfit makes the gradients itself)"
            ) from error.with_traceback(place if where else error.__traceback__)
        raise UsageError(
            f"loss(model, batch) fails: {type(error).__name__}: {told[0] if told else ''}{where}. Nothing was changed; see that "
            "it runs on this batch in plain PyTorch"
        ) from error.with_traceback(place if where else error.__traceback__)


def _place_in_users_code(error: BaseException) -> str:
    """Returns file and line of the user's own code that an error came from, or nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_users(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _names_dtype(error: BaseException, compute: ComputeDtype) -> bool:
    """Tells whether torch's message is about the dtype that the plan computes in."""
    names = {
        ComputeDtype.GIVEN: (),
        ComputeDtype.BFLOAT16: ("BFloat16", "bfloat16"),
        ComputeDtype.FLOAT16: ("Half", "float16"),
        ComputeDtype.FLOAT16_WEIGHTS: ("Half", "float16"),
    }[compute]
    return any(name in str(error) for name in names)


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


def _why_fake_failed(error: Exception) -> str:
    operation = getattr(error, "func", None)
    lines = str(error).strip().splitlines()
    if operation is not None:
        said = f"{operation} needs values that a fake tensor does not have"
    elif not lines:
        said = type(error).__name__
    else:
        # A KeyError says its key alone.
        name = "" if isinstance(error, RuntimeError | MemfitError) else f"{type(error).__name__}: "
        said = f"{name}{lines[0].rstrip('.')}"
    return f"{said}{_place_in_users_code(error)}"


def _trace_one(setting: TraceSetting, rows: int, *, is_fake: bool, is_twice: bool = True) -> Traced:
    with without_collections() if is_fake else nullcontext():
        return _traced(setting, rows, is_fake=is_fake, is_twice=is_twice)


def _traced(setting: TraceSetting, rows: int, *, is_fake: bool, is_twice: bool) -> Traced:
    forward_only = run_traced(setting, rows, is_fake=is_fake, is_whole=False) if is_twice else None
    step = run_traced(setting, rows, is_fake=is_fake, is_whole=True)
    names = [block.name for block in setting.block_map.blocks]
    first = step if forward_only is None else forward_only
    second = _forward_again(setting, rows, first, is_fake=is_fake)
    note_made_once(step, second)
    profile = summarize(step, forward_only, rows, names)
    for run in (forward_only, step, second):
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
        carried=_carried(first, second),
        viewed_gradients=tuple(sorted(step.viewed_gradients)),
        read_gradients=tuple(step.gradient_reads.found),
    )


def _forward_again(setting: TraceSetting, rows: int, first: TraceRecorder, *, is_fake: bool) -> TraceRecorder | None:
    """Two forwards, one after the other, where the first leaves something on modules; None where it
    does not.
    """
    if not first.changed and not first.replaced:
        return None
    return run_traced(setting, rows, is_fake=is_fake, is_whole=False, repeats=True)


def _carried(first: TraceRecorder, second: TraceRecorder | None) -> tuple[str, ...]:
    """Names of what a forward leaves on modules that makes the next one another.

    See [Note: what one forward leaves to the next] in `trace_run`.
    """
    if second is None:
        return first.exchanged
    return (*first.exchanged, *(name for name in first.changed if name in second.changed), *second.replaced)


def _written(setting: TraceSetting, step: TraceRecorder) -> set[str]:
    """Blocks with a weight that the forward changes."""
    return {b.name for b in setting.block_map.blocks if any(name in step.written_weights for name, _ in b.parameters)}


def _read_beside_their_call(step: TraceRecorder, profile: TraceProfile) -> set[str]:
    """Blocks whose weights backward reads while another call's segment runs: their call's gradient
    came by a side door, past its outputs.

    (A tensor that a block leaves on itself, read by the loss.) Nothing tells the engine when to
    fetch them, so they stay.
    """
    return {block for call, block in step.backward_reads if call < 0 or block not in profile.calls[call].blocks}


def _check_known_parameters(setting: TraceSetting) -> None:
    known = setting.block_map.block_of_parameter()
    for name, parameter in setting.model.named_parameters():
        if id(parameter) not in known:
            raise UsageError(
                f"the parameter {name!r} is new in the model, and was not planned for: close the job and fit again"
            )


def _check_dense(setting: TraceSetting) -> None:
    for name, buffer in setting.model.named_buffers():
        check_dense(buffer, f"the buffer {name!r} is")
    for tensor in contained_tensors(setting.whole):
        check_dense(tensor, "the batch holds")
