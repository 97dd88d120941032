"""The engine: does what a schedule says, with the user's model and autograd.

In: a schedule, the blocks with their homes, the call sites. Out: gradients and updates, exactly as plain PyTorch makes them.

[Note: who drives whom]
Forward: the engine resumes a microbatch's coroutine (`forward C5 m0`); user code runs until it is about to enter the next segment, pauses there, and
the engine goes on to the next action. Backward: autograd drives. It runs the latest-made node first, hence call after call in reverse order and, within
a call, microbatches in the order opposite to forward. When the first gradient reaches an output of call c of microbatch m, the hook of that
output *advances* the schedule to `backward Cc m`: every action before it (accumulate, update, release, fetch) is done first. At that moment
nothing of a later-made call is left to run, so what came before is complete. The engine does only what the schedule says; a call or gradient that the
schedule does not foresee is served (weights fetched and waited for on the spot), counted as a departure and reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from memfit.activations import Frame
from memfit.activations.frames import RecomputedFrame
from memfit.activations.saved_tensors import TRY_ANOTHER_FATE
from memfit.core.errors import PlanError, UnsupportedError
from memfit.core.schedule import (
    Accumulate,
    Action,
    Backward,
    Check,
    Clear,
    Commit,
    Drop,
    Fetch,
    Forward,
    Joint,
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
from memfit.engine.coroutines import Coroutine, can_pause
from memfit.engine.crossing import differentiate_on_host, refuse_detours
from memfit.engine.leaves import MicrobatchLeaves, Replaced, watch_arrivals
from memfit.engine.modules import ModuleNotes
from memfit.engine.seeding import Counts, Seeds, seed
from memfit.engine.settling import Settling
from memfit.engine.sites import OwnWeights, Site, SiteHooks
from memfit.engine.tail import CutEdge, TailAliases, differentiate_tail, hooks_of, sequence_number, withheld
from memfit.engine.visits import Visits
from memfit.homes.gradients import GradientHomes
from memfit.homes.updates import UpdateWorker
from memfit.homes.weights import BlockWeights, check_untouched
from memfit.tensors.random_streams import RandomStream
from memfit.tensors.trees import tensors_in


class EnginePhase(Enum):
    """What autograd may be doing now."""

    IDLE = "idle"
    FORWARD = "forward"
    TAIL = "tail"
    BACKWARD = "backward"


@dataclass(kw_only=True)
class Outcome:
    """What a run of the schedule gave.

    Attributes:
        losses: one a microbatch, detached, as the user's function returned them (mean or sum).
        shares: what each was multiplied with.
        norm: global gradient norm, if it was asked for.
        is_skipped: a gradient was infinite or NaN in a step that scales its losses: nothing was updated.
        departures: texts of what the schedule did not foresee.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    norm: torch.Tensor | None = None
    is_skipped: bool = False
    departures: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class StepInput:
    """One step's input to the engine.

    Attributes:
        run: computes microbatch m's loss (in training) or output (forward only).
        shares: what each microbatch's loss is multiplied with; None for one microbatch: the loss as it is.
        streams: random streams, None entries for the user's own.
        max_norm: clip gradients to this global norm.
        scale: losses are multiplied with it, gradients divided by it.
        begin_updates: called when it is known that the updates will be made, in a step that scales its losses.
        settle: makes all updates of the step, in the place of the schedule's first: where a journal says in which order (`job.journaling`). All of
            them come after backward then, with every gradient at home.
    """

    run: Callable[[int], Any]
    shares: Sequence[float] | None
    streams: Sequence[RandomStream | None]
    max_norm: float | None = None
    scale: float | None = None
    begin_updates: Callable[[], None] | None = None
    settle: Callable[[Outcome], None] | None = None


