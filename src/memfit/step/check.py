"""Proves a step legal: nothing used that is not there, nothing given up that is needed, everything
done once.

In: a lowered `Step`, whose operations say which weights they need and to which gradients they add.
Out: nothing, or `PlanError` that points at the first illegal action. Limits of bytes are
the planner's to keep (`planner.search.planner`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.core.errors import PlanError
from memfit.core.schedule import (
    Accumulate,
    Backward,
    Check,
    Clear,
    Commit,
    Decide,
    Drop,
    Fetch,
    Forward,
    Joint,
    Keep,
    Norm,
    Offload,
    Release,
    Reload,
    Scale,
    Schedule,
    Seed,
    Spread,
    Start,
    Unscale,
    Update,
)
from memfit.core.shape import StepShape
from memfit.core.step import Operation, Step, Token
from memfit.step.build import Passes, point_at


def check_step(step: Step, *, clips_norm: bool = False, is_training: bool = True) -> None:
    """Checks every operation against the contract of `core.schedule`'s [Note: what an action
    means].

    A schedule that belongs to another model or plan, or refers to what they do not have, is refused
    already when it is lowered (`step.build`).

    Args:
        step: lowered from a schedule that was built, edited or parsed.
        clips_norm: gradients are clipped by their global norm.
        is_training: a whole step; False: a forward-only pass.

    Raises:
        PlanError: the first illegal action, with its index and the actions around it; or what is
            missing at the end.
    """
    _check_header(step.schedule, step.shape, is_training=is_training)
    checker = _Checker(
        step.shape, microbatches=step.schedule.microbatches, clips_norm=clips_norm, is_training=is_training
    )
    for index, operation in enumerate(step):
        try:
            checker.take(operation)
        except _IllegalError as error:
            raise PlanError(point_at(step.schedule, index, str(error))) from None
    if missing := checker.missing():
        raise PlanError(f"the schedule ends too early: {missing}")


def _check_header(schedule: Schedule, shape: StepShape, *, is_training: bool) -> None:
    """Compares what a schedule says beside its actions with what its plan makes of it."""
    has_tail = is_training and shape.tail_segment < len(shape.segments)
    tail = shape.segments[shape.tail_segment][0] if has_tail else None
    if schedule.tail != tail:
        has, needs = ("no tail" if t is None else f"a tail from C{t} on" for t in (schedule.tail, tail))
        raise PlanError(
            f"the schedule has {has}, the plan {needs}: its text needs the header line '# tail C<call>' where there is one; build the schedule again"
        )
    if schedule.is_interleaved != shape.takes_turns:
        raise PlanError(
            f"the schedule's microbatches {'take turns' if schedule.is_interleaved else 'do not take turns'}: its header line must be "
            "'# microbatches <count> interleaved' for several ones in layer-major order, and only then; build the schedule again"
        )


class _IllegalError(Exception):
    """Says why an action is illegal; never leaves this file."""


def _require(condition: bool, reason: str) -> None:  # noqa: FBT001 - reads as the sentence it checks
    if not condition:
        raise _IllegalError(reason)


class _Checker:
    """State of a step while its actions are taken one by one."""

    def __init__(self, shape: StepShape, *, microbatches: int, clips_norm: bool, is_training: bool) -> None:
        self.shape = shape
        self.clips_norm = clips_norm
        self.is_training = is_training
        self.passes = Passes(shape, microbatches)
        self.present = set(range(len(shape.blocks))) - shape.visiting
        self.moved: dict[tuple[int, int], str] = {}
        self.gradients: set[int] = set()
        self.updated: set[int] = set()
        self.cleared: set[int] = set()
        self.spread: set[int] = set()
        self.norm_known = False
        self.is_decided = False
        self.kept: set[int] = set()
        self.scaling: list[str] = []
        self.committed = False

    def take(self, operation: Operation) -> None:
        """Checks one operation and takes its effect."""
        action = operation.action
        _require(not self.committed, "the step is already committed")
        if isinstance(action, Accumulate | Update | Spread | Clear | Release):
            _require(
                not self.passes.is_in_tail,
                "the tail is running back, and gives up gradients and weights only when it has",
            )
        match action:
            case Start() | Forward() | Seed() | Joint() | Backward():
                self._compute(action, operation)
            case Fetch() | Release():
                self._visit(action)
            case Offload() | Drop() | Reload():
                self._move(action)
            case Accumulate() | Update() | Spread() | Clear():
                self._gradient(action)
            case Scale() | Unscale() | Check():
                self._scale(action)
            case Norm():
                _require(self.clips_norm, "no norm is clipped in this step")
                _require(not self.norm_known, "the norm is already known")
                _require(not self.shape.scales_losses or "unscale" in self.scaling, "gradients are scaled")
                self._require_whole_gradients()
                self.norm_known = True
            case Decide() | Keep():
                self._journal(action)
            case Commit():
                if missing := self.missing(is_committing=True):
                    raise _IllegalError(missing)
                self.committed = True

    def _journal(self, action: Decide | Keep) -> None:
        """Checks that a step is decided once, before any update and with all gradients at home, and
        that each block is kept once, after its update.
        """
        if isinstance(action, Decide):
            _require(not self.is_decided, "the step is already decided")
            _require(not self.updated, "a block is already updated: the step could not be made again")
            _require(self.norm_known or not self.clips_norm, "the norm is not known")
            self._require_whole_gradients()
            _require(not self._device_gradients(), "gradients have their home on the device")
            self.is_decided = True
            return
        _require(self.is_decided, "the step is not decided")
        for block in action.blocks:
            _require(
                block in range(len(self.shape.blocks)) and block not in self.kept, f"B{block} cannot be kept (again)"
            )
            _require(block in self.updated or block not in self.shape.trainable, f"B{block} is not updated")
            self.kept.add(block)

    def _scale(self, action: Scale | Unscale | Check) -> None:
        """Checks the order of a step that scales losses: scale, all backwards, unscale, check."""
        _require(self.shape.scales_losses, "the plan scales no losses")
        order = ["scale", "unscale", "check"]
        _require(order[: len(self.scaling) + 1] == [*self.scaling, str(action)], f"it comes after {self.scaling}")
        if isinstance(action, Scale):
            _require(not self.passes.has_seeded, "a loss has already begun its backward")
        else:
            self._require_whole_gradients()
        self.scaling.append(str(action))

    def _require_whole_gradients(self) -> None:
        _require(self.passes.is_over, "backwards are still to come, so the gradients are not whole")
        waiting = sorted(self.gradients & self.shape.accumulating)
        _require(not waiting, f"gradients of blocks {waiting} have not gone home")

    def missing(self, *, is_committing: bool = False) -> str | None:
        """Names what keeps the step from being complete; None if nothing does."""
        if still := self.passes.missing(is_training=self.is_training):
            return still
        if visitors := sorted(self.present & self.shape.visiting):
            return f"blocks {visitors} are still visiting"
        return self._missing_of_training(is_committing=is_committing) if self.is_training else None

    def _missing_of_training(self, *, is_committing: bool) -> str | None:
        if blocks := sorted(set(self.shape.trainable) - self.updated):
            return f"blocks {blocks} have not been updated"
        if blocks := sorted(self.shape.spreading - self.spread):
            return f"new weights of blocks {blocks} have not been spread"
        if blocks := sorted(b for b in self._device_gradients() if b not in self.cleared):
            return f"gradients of blocks {blocks} have not been cleared"
        if self.is_decided and (blocks := sorted(self.updated - self.kept)):
            return f"new versions of blocks {blocks} have not been kept"
        if self.clips_norm and not self.norm_known:
            return "the norm was never made known"
        return None if is_committing or self.committed else "there is no commit"

    def _device_gradients(self) -> list[int]:
        return [b for b in self.shape.trainable if b not in self.shape.accumulating]

    def _compute(self, action: Start | Forward | Seed | Joint | Backward, operation: Operation) -> None:
        if isinstance(action, Seed | Joint | Backward):
            _require(self.is_training, "a forward-only pass has no backward")
            _require(not self.shape.scales_losses or bool(self.scaling), "the losses are not scaled yet")
        if reason := self.passes.refuse(action):
            raise _IllegalError(reason)
        self.passes.take(action)
        away = sorted(set(operation.needs) - self.present)
        _require(not away, f"the weights of blocks {away} are not on the device")
        if isinstance(action, Backward):
            state = self.moved.get((action.first, action.microbatch))
            _require(state in (None, "reload"), "what it saved has left and was not reloaded")
            late = sorted(self.updated & set(operation.needs))
            _require(not late, f"blocks {late} are already updated: backward would read new weights")
        self.gradients.update(operation.adds_to)

    def _visit(self, action: Fetch | Release) -> None:
        block = action.block
        _require(block in range(len(self.shape.blocks)), "there is no such block")
        _require(block in self.shape.visiting, "this block lives on the device")
        if isinstance(action, Fetch):
            _require(block not in self.present, "it is already there")
            self.present.add(block)
        else:
            _require(block in self.present, "it is not there")
            self.present.remove(block)

    def _move(self, action: Offload | Drop | Reload) -> None:
        key = (action.call, action.microbatch)
        segment = self.passes.segment_index.get(action.call)
        _require(self.is_training, "a forward-only pass saves nothing")
        _require(segment is not None, "no segment begins with this call")
        assert segment is not None
        tier = self.shape.leaves[segment]
        _require(tier is not None, "the plan keeps it on the device")
        _require(self.passes.has_run(segment, action.microbatch), "its forward has not run")
        _require(not self.passes.has_returned(segment, action.microbatch), "its backward has run")
        state = self.moved.get(key)
        match action:
            case Offload():
                _require(state is None, "it has left before")
                _require(action.tier is tier, f"the plan sends it to {tier}")
                self.moved[key] = "offload"
            case Drop():
                _require(state == "offload", "it was not offloaded, or was dropped before")
                self.moved[key] = "drop"
            case Reload():
                _require(state == "drop", "it was not dropped")
                self.moved[key] = "reload"

    def _gradient(self, action: Accumulate | Update | Spread | Clear) -> None:
        block = action.block
        _require(self.is_training, "a forward-only pass makes no gradients")
        _require(block in self.shape.trainable, "no parameter of this block trains")
        is_home_device = block not in self.shape.accumulating
        match action:
            case Accumulate():
                _require(not is_home_device, "its gradient's home is the device")
                _require(block in self.gradients, "it has no gradient on the device")
                _require(not self.passes.contributes_in_stage(block), "backwards that add to it are still to come")
                self.gradients.discard(block)
            case Update():
                _require(block not in self.updated, "it is already updated")
                _require(not self.passes.contributes_later(block), "its gradient is not complete")
                _require(is_home_device or block not in self.gradients, "its gradient has not gone home")
                _require(self.norm_known or not self.clips_norm, "the norm is not known")
                is_checked = "check" in self.scaling or not self.shape.scales_losses
                _require(is_checked, "it is not known whether all gradients are finite")
                _require(self.shape.updates_in_backward or self.passes.is_over, "the plan updates after backward")
                is_there = block in self.present or block in self.shape.cut or self.passes.is_over
                _require(is_there, "an update in backward needs the weights on the device")
                self.updated.add(block)
            case Spread():
                _require(block in self.shape.spreading, "no rank updates only a share of its weights")
                _require(block in self.updated, "it is not updated: there is nothing new to spread")
                _require(block not in self.spread, "it is already spread")
                self.spread.add(block)
            case Clear():
                _require(is_home_device, "its gradient's home is not the device")
                _require(block in self.updated, "it is not updated: the gradient would be lost")
                _require(block not in self.cleared, "it is already cleared")
                self.gradients.discard(block)
                self.cleared.add(block)


# Tokens of a step: names of work under way, and which of it has begun.
#
# In: operations in the making. Out: the tokens that an operation waits for.


class GivenTokens:
    """Tokens that were given, in order. Only these can be waited for.

    Args:
        owners: of blocks, by index.
    """

    def __init__(self, owners: Sequence[str]) -> None:
        self._owners = owners
        self._of_blocks: dict[str, list[Token]] = {}
        self._given: dict[Token, None] = {}

    def of_block(self, kind: str, block: int) -> Token:
        """Returns the token of a block's work."""
        tokens = self._of_blocks.get(kind)
        if tokens is None:
            tokens = self._of_blocks[kind] = [Token(kind, owner) for owner in self._owners]
        return tokens[block]

    def give(self, token: Token) -> None:
        """Notes that the work has begun."""
        self._given[token] = None

    def waits(self, kind: str, block: int) -> list[Token]:
        """Returns what there is to wait for of a block's work."""
        return self.only(self.of_block(kind, block))

    def only(self, token: Token) -> list[Token]:
        """Returns the token if it was given."""
        return [token] if token in self._given else []

    def of_kinds(self, kinds: Iterable[str]) -> list[Token]:
        """Returns all that were given of these kinds."""
        return [token for kind in kinds for token in self._given if token.kind == kind]


class UpdatePipelines:
    """Updates that are waited for by later ones: the last that took its turn behind all others, the
    last that an accelerator makes, and the last that is both. See [Note: what goes first] in
    `homes.updates`.
    """

    def __init__(self) -> None:
        self._in_turn: tuple[Token, ...] = ()
        self._by_device: tuple[Token, ...] = ()
        self._both: tuple[Token, ...] = ()

    def join(self, update: Token, *, takes_turns: bool, on_host: bool) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
        """Puts an update behind those of its pipelines; returns them, and what must have ended
        before it begins.
        """
        before = (*(self._in_turn if takes_turns else ()), *(() if on_host else self._by_device))
        ended = () if takes_turns else self._both
        self._in_turn = (update,) if takes_turns else self._in_turn
        self._by_device = self._by_device if on_host else (update,)
        self._both = (update,) if takes_turns and not on_host else self._both
        return tuple(dict.fromkeys(before)), ended
