"""Proves a schedule legal: nothing used that is not there, nothing given up that is needed, everything done once.

In: `Schedule`, `Plan`, `Profile`. Out: nothing, or `PlanError` that points at the first illegal action. Limits of bytes
are the planner's to keep (`planning.rules`).
"""

from __future__ import annotations

from dataclasses import replace

from memfit.core.errors import PlanError
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.schedule import (
    Accumulate,
    Action,
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
    Start,
    Unscale,
    Update,
)
from memfit.core.shape import StepShape, describe_step
from memfit.core.tiers import Tier
from memfit.scheduling.passes import Passes


def check_schedule(
    schedule: Schedule, plan: Plan, profile: Profile, *, clips_norm: bool = False, is_training: bool = True
) -> None:
    """Checks every action against the contract of `core.schedule`'s [Note: what an action means].

    Args:
        schedule: built, edited or parsed.
        plan: that it should carry out.
        profile: of the model.
        clips_norm: gradients are clipped by their global norm.
        is_training: a whole step; False: a forward-only pass of `schedule.microbatches` microbatches.

    Raises:
        PlanError: the first illegal action, with its index and the actions around it; or what is missing at the end.
    """
    shape = describe_step(plan if is_training else replace(plan, microbatches=schedule.microbatches), profile)
    calls = next(iter(profile.traces.values())).calls
    names = {name: i for i, name in enumerate(shape.blocks)}
    if schedule.blocks != shape.blocks:
        raise PlanError(f"the schedule's blocks are not the model's: {schedule.blocks} and {shape.blocks}")
    if [(c.site, c.blocks) for c in schedule.calls] != [(c.site, tuple(names[b] for b in c.blocks)) for c in calls]:
        raise PlanError("the schedule's calls are not those of the model's trace; build the schedule again")
    if is_training and schedule.microbatches != plan.microbatches:
        raise PlanError(f"the schedule has {schedule.microbatches} microbatches, the plan {plan.microbatches}")
    _check_header(schedule, plan, shape, is_training=is_training)
    checker = _Checker(shape, plan, microbatches=schedule.microbatches, clips_norm=clips_norm, is_training=is_training)
    for index, action in enumerate(schedule.actions):
        try:
            checker.take(action)
        except _IllegalError as error:
            raise PlanError(_point(schedule, index, str(error))) from None
    if missing := checker.missing():
        raise PlanError(f"the schedule ends too early: {missing}")


def _check_header(schedule: Schedule, plan: Plan, shape: StepShape, *, is_training: bool) -> None:
    """What is said of a step beside its actions is what the plan makes of it."""
    has_tail = is_training and shape.tail_segment < len(shape.segments)
    tail = shape.segments[shape.tail_segment][0] if has_tail else None
    if schedule.tail != tail:
        has, needs = ("no tail" if t is None else f"a tail from C{t} on" for t in (schedule.tail, tail))
        raise PlanError(
            f"the schedule has {has}, the plan {needs}: its text needs the header line '# tail C<call>' where there is one; build the schedule again"
        )
    if schedule.is_interleaved != (schedule.microbatches > 1 and plan.order is Order.LAYER_MAJOR):
        raise PlanError(
            f"the plan's order is {plan.order}, and the schedule's microbatches {'take turns' if schedule.is_interleaved else 'do not take turns'}: "
            "its header line must be '# microbatches <count> interleaved' in layer-major order; build the schedule again"
        )


class _IllegalError(Exception):
    """Says why an action is illegal; never leaves this file."""


def _point(schedule: Schedule, index: int, reason: str) -> str:
    shown = range(max(0, index - 2), min(len(schedule.actions), index + 3))
    context = [f"  {'>' if i == index else ' '} {i:5d}  {schedule.actions[i]}" for i in shown]
    return "\n".join([f"action {index}, {schedule.actions[index]}: {reason}", *context])


def _require(condition: bool, reason: str) -> None:  # noqa: FBT001 - reads as the sentence it checks
    if not condition:
        raise _IllegalError(reason)