class FrameFactory(Protocol):
    """Makes the frames of calls; see `engine.policies`."""

    def begin(
        self, call: int, microbatch: int, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        """The frame of one call, or None where everything is kept."""
        ...

    def watching(self) -> AbstractContextManager[None]:
        """What a microbatch's forward runs in."""
        ...


def _nothing(_outcome: Outcome) -> None:
    """The updates have been made."""


@dataclass
class _OpenCall:
    """A site that is running now."""

    site: int
    call: int | None
    frame: Frame | None
    replaced: Replaced = field(default_factory=list)


class Engine:
    """Runs schedules over one model.

    Memory: nothing of its own beyond frames and what the schedule holds.

    Args:
        model: the user's.
        sites: all call sites; hooks are put on them until `close`.
        blocks: by the schedule's block index.
        frames: makes the frames of calls.
        gradients: their homes.
        updates: the worker.
        parameter_order: names in the model's order (norms are summed in it).
        device_types: whose autocast state belongs to a coroutine.
        loose: indices of the blocks that code outside of all calls reads.
        observe: is told of each action when it is done (a backward: when it begins).

    Attributes:
        at: text of the action that runs now or ran last, for messages.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        sites: Sequence[Site],
        blocks: Sequence[BlockWeights],
        frames: FrameFactory,
        gradients: GradientHomes | None,
        updates: UpdateWorker | None,
        parameter_order: Sequence[str],
        device_types: tuple[str, ...] = ("cpu",),
        loose: Sequence[int] = (),
        observe: Callable[[Action], None] | None = None,
    ) -> None:
        self.sites = tuple(sites)
        self.blocks = tuple(blocks)
        self.gradients = gradients
        self._frames = frames
        self._device_types = device_types
        self._observe = observe
        self._loose = tuple(loose)
        self._notes = ModuleNotes(model)
        self._arrivals: list[Any] = []
        self._own_leaves: MicrobatchLeaves | None = None
        if gradients is not None and gradients.adds_apart:
            self._arrivals = watch_arrivals(self.blocks, gradients)
            self._own_leaves = MicrobatchLeaves(model, self.blocks)
        # What the schedule did not foresee; its `append` is shared, because a method of the engine would be a cycle.
        self._departures: list[str] = []
        depart = self._departures.append
        self._settling = Settling(blocks, gradients, updates, parameter_order, depart)
        self._visits = Visits(blocks, self._settling.wait, depart)
        self._learned: set[int] = set()
        self._own = OwnWeights(self.sites)
        self._hooks = SiteHooks(self.sites, self)
        self._serial = 0
        self._recomputing = 0
        self._opened: list[_OpenCall] = []
        self._looks_away = False
        self.at = ""
        self._reset()

    # --- a run ------------------------------------------------------------------------------------------------------------------

    def run(self, schedule: Schedule, work: StepInput) -> Outcome:
        """Does a schedule from its first action to its last.

        Raises:
            Whatever the user's code or a transfer raised; the coroutines are ended, and blocks and gradients are as `recover` leaves them.
        """
        self._reset()
        self._settling.begin()
        self._serial += 1
        self._schedule, self._work, self._tail = schedule, work, schedule.tail
        self._counts = Counts(schedule.microbatches)
        self._position_of = {a: i for i, a in enumerate(schedule.actions) if isinstance(a, Backward)}
        self._segment_of = {
            c: (a.first, a.last) for a in schedule.actions if isinstance(a, Forward) for c in range(a.first, a.last + 1)
        }
        self._firsts = {first for first, _ in self._segment_of.values()}
        self._interleaves = schedule.is_interleaved
        self._has_joint = any(isinstance(a, Joint) for a in schedule.actions)
        self._notes.begin_run(learns=id(schedule) not in self._learned)
        self._aliases = self._make_aliases()
        trains = any(isinstance(a, Seed) for a in schedule.actions)
        self._leaves = self._own_leaves if self._interleaves and trains else None
        self._phase = EnginePhase.FORWARD
        if self.gradients is not None:
            self.gradients.is_receiving = trains
        try:
            while self._next < len(schedule.actions):
                self._next += 1
                self._do(schedule.actions[self._next - 1])
            self._finish_pass(range(len(self._coroutines)))
            check_untouched(self.blocks)
            self._learned.add(id(schedule))
            if self._interleaves:
                self._notes.enter(self._coroutines[schedule.microbatches - 1].notes)
            return self.outcome
        except BaseException:
            self._recover()
            raise
        finally:
            self._phase = EnginePhase.IDLE
            if self.gradients is not None:
                self.gradients.is_receiving = False
            self._visits.end_on_demand()
            outcome = self.outcome
            outcome.departures = list(self._departures)
            self._reset()
            self.outcome = outcome

    def evaluate(self, schedule: Schedule, work: StepInput) -> list[Any]:
        """Does a forward-only schedule and gives what the user's function returned, a microbatch each."""
        results: dict[int, Any] = {}
        plain = work.run

        def run(m: int) -> None:
            results[m] = plain(m)

        self.run(schedule, StepInput(run=run, shares=None, streams=work.streams))
        return [results[m] for m in sorted(results)]

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """What the model is called for inside is no business of the engine's: a trace, on stand-ins for the weights."""
        self._looks_away = True
        try:
            yield
        finally:
            self._looks_away = False

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()
        while self._arrivals:
            self._arrivals.pop().remove()

    def _reset(self) -> None:
        self.outcome = Outcome()
        self._departures.clear()
        self._next = 0
        self._coroutines: dict[int, Coroutine] = {}
        self._running: Coroutine | None = None
        self._open_frames: dict[tuple[int, int], Frame] = {}
        self._begun: set[tuple[int, int]] = set()
        self._current: list[tuple[int, int]] = []
        self._cuts: list[CutEdge] = []
        self._hooks_before_tail: list[dict[int, Any]] = []
        self._tail_began: dict[int, int] = {}
        self._opened.clear()
        self._recomputing = 0
        self._work: StepInput | None = None
        self._loss_scale: float | None = None
        self._counts = Counts(0)
        self._schedule: Schedule | None = None
        self._tail: int | None = None
        self._aliases = TailAliases((), set())
        self._has_joint = False
        self._interleaves = False
        self._leaves: MicrobatchLeaves | None = None
        self._phase = EnginePhase.IDLE

    def _recover(self) -> None:
        """After an error: ends coroutines and updates, gives back visits and gradients. The first error is already on its way."""
        for coroutine in self._coroutines.values():
            try:
                coroutine.cancel()
            except Exception as error:  # noqa: BLE001, a user's `finally` may fail as well; it is reported beside the first error
                self._departures.append(f"while ending microbatch {coroutine.microbatch}: {error!r}")
        for frame in self._open_frames.values():
            frame.finish()
        self._aliases.restore_all()
        if self._leaves is not None:
            self._leaves.restore_all()
        self._settling.abandon()
        for block in self.blocks:
            block.take_back_changes()  # an error is on its way
            block.release()

    # --- actions ----------------------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        self.at = str(action)
        match action:
            case Start() | Forward() | Seed() | Joint():
                self._compute(action)
            case Backward():
                pass  # no gradient came here: else the hooks would have advanced beyond it
            case Fetch(b):
                self._visits.fetch(b)
            case Release(b):
                self._visits.release(b)
            case Offload() | Drop() | Reload():
                self._move_activations(action)
            case Scale() | Unscale() | Check():
                self._scale(action)
            case Norm():
                assert self._work is not None
                self.outcome.norm = self._settling.norm(self._work.max_norm)
            case Update() if self._work is not None and self._work.settle is not None:
                settle, self._work.settle = self._work.settle, _nothing
                if self._settling.gather():
                    settle(self.outcome)
            case Accumulate() | Update() | Clear() | Commit():
                self._settling.do(action)
        if self._observe is not None:
            self._observe(action)

    def _scale(self, action: Scale | Unscale | Check) -> None:
        """See `engine.loss_scaling`, [Note: fp16 as GradScaler does it]."""
        assert self._work is not None and self._work.scale is not None
        match action:
            case Scale():
                self._loss_scale = self._work.scale
            case Unscale():
                self._settling.unscale(self._work.scale)
            case Check():
                self.outcome.is_skipped = not self._settling.check()
                if not self.outcome.is_skipped and self._work.begin_updates is not None:
                    self._work.begin_updates()

    def _compute(self, action: Start | Forward | Seed | Joint) -> None:
        match action:
            case Start(m):
                self._start(m)
            case Forward():
                self._forward(action)
            case Seed(first, last):
                self._seed(first, last)
            case Joint():
                self._run_joint()

    def _move_activations(self, action: Offload | Drop | Reload) -> None:
        frame = self._open_frames.get((action.call, action.microbatch))
        if frame is None:
            return
        match action:
            case Offload():
                frame.offload()
            case Drop():
                frame.drop()
            case Reload():
                frame.reload()

    def _start(self, m: int) -> None:
        assert self._work is not None
        work = self._work
        watching = self._frames.watching  # not by way of the engine, which holds the coroutine

        def run() -> Any:
            with watching():
                return work.run(m)

        coroutine = Coroutine(
            m,
            run,
            stream=work.streams[m],
            device_types=self._device_types,
            modules=self._notes if self._interleaves else None,
        )
        self._coroutines[m] = coroutine
        self._resume(coroutine)

    def _forward(self, action: Forward) -> None:
        coroutine = self._coroutines[action.microbatch]
        if self._tail is not None and action.first >= self._tail:
            # Also where the tail's first call is left out: what is made from here on is the tail.
            self._tail_began.setdefault(action.microbatch, sequence_number())
        if coroutine.is_finished or (coroutine.call is not None and coroutine.call > action.first):
            self._departures.append(f"{action}: microbatch {action.microbatch} did not make this call")
            return
        self._resume(coroutine)
        self._settling.end_compute()

    def _resume(self, coroutine: Coroutine) -> None:
        self._running = coroutine
        replaced = self._leaves.enter(self._loose) if self._leaves is not None else []
        try:
            coroutine.resume()
        finally:
            self._running = None
            if self._leaves is not None:
                self._leaves.leave(replaced)

    def _seed(self, first: int, last: int) -> None:
        microbatches = range(first, last + 1)
        for m in microbatches:
            if not self._coroutines[m].is_finished:
                raise PlanError(
                    f"seed m{m}: the microbatch is not at its end; its code made more calls than the schedule"
                )
        seeds = self._seeds(microbatches)
        if self._is_cut:
            self._phase = EnginePhase.TAIL
            began = self._tail_began.get(first, sequence_number())
            with withheld(self._hooks_before_tail):
                self._cuts.extend(differentiate_tail(seeds.losses.pop(), seeds.factors[0], began, self._aliases))
            self._aliases.forget()
            self._finish_frames()
            self._phase = EnginePhase.FORWARD
            if self._cuts and not self._has_joint and last == len(self._coroutines) - 1:
                self._departures.append("gradients reach calls before the tail, where the trace saw none")
                self._run_joint()
            return
        self._phase = EnginePhase.BACKWARD
        if len(microbatches) > 1 and self._has_accelerator:
            self._backward_on_device(seeds)
        else:
            torch.autograd.backward(seeds.losses, seeds.factors)
            seeds.losses.clear()
        self._finish_pass(microbatches)
        self._phase = EnginePhase.FORWARD

    @property
    def _has_accelerator(self) -> bool:
        return len(self._device_types) > 1

    def _backward_on_device(self, seeds: Seeds) -> None:
        """One backward of several losses whose roots all lie on the accelerator. See crossing.py, [Note: one ready queue]."""
        pairs = zip(seeds.losses, seeds.factors, strict=True)
        starts = [start for loss, factor in pairs for start in differentiate_on_host(loss, factor)]
        seeds.losses.clear()
        self._backward_from(starts)

    def _backward_from(self, starts: list[CutEdge]) -> None:
        """Empties the list: nothing of the graph outlives its backward."""
        if self._has_accelerator and id(self._schedule) not in self._learned:
            refuse_detours(start.edge.node for start in starts)
        edges, gradients = [start.edge for start in starts], [start.gradient for start in starts]
        starts.clear()
        torch.autograd.backward(edges, gradients)

    def _seeds(self, microbatches: Sequence[int]) -> Seeds:
        """Losses and factors of microbatches that have run forward; noted in the outcome."""
        assert self._work is not None
        results = [self._coroutines[m].take_result() for m in microbatches]
        given = self._work.shares
        seeds = seed(
            results,
            None if given is None else [given[m] for m in microbatches],
            counts=self._counts,
            scale=self._loss_scale,
        )
        self.outcome.losses += [loss.detach().clone() for loss in seeds.losses]
        self.outcome.shares += [1.0 if share is None else share for share in seeds.shares]
        if self._counts.is_complete:
            self.outcome.shares = [self._counts.share] * len(self.outcome.losses)
            self._settling.multiply(self._counts.correction)
        return seeds

    def _make_aliases(self) -> TailAliases:
        if self._tail is None or self._schedule is None:
            return TailAliases((), set())
        calls = self._schedule.calls
        before = {b for call in calls[: self._tail] for b in call.blocks}
        tail_names = {call.site for call in calls[self._tail :]}
        return TailAliases(
            [site.module for site in self.sites if site.name in tail_names],
            {id(slot.parameter) for b in before for slot in self.blocks[b].slots},
        )

    @property
    def _is_cut(self) -> bool:
        return self._tail is not None

    def _run_joint(self) -> None:
        """One backward from the cut edges of all microbatches; nothing where no gradient reached a cut."""
        if not self._cuts:
            return
        self._phase = EnginePhase.BACKWARD
        cuts, self._cuts = self._cuts, []
        self._backward_from(cuts)
        self._finish_pass(range(len(self._coroutines)))
        self._phase = EnginePhase.FORWARD

    # --- calls ------------------------------------------------------------------------------------------------------------------

    def enter(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `CallObserver`."""
        if self._looks_away:
            return
        if self._recomputing or self._opened:
            if not self._recomputing:
                self._opened.append(_OpenCall(site, None, None))  # inside another call: part of it
            return
        coroutine = self._running
        if coroutine is None or not coroutine.is_current:
            self._visits.ensure(self.sites[site].blocks, is_foreseen=True)
            self._opened.append(_OpenCall(site, None, None))
            return
        call = self._next_call(coroutine, site)
        if call is None:
            self._departures.append(
                f"microbatch {coroutine.microbatch} calls {self.sites[site].name!r} where the trace did not"
            )
            self._visits.ensure(self.sites[site].blocks, is_foreseen=True)
            self._opened.append(_OpenCall(site, -1, None, self._put_leaves(site)))
            return
        is_own = self._own.are_here(site)
        if self._interleaves and not is_own:
            raise self._refused_substitutes(
                site,
                "microbatches that take turns would get each other's; plan microbatches=1, or order='microbatch-major'",
            )
        if call in self._firsts and can_pause():
            coroutine.pause(call)
        coroutine.position = call + 1
        self._ensure(self.sites[site].blocks)
        frame = self._frames.begin(call, coroutine.microbatch, self.sites[site], args, kwargs)
        if frame is not None:
            self._open_frames[call, coroutine.microbatch] = frame
            if not is_own and isinstance(frame, RecomputedFrame) and torch.is_grad_enabled():
                raise self._refused_substitutes(
                    site, f"running it again would compute with its own; {TRY_ANOTHER_FATE}"
                )
            frame.enter()
        replaced = self._put_leaves(site)
        if self._tail is not None and call >= self._tail:
            self._aliases.enter(self.sites[site].module)
        self._opened.append(_OpenCall(site, call, frame, replaced))

    def _refused_substitutes(self, site: int, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.sites[site].name!r} is called with other tensors in the places of its parameters (torch.func.functional_call, for instance): {why}"
        )

    def _put_leaves(self, site: int) -> Replaced:
        """See [Note: leaves of a microbatch]."""
        return self._leaves.enter(self.sites[site].blocks) if self._leaves is not None else []

    def leave(self, site: int, output: Any) -> None:
        """See `CallObserver`."""
        if self._looks_away or self._recomputing or not self._opened or self._opened[-1].site != site:
            return
        opened = self._opened.pop()
        if opened.call is None and self._opened:
            return
        if opened.call is not None and self._tail is not None and opened.call >= self._tail:
            self._aliases.leave(self.sites[site].module)
        if self._leaves is not None:
            self._leaves.leave(opened.replaced)
        if opened.frame is not None:
            opened.frame.leave(output)
        m = self._running.microbatch if self._running is not None else -1
        if output is not None and torch.is_grad_enabled():
            self._watch(output, opened.call, m, site)
        if self._phase is EnginePhase.IDLE:
            self._visits.end_on_demand()

    def _next_call(self, coroutine: Coroutine, site: int) -> int | None:
        """Which call of the trace this is: the next one of this site, at or after the microbatch's position."""
        assert self._schedule is not None
        name = self.sites[site].name
        for call in range(coroutine.position, len(self._schedule.calls)):
            if self._schedule.calls[call].site == name:
                return call
        return None

    def _watch(self, output: Any, call: int | None, m: int, site: int) -> None:
        """Has autograd tell when the call's backward begins: before the node of any of its outputs runs.

        Hooks on nodes, not on tensors: a tensor that is changed in place later gets another node, and hooks registered on the tensor object would
        follow it or stay by rules of their own. Of a view that is changed later, only the base's node may be left in the graph.
        """
        tensors = [t for t in tensors_in(output) if t.requires_grad]
        tensors += [t._base for t in tensors if t._is_view() and t._base is not None]
        nodes = {t.grad_fn for t in tensors if t.grad_fn is not None}
        engine, serial = weakref.ref(self), self._serial

        def begins(_gradients: Any) -> None:
            it = engine()
            if it is not None:
                it._begins(serial, call, m, site)

        for node in nodes:
            node.register_prehook(begins)
        if self._tail is not None and call is not None and call < self._tail:
            self._hooks_before_tail += [hooks_of(t) for t in tensors if t.grad_fn is not None]

    # --- backward ---------------------------------------------------------------------------------------------------------------

    def _begins(self, serial: int, call: int | None, m: int, site: int) -> None:
        """The first gradient has reached an output of a call: autograd is about to run it backward."""
        if call is None or call < 0:  # served: weights must be here until autograd is through
            self._visits.ensure(self.sites[site].blocks, is_foreseen=True)
            if self._phase is EnginePhase.IDLE:
                torch.autograd.Variable._execution_engine.queue_callback(self._visits.end_on_demand)
            return
        if serial != self._serial or self._phase is EnginePhase.IDLE:
            raise UnsupportedError(
                "backward was called on a graph of a step that memfit has already run back: job.step(batch) computes the gradients itself; "
                "return the loss from the loss function and use the result's .loss only as a number"
            )
        if self._phase is EnginePhase.FORWARD:
            raise UnsupportedError(
                f"the loss function differentiates through {self.sites[site].name!r} itself (autograd.grad or backward inside the loss): "
                "double backward is not supported, because a block's weights travel with the one backward that the schedule foresees"
            )
        if self._phase is EnginePhase.TAIL and self._tail is not None and call < self._tail:
            return  # the cut's edge: this call's own backward comes with the joint one
        first, last = self._segment_of[call]
        if (first, m) in self._begun:
            return
        self._begun.add((first, m))
        self._advance(Backward(first, last, m))

    def _advance(self, action: Backward) -> None:
        assert self._schedule is not None
        position = self._position_of.get(action)
        self._finish_frames()
        self._settling.end_compute()
        if position is None or position < self._next:
            self._departures.append(f"{action} came where the schedule had passed it")
        else:
            while self._next < position:
                passed = self._schedule.actions[self._next]
                if isinstance(passed, Forward | Start | Seed | Joint | Commit):
                    raise PlanError(f"autograd reached {action} before the schedule's {passed}")
                self._next += 1
                if not isinstance(passed, Backward):
                    self._do(passed)
            self._next = position + 1
        self.at = str(action)
        self._current = [(call, action.microbatch) for call in range(action.first, action.last + 1)]
        for call in range(action.first, action.last + 1):
            self._ensure(self._schedule.calls[call].blocks)
        if self._observe is not None:
            self._observe(action)

    def _finish_frames(self) -> None:
        """The backward that ran until now is over: its frames let go of everything."""
        for key in self._current:
            frame = self._open_frames.pop(key, None)
            if frame is not None:
                frame.finish()
        self._current = []

    def _finish_pass(self, microbatches: Iterable[int]) -> None:
        """A whole backward is over: nothing of these microbatches can be asked for any more.

        A backward that the schedule passes is not over by that: where calls left the traced order, its gradient may still come.
        """
        self._finish_frames()
        for key in [key for key in self._open_frames if key[1] in microbatches]:
            self._open_frames.pop(key).finish()

    # --- weights ----------------------------------------------------------------------------------------------------------------

    def _ensure(self, blocks: Sequence[int]) -> None:
        self._visits.ensure(blocks, is_foreseen=self._phase is EnginePhase.IDLE)

    @contextmanager
    def recomputing(self, blocks: Sequence[int] = ()) -> Iterator[None]:
        """A call runs again inside backward: its sites are passed through, nothing pauses.

        Args:
            blocks: whose weights it reads. They are away still where a gradient came by a side door of a later call of the segment, before any output's.
        """
        self._ensure(blocks)
        self._recomputing += 1
        try:
            yield
        finally:
            self._recomputing -= 1
