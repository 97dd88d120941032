"""Small random models, and random plans for them: drawn by hypothesis, shrunk by it to the least one that fails.

In: nothing. Out: `specs()` draws a `ModelSpec`, `make_case` turns one into a `Case`, `random_plans` draws a plan for a
profile.

A drawn model is a list of calls of a few blocks. Any call may take any earlier value, add another one to it (a skip),
be glued by a view, a transpose, an in-place operation or a direct read of some block's weight; a block may be called
twice or never; what blocks return and leave behind is drawn too. Every drawn program is legal in plain PyTorch: in-
place operations only meet values that nobody else holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from equivalence.zoo import Batch, Case
from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

WIDTH = 8
PLACES = 3
ROWS = 5


class Kind(StrEnum):
    """What a block does at its edge."""

    PLAIN = "plain"
    BRANCHES = "branches"
    KEYWORDS = "keywords"
    TUPLE = "tuple"
    DICTIONARY = "dictionary"
    DATACLASS = "dataclass"
    IN_PLACE = "in-place"
    VIEW = "view"
    IDENTITY = "identity"
    NESTED = "nested"
    SPARE_WEIGHT = "spare-weight"


class Edit(StrEnum):
    """What a block does to a value inside, in place or by views; rows stay apart."""

    PRODUCT = "product"
    NARROW = "narrow"
    CHUNKS = "chunks"
    EXPAND = "expand"
    FOREACH = "foreach"
    OUT = "out"
    TRANSPOSE = "transpose"
    UNSAFE_VIEW = "unsafe-view"
    COPY = "copy"


class Side(StrEnum):
    """By which other door something leaves a block for the loss."""

    NONE = "none"
    HOOK = "hook"
    ATTRIBUTE = "attribute"


class Glue(StrEnum):
    """What stands between calls."""

    NONE = "none"
    IN_PLACE = "in-place"
    TRANSPOSE = "transpose"
    VIEW = "view"
    IN_PLACE_PART = "in-place-part"
    IN_PLACE_FOREACH = "in-place-foreach"
    IN_PLACE_OUT = "in-place-out"
    READ_WEIGHT = "read-weight"
    DETACH = "detach"


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One block."""

    kind: Kind = Kind.PLAIN
    side: Side = Side.NONE
    edits: tuple[Edit, ...] = ()
    has_dropout: bool = False
    is_frozen: bool = False


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """One call: of which block, on which value (0 is the entry's), with what added, behind which glue; left out in
    odd steps.
    """

    block: int
    source: int
    skip: int | None = None
    glue: Glue = Glue.NONE
    reads: int = 0
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A whole model."""

    blocks: tuple[BlockSpec, ...]
    calls: tuple[CallSpec, ...]


@dataclass
class Result:
    """What a DATACLASS block returns."""

    hidden: Tensor
    others: list[Tensor]


Output = Tensor | dict[str, Tensor] | tuple[Tensor, ...] | Result

_captured: ContextVar[list[Output] | None] = ContextVar("captured", default=None)


def _capture(_module: nn.Module, _inputs: object, output: Output) -> None:
    """The models' own hook: keeps what a block returns for the loss."""
    captured = _captured.get()
    if captured is not None:
        captured.append(output)