class _Checker:
    """State of a step while its actions are taken one by one."""

    def __init__(self, shape: StepShape, plan: Plan, *, microbatches: int, clips_norm: bool, is_training: bool) -> None:
        self.shape = shape
        self.plan = plan
        self.clips_norm = clips_norm
        self.is_training = is_training
        self.passes = Passes(shape, plan, microbatches)
        self.present = set(range(len(shape.blocks))) - shape.visiting
        self.moved: dict[tuple[int, int], str] = {}
        self.gradients: set[int] = set()
        self.updated: set[int] = set()
        self.cleared: set[int] = set()
        self.norm_known = False
        self.is_decided = False
        self.kept: set[int] = set()
        self.scaling: list[str] = []
        self.committed = False

    def take(self, action: Action) -> None:
        """Checks one action and takes its effect."""
        _require(not self.committed, "the step is already committed")
        if isinstance(action, Accumulate | Update | Clear | Release):
            _require(
                not self.passes.is_in_tail,
                "the tail is running back, and gives up gradients and weights only when it has",
            )
        match action:
            case Start() | Forward() | Seed() | Joint() | Backward():
                self._compute(action)
            case Fetch() | Release():
                self._visit(action)
            case Offload() | Drop() | Reload():
                self._move(action)
            case Accumulate() | Update() | Clear():
                self._gradient(action)
            case Scale() | Unscale() | Check():
                self._scale(action)
            case Norm():
                _require(self.clips_norm, "no norm is clipped in this step")
                _require(not self.norm_known, "the norm is already known")
                _require(not self.plan.scales_losses or "unscale" in self.scaling, "gradients are scaled")
                self._require_whole_gradients()
                self.norm_known = True
            case Decide() | Keep():
                self._journal(action)
            case Commit():
                if missing := self.missing(is_committing=True):
                    raise _IllegalError(missing)
                self.committed = True

    def _journal(self, action: Decide | Keep) -> None:
        """Decided once, before any update, with all gradients at home; each block is kept once, after its update."""
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
        """Scale, then all backwards, then unscale, then check."""
        _require(self.plan.scales_losses, "the plan scales no losses")
        order = ["scale", "unscale", "check"]
        _require(order[: len(self.scaling) + 1] == [*self.scaling, str(action)], f"it comes after {self.scaling}")
        if isinstance(action, Scale):
            _require(not self.passes.has_seeded, "a loss has already begun its backward")
        else:
            self._require_whole_gradients()
        self.scaling.append(str(action))

    def _require_whole_gradients(self) -> None:
        _require(self.passes.is_over, "backwards are still to come, so the gradients are not whole")
        waiting = sorted(b for b in self.gradients if self._gradient_home(b) is not Tier.DEVICE)
        _require(not waiting, f"gradients of blocks {waiting} have not gone home")

    def missing(self, *, is_committing: bool = False) -> str | None:
        """What keeps the step from being complete; None if nothing does."""
        if still := self.passes.missing(is_training=self.is_training):
            return still
        if visitors := sorted(self.present & self.shape.visiting):
            return f"blocks {visitors} are still visiting"
        if not self.is_training:
            return None
        if blocks := sorted(set(self.shape.trainable) - self.updated):
            return f"blocks {blocks} have not been updated"
        if blocks := sorted(b for b in self._device_gradients() if b not in self.cleared):
            return f"gradients of blocks {blocks} have not been cleared"
        if self.is_decided and (blocks := sorted(self.updated - self.kept)):
            return f"new versions of blocks {blocks} have not been kept"
        if self.clips_norm and not self.norm_known:
            return "the norm was never made known"
        return None if is_committing or self.committed else "there is no commit"

    def _device_gradients(self) -> list[int]:
        return [b for b in self.shape.trainable if self._gradient_home(b) is Tier.DEVICE]

    def _gradient_home(self, block: int) -> Tier:
        return self.plan.block(self.shape.blocks[block]).gradient_home

    def _compute(self, action: Start | Forward | Seed | Joint | Backward) -> None:
        if isinstance(action, Seed | Joint | Backward):
            _require(self.is_training, "a forward-only pass has no backward")
            _require(not self.plan.scales_losses or bool(self.scaling), "the losses are not scaled yet")
        if reason := self.passes.refuse(action):
            raise _IllegalError(reason)
        self.passes.take(action)
        if isinstance(action, Start | Seed | Joint):
            # Glue may hand gradients to blocks that no call names as soon as backward runs.
            self.gradients |= self.shape.loose if isinstance(action, Seed) else set()
            return
        segment = self.passes.segment_index[action.first]
        away = sorted(set(self.shape.needs[segment]) - self.present)
        _require(not away, f"the weights of blocks {away} are not on the device")
        if isinstance(action, Backward):
            state = self.moved.get((action.first, action.microbatch))
            _require(state in (None, "reload"), "what it saved has left and was not reloaded")
            late = sorted(self.updated & set(self.shape.needs[segment]))
            _require(not late, f"blocks {late} are already updated: backward would read new weights")
            self.gradients |= {*self.shape.contributes[segment], *self.shape.loose}

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

    def _gradient(self, action: Accumulate | Update | Clear) -> None:
        block = action.block
        _require(self.is_training, "a forward-only pass makes no gradients")
        _require(block in self.shape.trainable, "no parameter of this block trains")
        is_home_device = self._gradient_home(block) is Tier.DEVICE
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
                is_checked = "check" in self.scaling or not self.plan.scales_losses
                _require(is_checked, "it is not known whether all gradients are finite")
                if self.plan.update is UpdateTime.AFTER_BACKWARD:
                    _require(self.passes.is_over, "the plan updates after backward")
                is_there = block in self.present or self.passes.is_over
                _require(is_there, "an update in backward needs the weights on the device")
                self.updated.add(block)
            case Clear():
                _require(is_home_device, "its gradient's home is not the device")
                _require(block in self.updated, "it is not updated: the gradient would be lost")
                _require(block not in self.cleared, "it is already cleared")
                self.gradients.discard(block)
                self.cleared.add(block)
