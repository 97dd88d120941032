"""Operations that are worked out once: what is made from notes is what torch's own fake tensors give, and a quick profile is that of a full trace."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.trace import known as known_module
from memfit.trace.blocks import find_blocks
from memfit.trace.known import Kind, KnownOperations, ResultsOfProcess
from memfit.trace.measuring import Workspaces
from memfit.trace.operations import run_operation
from memfit.trace.recorder import TraceRecorder
from memfit.trace.storage_log import Role, StorageLog
from memfit.trace.trace import profile_step
from memfit.trace.traced_trees import operator_tensors
from memory.test_trace import ZOO, Case, own_loss, text

TEXTS = ("gpt2", "gpt2 eager", "llama", "mixtral", "t5", "bert", "albert", "lora")


class Square(torch.autograd.Function):
    """Keeps one tensor to itself, past the saved-tensor hooks, and saves another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.own = x + 1
        ctx.save_for_backward(x * 2)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (twice,) = ctx.saved_tensors
        return gradients[0] * twice + 0 * ctx.own


class Holding(nn.Module):
    """Holds what it made over its layers, in the ways in which programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))
        self.norm = nn.BatchNorm1d(48)
        self.register_buffer("count", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept, first = [], None
        for index, layer in enumerate(self.layers):
            y = layer(x)
            first = y if first is None else first
            kept.append(y.detach().clone())
            if index == 1:
                y.mul_(0.5)
            if index == 2:
                kept = kept[2:]
                y = checkpoint(lambda z: Square.apply(z.tanh()), y, use_reentrant=False)  # type: ignore[assignment]
            x = torch.nn.functional.dropout(y.view(-1, 2, 24).transpose(1, 2).reshape(-1, 48), 0.25) + x
        self.count += 1
        self.last = kept[-1] * 2
        assert first is not None
        chunks = torch.stack([c.square().sum() for c in self.norm(x).chunk(3, dim=1)])
        return chunks.sum() + torch.stack(kept).sum() + first.mean() + (x * 2.0).to(torch.float64).sum().float()


def holding_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def drawn(name: str, dice: random.Random) -> Case:
    """A model with a batch of another shape."""
    if name == "holding":
        return Holding(), holding_loss, torch.randn(dice.randint(2, 9), 48)
    model, loss, batch = ZOO[name]()
    if name in TEXTS:
        places = dice.randint(5, 60)
        rows = dice.randint(1, 5)
        more = {"attention_mask": torch.ones(rows, places, dtype=torch.long)} if "attention_mask" in batch else {}
        return model, own_loss, text(rows, places, **more)
    if "pixel_values" in batch:
        rows = dice.randint(1, 5)
        side = batch["pixel_values"].shape[-1]
        return model, loss, {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 2, (rows,))}
    rows = dice.randint(1, 8)
    return model, loss, {name: tensor[:rows] for name, tensor in batch.items()}


def no_key(_: KnownOperations, __: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> None:
    tensors += operator_tensors((args, kwargs))


def full(monkeypatch: pytest.MonkeyPatch, case: Case) -> Profile:
    """The profile in which every operation runs on torch's fake tensors, and a second forward tells what the program holds."""
    model, loss, batch = case
    with monkeypatch.context() as patch:
        patch.setattr(KnownOperations, "key", no_key)
        patch.setattr(StorageLog, "saved_apart", lambda _, tensor, __: tensor)
        return profile_step(model, loss, batch, find_blocks(model), trace="fake")


def without_kernels(profile: Profile) -> Profile:
    """Without what kernels keep: where no operation has a note, alike ones are not known to share a kernel."""
    traces = {rows: replace(trace, kernel_bytes=0) for rows, trace in profile.traces.items()}
    return replace(profile, traces=traces)


# Peft warns of its own imports, which is an error here.
SLOW = [name for name in ZOO if name not in ("gpt2 eager", "mixtral", "lora")]