def _hidden(output: Output) -> Tensor:
    """What goes on of a block's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Result):
        return output.hidden + 0.5 * output.others[1]
    if isinstance(output, dict):
        return output["hidden"] * output["gate"]
    return output[0]


class Block(nn.Module):
    """A residual block whose edge is drawn."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.spec = spec
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down: nn.Module = nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(0.25 if spec.has_dropout else 0.0)
        if spec.kind is Kind.NESTED:
            self.down = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Tanh(), nn.Linear(12, WIDTH))
        if spec.kind in (Kind.BRANCHES, Kind.DICTIONARY):
            self.other = nn.Linear(WIDTH, WIDTH)
        if spec.kind is Kind.SPARE_WEIGHT:
            self.spare = nn.Parameter(torch.ones(3))
        if Edit.PRODUCT in spec.edits:
            self.mix = nn.Parameter(torch.randn(2, 6, 6) / 3)
        self.side: Tensor | None = None
        if spec.side is Side.HOOK:
            self.register_forward_hook(_capture)
        self.requires_grad_(requires_grad=not spec.is_frozen)

    def _inner(self, hidden: Tensor) -> Tensor:
        values = functional.gelu(self.up(self.norm(hidden)))
        for edit in self.spec.edits:
            values = self._edit(edit, values * 0.9)
        return self.dropout(self.down(values))

    def _edit(self, edit: Edit, values: Tensor) -> Tensor:
        """`values` are fresh, and nobody else holds them."""
        match edit:
            case Edit.PRODUCT:
                heads = values.unflatten(-1, (2, 6)).unsqueeze(-2)
                product = torch.matmul(heads, self.mix)
                product += torch.tanh(heads)
                return product.flatten(-3)
            case Edit.NARROW:
                values.narrow(-1, 3, 4).mul_(0.5)
            case Edit.CHUNKS:
                first, second = values.unsafe_chunk(2, dim=-1)
                return torch.cat([second.tanh_(), first.sigmoid_()], dim=-1)
            case Edit.EXPAND:
                return values + values.narrow(-1, 0, 1).expand(values.shape)
            case Edit.FOREACH:
                torch.ops.aten._foreach_mul_([values], 0.8)
            case Edit.OUT:
                gate = torch.empty(values.shape, device=values.device)
                with torch.no_grad():
                    torch.sigmoid(values.detach(), out=gate)
                return values * gate
            case Edit.TRANSPOSE:
                values.transpose(-1, -2).mul_(0.7)
            case Edit.UNSAFE_VIEW:
                view = torch.ops.aten._unsafe_view(values, values.shape)
                view += 0.25
                return view
            case Edit.COPY:
                values[..., :4].copy_(values[..., 4:8] * 0.5)
        return values

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        (hidden,) = args or (kwargs["hidden"],)
        kind = self.spec.kind
        inner = self._inner(hidden.clone() if kind is Kind.IN_PLACE else hidden)
        if self.spec.side is Side.ATTRIBUTE:
            self.side = inner.square().mean(-1)
        if kind is Kind.IN_PLACE:
            return hidden.mul_(0.5).add_(inner)
        if kind is Kind.IDENTITY:
            return hidden
        if kind is Kind.KEYWORDS:
            return hidden + kwargs["scale"] * inner
        if kind is Kind.BRANCHES:
            return hidden + inner * torch.sigmoid(self.other(hidden))
        if kind is Kind.TUPLE:
            return hidden + inner, inner.sum(-1), None
        if kind is Kind.DICTIONARY:
            return {"hidden": hidden + inner, "gate": torch.sigmoid(self.other(hidden))}
        if kind is Kind.DATACLASS:
            return Result(hidden=hidden + inner, others=[inner, inner * inner])
        if kind is Kind.VIEW:
            return (hidden + inner).transpose(-1, -2).contiguous().transpose(-1, -2)
        return hidden + inner


class RandomModel(nn.Module):
    """Entry, the drawn calls, exit."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(block) for block in spec.blocks])
        self.exit = nn.Linear(WIDTH, WIDTH)

    def block(self, index: int) -> Block:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def forward(self, inputs: Tensor, *, takes_optional: bool) -> Tensor:
        values = [self.entry(inputs)]
        for call in self.spec.calls:
            if takes_optional or not call.is_optional:
                values.append(self._call(call, values))
            else:
                values.append(values[call.source])
        return self.exit(values[-1])

    def _call(self, call: CallSpec, values: list[Tensor]) -> Tensor:
        # The multiplication makes a value of this call's own: whoever works in place harms nobody.
        hidden = values[call.source] * 0.9
        if call.skip is not None:
            hidden = hidden + values[call.skip]
        if call.glue is Glue.DETACH:
            hidden = hidden.detach()
        if call.glue is Glue.READ_WEIGHT:
            hidden = hidden + 0.1 * self.block(call.reads).norm.weight
        if call.glue is Glue.TRANSPOSE:
            hidden = hidden.transpose(0, 1)
        shape = hidden.shape
        if call.glue is Glue.VIEW:
            hidden = hidden.reshape(-1, WIDTH)
        block = self.block(call.block)
        output = block(hidden=hidden, scale=0.5) if block.spec.kind is Kind.KEYWORDS else block(hidden)
        hidden = _hidden(output)
        if call.glue is Glue.VIEW:
            hidden = hidden.reshape(shape)
        if call.glue is Glue.TRANSPOSE:
            hidden = hidden.transpose(0, 1)
        match call.glue:
            case Glue.IN_PLACE:
                hidden.add_(0.25)
            case Glue.IN_PLACE_PART:
                hidden[..., 1:5].mul_(0.5)
            case Glue.IN_PLACE_FOREACH:
                torch.ops.aten._foreach_add_([hidden], 0.125)
            case Glue.IN_PLACE_OUT:
                with torch.no_grad():
                    torch.mul(hidden.detach(), 0.75, out=hidden.detach())
        return hidden


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, RandomModel)
    captured: list[Output] = []
    token = _captured.set(captured)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.side = None
    try:
        outputs = model(batch["inputs"], takes_optional=batch["takes_optional"])
    finally:
        _captured.reset(token)
    loss = functional.mse_loss(outputs, batch["targets"])
    sides = [model.block(index).side for index in range(len(model.blocks))]
    for side in (*(_hidden(output).mean(-1) for output in captured), *sides):
        if side is not None:
            loss = loss + 0.1 * side.square().mean()
    return loss


def _batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(50 + step)
    inputs = torch.randn((ROWS, PLACES, WIDTH), generator=generator)
    targets = torch.randn((ROWS, PLACES, WIDTH), generator=generator)
    return {"inputs": inputs, "targets": targets, "takes_optional": step % 2 == 0}


def _shared(spec: ModelSpec) -> frozenset[str]:
    """Names of weights with more than one use: a block's second call, or a read by glue beside its calls."""
    names: set[str] = set()
    for index, block in enumerate(spec.blocks):
        calls = sum(call.block == index for call in spec.calls)
        reads = sum(call.glue is Glue.READ_WEIGHT and call.reads == index for call in spec.calls)
        if calls > 1:
            names |= {f"blocks.{index}.{name}" for name, _ in Block(block).named_parameters()}
        if calls and block.edits.count(Edit.PRODUCT) > 1:
            names.add(f"blocks.{index}.mix")  # twice in one call
        if calls + reads > 1 and reads:
            names.add(f"blocks.{index}.norm.weight")
    return frozenset(names)


