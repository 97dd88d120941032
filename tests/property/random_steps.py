"""Random profiles and plans for the scheduling and prediction properties, and a slow interpreter of schedules.

The interpreter looks at positions in the whole list of actions, one rule after the other; it shares no code with
`memfit.scheduling` and none of its state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import BlockProfile, CallProfile, Profile, StorageProfile, TensorProfile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.schedule import Backward, Forward, Joint, Schedule, Seed, Start
from memfit.core.tiers import TIERS, Tier


@dataclass(frozen=True, kw_only=True)
class Case:
    profile: Profile
    plan: Plan
    clips_norm: bool


@st.composite
def cases(draw: Any, *, max_calls: int = 5) -> Case:
    calls = draw(st.integers(1, max_calls))
    blocks = draw(st.integers(1, 4))
    reads = [draw(st.lists(st.integers(0, blocks - 1), max_size=2, unique=True)) for _ in range(calls)]
    profile = Profile(
        batch_rows=6,
        blocks=tuple(
            BlockProfile(
                name=f"b{b}",
                kind="block",
                parameters=tuple(
                    TensorProfile(name=f"b{b}.{i}", shape=(8,), dtype="float32", nbytes=32, requires_grad=trains)
                    for i, trains in enumerate(draw(st.lists(st.booleans(), min_size=1, max_size=2)))
                ),
                is_spanning=draw(st.integers(0, 5)) == 0,
            )
            for b in range(blocks)
        ),
        traces={rows: _trace(draw, rows, reads) for rows in (6,)},
    )
    return Case(profile=profile, plan=_plan(draw, profile, calls), clips_norm=draw(st.booleans()))


def _trace(draw: Any, rows: int, reads: list[list[int]]) -> TraceProfile:
    calls = tuple(
        CallProfile(
            index=i,
            site=f"c{i}",
            blocks=tuple(f"b{b}" for b in blocks),
            kind="call",
            is_repeated=draw(st.booleans()),
            has_backward=draw(st.integers(0, 4)) > 0,
            forward_flops=draw(st.integers(0, 9)),
        )
        for i, blocks in enumerate(reads)
    )
    return TraceProfile(rows=rows, calls=calls, storages=())


def _plan(draw: Any, profile: Profile, calls: int) -> Plan:
    fates: list[CallPlan] = []
    for i in range(calls):
        saved = draw(st.sampled_from(list(Saved)))
        boundary = draw(st.sampled_from(TIERS))
        joins = i > 0 and saved in (Saved.RECOMPUTE, Saved.SELECT) and fates[-1].saved is saved and draw(st.booleans())
        home = draw(st.sampled_from([Tier.HOST, Tier.DISK]))
        fates.append(CallPlan(saved=saved, saved_home=home, boundary_home=boundary, joins_previous=joins))
    tiers = st.sampled_from(TIERS)
    return Plan(
        microbatches=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(Order)),
        blocks={
            b.name: BlockPlan(weight_home=draw(tiers), gradient_home=draw(tiers), state_home=draw(tiers))
            for b in profile.blocks
        },
        calls=tuple(fates),
        tail=draw(st.one_of(st.none(), st.integers(0, calls - 1))),
        update=draw(st.sampled_from(UpdateTime)),
        prefetch=draw(st.integers(0, 3)),
        update_backlog=draw(st.integers(0, 4)),
    )


def is_legal(schedule: Schedule, plan: Plan, profile: Profile, *, clips_norm: bool) -> bool:
    """Interprets a training step by positions; slow on purpose."""
    step = _Step(schedule, plan, profile, clips_norm)
    return all(rule() for rule in (step.computes, step.weights, step.moves, step.gradients, step.norm, step.end))


class _Step:
    def __init__(self, schedule: Schedule, plan: Plan, profile: Profile, clips_norm: bool) -> None:
        self.plan, self.profile, self.clips = plan, profile, clips_norm
        self.actions = list(schedule.actions)
        self.texts = [str(a) for a in self.actions]
        self.calls = next(iter(profile.traces.values())).calls
        self.is_micro = plan.order is Order.MICROBATCH_MAJOR
        self.tail = None if self.is_micro or plan.microbatches == 1 else plan.tail
        self.segments: list[list[int]] = []
        for i in range(len(self.calls)):
            if i and plan.calls[i].joins_previous and i != self.tail:
                self.segments[-1].append(i)
            else:
                self.segments.append([i])
        self.passes: list[list[int]] = []

    def at(self, *texts: str) -> list[int]:
        return [i for i, text in enumerate(self.texts) if text in texts]

    def backs(self, segment: list[int]) -> bool:
        return any(self.calls[c].has_backward for c in segment)

    def span(self, segment: list[int]) -> str:
        return f"C{segment[0]}" if len(segment) == 1 else f"C{segment[0]}-{segment[-1]}"

    def computes(self) -> bool:
        microbatches = range(self.plan.microbatches)
        kinds = [a for a in self.actions if isinstance(a, Start | Forward | Seed | Backward)]
        if sorted(a.microbatch for a in kinds if isinstance(a, Start)) != list(microbatches):
            return False
        for m in microbatches:
            mine = [i for i, a in enumerate(self.actions) if isinstance(a, Forward) and a.microbatch == m]
            if [self.texts[i] for i in mine] != [f"forward {self.span(s)} m{m}" for s in self.segments]:
                return False
            if self.at(f"start m{m}")[0] > mine[0]:
                return False
        return self._autograd(microbatches)

    def _autograd(self, microbatches: range) -> bool:
        """Replays autograd: of what may run, the node that was made last runs first; nothing else runs meanwhile."""
        made: list[tuple[list[int], int]] = []
        ready: list[str] = []
        seeded: list[int] = []
        joint_done = self.tail is None
        for i, action in enumerate(self.actions):
            if isinstance(action, Forward):
                if ready:
                    return False
                made.append((next(s for s in self.segments if s[0] == action.first), action.microbatch))
            elif isinstance(action, Seed):
                chosen = list(range(action.first, action.last + 1))
                alone = self.is_micro or self.tail is not None
                if ready or not chosen or set(seeded) & set(chosen) or not set(chosen) <= set(microbatches):
                    return False
                if len(chosen) != (1 if alone else len(microbatches)):
                    return False
                if any(sum(m == c for _, m in made) < len(self.segments) for c in chosen):
                    return False
                seeded += chosen
                ready = self._nodes(made, chosen, lambda s: self.tail is None or s[0] >= self.tail)
                self.passes.append([i])
            elif isinstance(action, Joint):
                is_due = not ready and not joint_done and sorted(seeded) == list(microbatches)
                if not is_due or [action.first, action.last] != [0, microbatches[-1]]:
                    return False
                joint_done = True
                ready = self._nodes(made, list(microbatches), self._is_before_tail)
                if not ready:
                    return False
                self.passes.append([i])
            elif isinstance(action, Backward):
                if not ready or ready.pop() != self.texts[i]:
                    return False
                self.passes[-1].append(i)
        if not joint_done and self._nodes(made, list(microbatches), self._is_before_tail):
            return False
        return not ready and sorted(seeded) == list(microbatches)

    def _is_before_tail(self, segment: list[int]) -> bool:
        return self.tail is not None and segment[0] < self.tail

    def _nodes(self, made: list[tuple[list[int], int]], chosen: list[int], is_in: Any) -> list[str]:
        return [f"backward {self.span(s)} m{m}" for s, m in made if m in chosen and is_in(s) and self.backs(s)]

    def uses(self, block: int, *kinds: type) -> list[int]:
        name = f"b{block}"
        return [
            i
            for i, a in enumerate(self.actions)
            if isinstance(a, kinds)
            and isinstance(a, Forward | Backward)
            and any(name in c.blocks for c in self.calls[a.first : a.last + 1])
        ]

    def visits(self, block: int) -> bool:
        profiled = self.profile.blocks[block]
        return self.plan.blocks[profiled.name].weight_home is not Tier.DEVICE and not profiled.is_spanning

    def is_there(self, block: int, position: int) -> bool:
        if not self.visits(block):
            return True
        before = [t for t in self.texts[:position] if t in (f"fetch B{block}", f"release B{block}")]
        return bool(before) and before[-1].startswith("fetch")

    def is_in_tail(self, position: int) -> bool:
        """Between a seed and the last backward of its pass, where a pass is one tail's."""
        return self.tail is not None and any(
            isinstance(self.actions[p[0]], Seed) and p[0] < position < p[-1] for p in self.passes if p
        )

    def weights(self) -> bool:
        if any(self.is_in_tail(i) for i, t in enumerate(self.texts) if t.startswith("release")):
            return False
        for b in range(len(self.profile.blocks)):
            moves = [self.texts[i].split()[0] for i in self.at(f"fetch B{b}", f"release B{b}")]
            if moves != ["fetch", "release"] * (len(moves) // 2) or (moves and not self.visits(b)):
                return False
            if not all(self.is_there(b, i) for i in self.uses(b, Forward, Backward)):
                return False
        return True

    def moves(self) -> bool:
        known: set[int] = set()
        for segment in self.segments:
            fate = self.plan.calls[segment[0]]
            tier = {Saved.KEEP: Tier.DEVICE, Saved.OFFLOAD: fate.saved_home}.get(fate.saved, fate.boundary_home)
            for m in range(self.plan.microbatches):
                end = f"C{segment[0]} m{m}"
                found = self.at(f"offload {end} host", f"offload {end} disk", f"drop {end}", f"reload {end}")
                known |= set(found)
                if not found:
                    continue
                if tier is Tier.DEVICE or not self.backs(segment):
                    return False
                if [self.texts[i] for i in found] != [f"offload {end} {tier}", f"drop {end}", f"reload {end}"]:
                    return False
                forward = self.at(f"forward {self.span(segment)} m{m}")[0]
                backward = self.at(f"backward {self.span(segment)} m{m}")[0]
                if not forward < found[0] < found[-1] < backward:
                    return False
        return all(i in known for i, t in enumerate(self.texts) if t.split()[0] in ("offload", "drop", "reload"))

    def trains(self, block: int) -> bool:
        return any(p.requires_grad for p in self.profile.blocks[block].parameters)

    def adds(self, block: int) -> list[int]:
        """Positions at which the block's gradient may grow."""
        name = f"b{block}"
        found = [
            i
            for i in self.uses(block, Backward)
            for a in [self.actions[i]]
            if isinstance(a, Backward)
            and any(c.has_backward and name in c.blocks for c in self.calls[a.first : a.last + 1])
        ]
        return [i for p in self.passes for i in p] if self.is_loose(block) else found

    def is_loose(self, block: int) -> bool:
        """Gradients may also come from glue, at any time of a pass."""
        profiled = self.profile.blocks[block]
        return profiled.is_spanning or not any(c.has_backward and profiled.name in c.blocks for c in self.calls)

    def over(self) -> int:
        return max(i for p in self.passes for i in p)

    def gradients(self) -> bool:
        settling = ("accumulate", "update", "clear")
        if any(self.is_in_tail(i) for i, t in enumerate(self.texts) if t.split()[0] in settling):
            return False
        for b, profiled in enumerate(self.profile.blocks):
            accumulates, updates, clears = self.at(f"accumulate B{b}"), self.at(f"update B{b}"), self.at(f"clear B{b}")
            if not self.trains(b):
                if accumulates or updates or clears:
                    return False
                continue
            adds = self.adds(b)
            is_home = self.plan.blocks[profiled.name].gradient_home is Tier.DEVICE
            if len(updates) != 1 or updates[0] < adds[-1] or len(clears) != is_home:
                return False
            update = updates[0]
            if clears and clears[0] < update:
                return False
            if is_home and accumulates:
                return False
            if not is_home and not (accumulates and adds[-1] < accumulates[-1] < update):
                return False
            for before, a in zip([-1, *accumulates], accumulates, strict=False):
                if not any(before < i < a for i in adds):
                    return False
                running = [p for p in self.passes if p and p[0] < a]
                if any(i > a for i in running[-1] if i in adds):
                    return False
            if update < self.over():
                if self.plan.update is UpdateTime.AFTER_BACKWARD or not self.is_there(b, update):
                    return False
                if any(i > update for i in self.uses(b, Backward)):
                    return False
        known = {f"{kind} B{b}" for kind in ("accumulate", "update", "clear") for b in range(len(self.profile.blocks))}
        return all(t in known for t in self.texts if t.split()[0] in ("accumulate", "update", "clear"))

    def norm(self) -> bool:
        norms = self.at("norm")
        if len(norms) != self.clips:
            return False
        for n in norms:
            if n < self.over() or any(t.startswith("update") for t in self.texts[:n]):
                return False
            for b, profiled in enumerate(self.profile.blocks):
                is_away = self.plan.blocks[profiled.name].gradient_home is not Tier.DEVICE
                if self.trains(b) and is_away and self.at(f"accumulate B{b}")[-1] > n:
                    return False
        return True

    def end(self) -> bool:
        return self.at("commit") == [len(self.actions) - 1]


@st.composite
def storages(draw: Any, calls: int) -> tuple[StorageProfile, ...]:
    """Random storages of powers of two, so that a sum tells which are in it."""
    found: list[StorageProfile] = []
    for index in range(draw(st.integers(0, 6))):
        made = draw(st.integers(-1, calls - 1))
        later = st.integers(max(made, 0), calls - 1)
        inside = draw(st.sets(later, max_size=2))
        # What is made in a segment cannot be an argument of that segment's call.
        arguments = draw(st.sets(later, max_size=2)) - {made}
        outside = draw(st.sets(later, max_size=1))
        last = max({made, *inside, *arguments, *outside, draw(later)})
        found.append(
            StorageProfile(
                index=index,
                nbytes=1 << index,
                segment=made,
                saved_inside=tuple(sorted(inside)),
                saved_outside=tuple(sorted(outside)),
                argument_of=tuple(sorted(arguments)),
                last_use=last,
                leaves=draw(st.sampled_from([True, True, False])),
                is_unseen=bool(inside) and draw(st.sampled_from([False, False, True])),
                held_until=draw(st.sampled_from([-1, last, draw(st.integers(last, calls - 1))])),
            )
        )
    return tuple(found)


def with_storages(draw: Any, case: Case) -> Case:
    """The same with activations, and traces of the rows that its microbatches have: of 7 rows some
    have one less.
    """
    trace = next(iter(case.profile.traces.values()))
    batch_rows = draw(st.sampled_from([case.profile.batch_rows, 7]))
    rows = -(-batch_rows // case.plan.microbatches)
    filled = replace(trace, rows=rows, storages=draw(storages(len(trace.calls))))
    fewer = replace(
        filled, rows=rows - 1, storages=tuple(replace(s, nbytes=5 * s.nbytes // 8) for s in filled.storages)
    )
    states = {b.name: 8 * len(b.parameters) for b in case.profile.blocks}
    traces = {rows: filled, **({rows - 1: fewer} if rows > 1 else {})}
    profile = replace(case.profile, batch_rows=batch_rows, rows_are_alike=True, traces=traces, state_bytes=states)
    return replace(case, profile=profile)