@pytest.mark.parametrize(
    "name", ["holding", "gpt2 eager", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_quick_profile_is_that_of_a_full_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(name)
    for _ in range(3 if name in SLOW else 1):
        case = drawn(name, dice)
        model, loss, batch = case
        # What Python calls once a process (torch builds some functions at their first use) is counted where it happens.
        profile_step(model, loss, batch, find_blocks(model), trace="fake", checks_repeat=False)
        quick = profile_step(model, loss, batch, find_blocks(model), trace="fake", checks_repeat=False)
        whole = full(monkeypatch, case)
        assert without_kernels(quick) == without_kernels(whole)
        for rows, trace in quick.traces.items():
            assert trace.kernel_bytes <= whole.traces[rows].kernel_bytes


@pytest.mark.parametrize(
    "name", ["holding", "gpt2 eager", *(pytest.param(name, marks=pytest.mark.slow) for name in [*SLOW, "mixtral"])]
)
def test_what_is_made_from_a_note_is_what_torch_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each single operation, beside torch's fake tensors; views beside those of tensors with data."""
    plain = KnownOperations.run
    compared: Counter[str] = Counter()

    def run(
        known: KnownOperations,
        kind: Kind,
        key: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        is_known = key is not None and (
            key in kind.notes or known._results.get(known._settings, kind.operator, key) is not None
        )
        out, facts = plain(known, kind, key, args, kwargs, tensors)
        if is_known or kind.is_direct:
            if kind.is_view and all(type(one) is FakeTensor for one in tensors):
                # Torch's fake views give a dimension of one entry another stride here and there than views of data do.
                with unset_fake_temporarily():
                    made = real_like(tensors[0])
                    theirs = kind.operator(*(made if one is tensors[0] else one for one in args), **kwargs)
                    assert placed(out) == placed(theirs), kind.operator
            else:
                theirs = run_operation(kind.operator, args, kwargs, is_fake=True)
                assert described(out, tensors) == described(theirs, tensors), kind.operator
            compared[str(kind.operator)] += 1
        return out, facts

    monkeypatch.setattr(KnownOperations, "run", run)
    model, loss, batch = drawn(name, random.Random(f"{name} 2"))
    profile_step(model, loss, batch, find_blocks(model), trace="fake")
    assert compared.total() > 30
    assert len(compared) > 8


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "strided": lambda x: torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2],
    "broadcast": lambda x: x[:1].expand_as(x),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "negated": lambda x: torch.ops.aten._neg_view(x) if x.dtype.is_floating_point else x,
    "conjugated": lambda x: x.conj(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_shape_functions_give_at_once_is_what_fake_tensors_give(layout: str, dtype: torch.dtype) -> None:
    """Operators in other layouts, sizes and dtypes than models have; what one refuses, the other refuses."""
    aten = torch.ops.aten

    def of(*shape: int) -> Tensor:
        return LAYOUTS[layout](torch.zeros(shape, dtype=dtype))

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for left, right in ((3, 4), (4, 5)), ((3, 4), (5, 4)), ((1, 4), (4, 1)), ((2, 0), (0, 3)):
        for other in LAYOUTS.values():
            calls.append((aten.mm.default, (of(*left), other(torch.zeros(right, dtype=dtype))), {}))
            calls.append((aten.bmm.default, (of(2, *left), other(torch.zeros(2, *right, dtype=dtype))), {}))
            calls.append((aten.cat.default, ([of(2, *left), other(torch.zeros(2, *left, dtype=dtype))], 1), {}))
    for x in of(2, 3, 4), of(2, 4, 3, 5), of(1, 4), of(2, 0):
        calls += [
            (aten.cat.default, ([x, torch.zeros(0, dtype=dtype)], -1), {}),
            (aten.cat.default, ([x, of(2, 9)], 0), {}),
        ]
        for dims in ([0], [-1], [0, 1], [], None, [7]):
            for keeps in False, True:
                calls += [(aten.sum.dim_IntList, (x, dims, keeps), {}), (aten.mean.dim, (x, dims, keeps), {})]
                calls.append((aten.sum.dim_IntList, (x, dims, keeps), {"dtype": torch.float64}))
        calls += [(aten._unsafe_view.default, (x, shape), {}) for shape in ([-1], [7, 3])]
        formats = torch.contiguous_format, torch.preserve_format, torch.channels_last
        calls += [(aten.clone.default, (x,), {"memory_format": one}) for one in formats]
        calls.append(
            (aten.slice_backward.default, (x, [*x.shape[:-1], 2 * x.shape[-1]], x.dim() - 1, 0, 2 * x.shape[-1], 2), {})
        )
    known, agreed = KnownOperations(Workspaces(), ResultsOfProcess()), Counter[str]()
    for func, real, options in calls:
        kind, tensors = known.kind(func), list[Tensor]()
        with known.mode:
            args = tree_map(lambda one: known.mode.from_tensor(one) if isinstance(one, Tensor) else one, real)
            key = known.key(kind, args, options, tensors)
            assert kind.is_direct
            at_once = outcome(tensors, lambda *given: known.run(*given)[0], kind, key, args, options, tensors)
            theirs = outcome(tensors, partial(run_operation, is_fake=True), func, args, options)
        assert at_once == theirs, (func, [(one.shape, one.stride()) for one in tensors], options)
        agreed["refused" if theirs == "refused" else str(func)] += 1
    assert len(agreed) > 5
    assert agreed.total() - agreed["refused"] > 100


def outcome(tensors: Sequence[Tensor], function: Callable[..., Any], *given: Any) -> Any:
    """A description of what a function gives, or that it refuses."""
    try:
        return described(function(*given), tensors)
    except (RuntimeError, ValueError, IndexError):
        return "refused"


def described(out: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(out, Tensor):
        return [described(one, tensors) for one in out] if isinstance(out, tuple | list) else out
    storage = out.untyped_storage()
    return (
        next((i for i, one in enumerate(tensors) if one is out), None),
        next((i for i, one in enumerate(tensors) if one.untyped_storage()._cdata == storage._cdata), None),
        out.dtype, out.shape, out.stride(), out.storage_offset(), storage.nbytes(), out.device, out.requires_grad, out.layout,
        torch._C._dispatch_keys(out).raw_repr(),
    )  # fmt: skip


def real_like(tensor: Tensor) -> Tensor:
    """A tensor with data that lies as this one does."""
    storage = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


def placed(out: Any) -> Any:
    if not isinstance(out, Tensor):
        return [placed(one) for one in out]
    return out.dtype, out.shape, out.stride(), out.storage_offset(), out.untyped_storage().nbytes()


def kinds_of(
    function: Callable[[Any], Any], *inputs: tuple[torch.dtype, ...], results: ResultsOfProcess | None = None
) -> list[Any]:
    """Dtypes, shapes and strides that a function gives twice for each input, under one table of notes."""
    known = KnownOperations(Workspaces(), ResultsOfProcess() if results is None else results)
    recorder = TraceRecorder({}, follows_values=True, known=known)
    found: list[Any] = []
    with known.mode, torch.no_grad(), recorder:
        for dtype in inputs:
            for _ in range(2):
                x = torch.empty(6, 4, dtype=dtype[0])
                found += [(one.dtype, tuple(one.shape), one.stride()) for one in function(x)]
    return found


def test_arguments_that_are_equal_and_not_alike_have_notes_of_their_own() -> None:
    found = kinds_of(
        lambda x: (x * 1, x * 1.0, x * True, x.t() * 1.0, x[1:] * 1.0, x.mul_(1)), (torch.int64,), (torch.float16,)
    )
    i, f, h = torch.int64, torch.float32, torch.float16
    rows, columns = ((6, 4), (4, 1)), ((4, 6), (1, 4))
    once = [(i, *rows), (f, *rows), (i, *rows), (f, *columns), (f, (5, 4), (4, 1)), (i, *rows)]
    half = [(h, shape, stride) for _, shape, stride in once]
    assert found == [*once, *once, *half, *half]


def test_later_profiles_make_what_earlier_ones_met_under_the_same_settings_and_only_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def run(func: Any, args: Any, kwargs: Any, *, is_fake: bool) -> Any:
        ran.append(str(func))
        return run_operation(func, args, kwargs, is_fake=is_fake)

    def several(x: Tensor) -> tuple[Tensor, ...]:
        return x @ x.t(), x.softmax(-1), *torch.var_mean(x, 0), x.add_(1)

    monkeypatch.setattr(known_module, "run_operation", run)
    results = ResultsOfProcess(most=8)
    first = kinds_of(several, (torch.float32,), results=results)
    assert len(ran) > 3
    ran.clear()
    assert kinds_of(several, (torch.float32,), results=results) == first
    assert not ran
    torch.use_deterministic_algorithms(True)
    try:
        assert kinds_of(several, (torch.float32,), results=results) == first
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(ran) > 3
    assert kinds_of(several, (torch.float64,), results=results) != first
    assert 0 < len(results) <= 8


def test_a_tensor_that_is_two_arguments_is_told_from_two_that_are_alike() -> None:
    known = KnownOperations(Workspaces())
    recorder = TraceRecorder({}, follows_values=True, known=known)
    with known.mode, torch.no_grad():
        x, y = torch.empty(300), torch.empty(300)
        recorder.register_buffers({"x": x, "y": y})
        with recorder:
            x.add_(x)
            x.add_(y)
            loss = x.sum()
        written = [recorder.log.record_of(tensor, Role.INPUT).is_written for tensor in (x, y)]
    assert written == [True, False]
    assert loss.shape == ()


def test_a_batch_of_a_new_shape_runs_through_the_model_once() -> None:
    shapes: list[tuple[int, ...]] = []
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    def note(_: nn.Module, args: tuple[Tensor]) -> None:
        if memfit.is_planning():
            shapes.append(tuple(args[0].shape))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    model.register_forward_pre_hook(note)
    with memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, torch.randn(4, 6), plan=Plan()) as job:
        shapes.clear()
        job.step(torch.randn(3, 6))
        job.step(torch.randn(3, 6))
    assert shapes == [(3, 6)]


class Dropping(nn.Module):
    """Computes something that the loss does not use."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.side, self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 512), nn.Linear(512, 64)
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        if self.drops:
            self.side(x).softmax(-1).exp().sum()
        return self.last(self.first(x).tanh()).square().mean()


def test_a_graph_that_the_program_drops_is_gone_in_the_profile() -> None:
    """What an output saves of itself must not keep its graph: in plain PyTorch the side's memory is free before the first layer runs."""
    batch = torch.randn(256, 64)
    peaks = {}
    for drops in (False, True):
        model = Dropping(drops=drops)
        found = profile_step(model, holding_loss, batch, find_blocks(model), trace="fake")
        peaks[drops] = found.traces[256].whole_peak_bytes
    assert peaks[True] == peaks[False]