def make_case(spec: ModelSpec) -> Case:
    """Builds a drawn model, the same bits at every call."""
    torch.manual_seed(0)
    model = RandomModel(spec).train()
    return Case(model=model, loss=_loss, batch=_batch, shared=_shared(spec), untouched=None)


def _block_specs() -> st.SearchStrategy[BlockSpec]:
    return st.builds(
        BlockSpec,
        kind=st.sampled_from(Kind),
        side=st.sampled_from(Side),
        edits=st.one_of(st.just(()), st.lists(st.sampled_from(Edit), min_size=1, max_size=3).map(tuple)),
        has_dropout=st.booleans(),
        # One in four: a frozen block hides what is wrong inside it.
        is_frozen=st.sampled_from([False, False, False, True]),
    )


def specs() -> st.SearchStrategy[ModelSpec]:
    """Models of one to four blocks and one to five calls, of those that plain PyTorch runs backward."""
    return _drawn_specs().filter(_is_legal)


def _is_legal(spec: ModelSpec) -> bool:
    """False where the model changes in place what autograd still needs (a block that returns its argument can make it so)."""
    case = make_case(spec)
    with torch.random.fork_rng(devices=[]):
        try:
            for step in (0, 1):  # with the optional calls, and without
                case.loss(case.model, case.batch(step)).backward()
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                return False
            raise
    return True


@st.composite
def _drawn_specs(draw: st.DrawFn) -> ModelSpec:
    blocks = tuple(draw(st.lists(_block_specs(), min_size=1, max_size=4)))
    any_block = st.integers(0, len(blocks) - 1)
    calls: list[CallSpec] = []
    for place in range(draw(st.integers(1, 5))):
        # Mostly a chain, as models are; at times an older value.
        source = draw(st.one_of(st.just(place), st.just(place), st.integers(0, place)))
        calls.append(
            CallSpec(
                block=draw(any_block),
                source=source,
                skip=draw(st.one_of(st.none(), st.integers(0, place))),
                glue=draw(st.one_of(st.just(Glue.NONE), st.sampled_from(Glue))),
                reads=draw(any_block),
                is_optional=draw(st.sampled_from([False, False, False, True])),
            )
        )
    return ModelSpec(blocks=blocks, calls=tuple(calls))


@st.composite
def _call_plans(draw: st.DrawFn, number: int, tail: int | None, away: Sequence[Tier]) -> tuple[CallPlan, ...]:
    fates: list[CallPlan] = []
    for index in range(number):
        saved = draw(st.sampled_from(list(Saved)))
        can_join = index > 0 and index != tail and saved in (Saved.RECOMPUTE, Saved.SELECT) and fates[-1].saved is saved
        fates.append(
            CallPlan(
                saved=saved,
                saved_home=draw(st.sampled_from(away)),
                boundary_home=draw(st.sampled_from([Tier.DEVICE, *away])),
                joins_previous=can_join and draw(st.booleans()),
            )
        )
    return tuple(fates)


@st.composite
def random_plans(draw: st.DrawFn, profile: Profile, microbatches: int, away: Sequence[Tier] = (Tier.DISK,)) -> Plan:
    """Any legal plan with so many microbatches for a machine whose tiers are the device and those `away`."""
    homes = st.sampled_from([Tier.DEVICE, *away])
    blocks = {
        block.name: BlockPlan(weight_home=draw(homes), gradient_home=draw(homes), state_home=draw(homes))
        for block in profile.blocks
        if not block.is_spanning
    }
    number = len(next(iter(profile.traces.values())).calls)
    tail = draw(st.one_of(st.none(), st.integers(0, number - 1)))
    settings: dict[str, Any] = {
        "microbatches": microbatches,
        "order": draw(st.sampled_from(Order)),
        "blocks": blocks,
        "calls": draw(_call_plans(number, tail, away)),
        "tail": tail,
        "update": draw(st.sampled_from(UpdateTime)),
        "prefetch": draw(st.integers(0, 4)),
        "update_backlog": draw(st.sampled_from((1, 0, 2, 3, 5))),
    }
    plan = Plan(**settings, is_atomic=draw(st.booleans()))
    names = [block.name for block in profile.blocks]
    try:
        plan.check(names, number)
    except PlanError:
        # An atomic step has wishes of its own; without it any draw is legal.
        plan = Plan(**settings)
        plan.check(names, number)
    return plan
