"""Schedule: the step as an ordered list of small frozen actions, with a text form that parses
back.

In: built by `step` from a plan and a profile, or parsed from text. Out: lowered to a `Step`
by `step`, which prediction, checker and engine read.

[Note: what an action means]
B3 is block 3, C5 call 5, m0 microbatch 0; `C5-7` is a recompute segment of three calls. Actions
that start transfers (fetch, offload, reload, accumulate, update) return at once. An action that
needs the result waits for it, which is part of its meaning:

| text                | does                                                                        | waits for                |
|---------------------|-----------------------------------------------------------------------------|--------------------------|
| start m0            | runs microbatch 0's user code to the entry of its first call                |                          |
| fetch B3            | gives block 3's flat buffer its bytes and starts to fill it from its home   | release or update of B3  |
| forward C5 m0       | runs microbatch 0 from the entry of call 5 to the entry of the next segment | fetches of C5's blocks   |
| seed m0             | begins the backward of microbatch 0's loss (`seed m0-3`: of the sum)        |                          |
| joint m0-3          | begins the backward of microbatches 0 to 3 from the cuts of their tails      | their tails              |
| backward C5 m0      | autograd runs from the first gradient at call 5's outputs to the next begin | fetches; reloads of C5 m0|
| offload C5 m0 disk  | starts writing what call 5 of m0 saved to its home                          |                          |
| drop C5 m0          | the device bytes of what was offloaded are given up                         | the offload              |
| reload C5 m0        | starts bringing it back                                                     |                          |
| accumulate B3       | block 3's gradient on the device is added into its home and leaves          |                          |
| scale               | from here on, what losses begin with is multiplied with the loss scale      |                          |
| unscale             | from here on, updates and norms multiply gradients with its inverse         | all accumulates          |
| check               | if a gradient is infinite or NaN, the updates that follow do nothing        | all accumulates          |
| norm                | the global gradient norm and the clip factor become known                   | all accumulates          |
| update B3           | starts the optimizer on block 3, on the device or on the host's cores       | accumulate of B3, norm,  |
|                     |                                                                             | check                    |
| spread B3           | the ranks' new shares of block 3's whole weights go to all ranks             | update of B3             |
| clear B3            | block 3's gradient on the device is given up                                | update of B3             |
| release B3          | block 3's bytes on the device are given up                                  | update of B3             |
| decide              | gradients and the step's record are durable: a journal has the step          | all accumulates          |
| keep B0 B3          | the new versions of blocks 0 and 3 are committed; only then do updates of    | updates of B0 and B3     |
|                     | the next turn's blocks change anything                                       |                          |
| commit              | the step is complete: homes flip to the new state                           | all updates              |

*Passes of backward.* Without a tail, a seed runs through all the backwards that follow it. With a
tail (layer-major order), `seed m0` runs from the loss of m0 down to the tail's first call and stops
at its cut; when all microbatches have done so, `joint` begins one backward of all of them, from
their cuts, that runs through the calls before the tail. A header line says where the tail begins
(`# tail C5`). Inside a tail's backward no gradient goes home, nothing is updated and no weights
leave: autograd hands over the gradients of a tail when all of it has run back (`engine.tail`).

*Microbatches that take turns.* The header says `interleaved` where each microbatch's code pauses at
the entries of segments while the others run; else each runs to its end before the next one starts.

*What stays.* What `offload C5 m0` moves is decided by the plan: all that call 5 saved (offload), or
the arguments of the recompute segment that begins at call 5 (recompute, select). With several
microbatches the tail's blocks stay on the device as long as any of them is in the tail. An update
after the last backward streams weights that are away from and to their homes, piece by piece,
without a visit; an update in backward finds its block still visiting. Blocks that are read between
calls, or by no traced call, have their gradient complete only at the end of a pass.

*All of a kind.* What waits for everything of some kind that is under way says so in its class
(`waits_for`); an action that does nothing else is known to everybody by that
(`tests/extending/test_another_action.py`).

*Bytes of an accumulate* may stay on the device until the compute action after it has ended, and no
longer: there the engine waits for the transfer. Prediction counts them so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from memfit.core.errors import PlanError
from memfit.core.tiers import TIER_PATTERN, Tier


@dataclass(frozen=True)
class Start:
    """A microbatch's user code runs up to the entry of its first call."""

    microbatch: int

    def __str__(self) -> str:
        return f"start m{self.microbatch}"


@dataclass(frozen=True)
class Forward:
    """A segment of calls runs forward for one microbatch."""

    first: int
    last: int
    microbatch: int

    def __str__(self) -> str:
        return f"forward {_calls(self.first, self.last)} m{self.microbatch}"


@dataclass(frozen=True)
class Backward:
    """A segment of calls runs backward for one microbatch (recomputing first if its plan says
    so).
    """

    first: int
    last: int
    microbatch: int

    def __str__(self) -> str:
        return f"backward {_calls(self.first, self.last)} m{self.microbatch}"


@dataclass(frozen=True)
class Seed:
    """Backward begins on the (sum of the) losses of microbatches first..last."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"seed {_microbatches(self.first, self.last)}"


@dataclass(frozen=True)
class Joint:
    """One backward begins on the cuts of the tails of microbatches first..last."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"joint {_microbatches(self.first, self.last)}"


@dataclass(frozen=True)
class Fetch:
    """A visit of a block's weights begins."""

    block: int

    def __str__(self) -> str:
        return f"fetch B{self.block}"


@dataclass(frozen=True)
class Release:
    """A visit of a block's weights ends."""

    block: int

    def __str__(self) -> str:
        return f"release B{self.block}"


@dataclass(frozen=True)
class Offload:
    """The tensors that a call of a microbatch saved start to leave for `tier`."""

    call: int
    microbatch: int
    tier: Tier

    def __str__(self) -> str:
        return f"offload C{self.call} m{self.microbatch} {self.tier}"


@dataclass(frozen=True)
class Drop:
    """The device memory of offloaded tensors is freed."""

    call: int
    microbatch: int

    def __str__(self) -> str:
        return f"drop C{self.call} m{self.microbatch}"


@dataclass(frozen=True)
class Reload:
    """Offloaded tensors start to come back."""

    call: int
    microbatch: int

    def __str__(self) -> str:
        return f"reload C{self.call} m{self.microbatch}"


@dataclass(frozen=True)
class Accumulate:
    """A block's gradient on the device is added into its home and leaves the device."""

    block: int

    def __str__(self) -> str:
        return f"accumulate B{self.block}"


@dataclass(frozen=True)
class Scale:
    """Losses are scaled from here on."""

    def __str__(self) -> str:
        return "scale"


@dataclass(frozen=True)
class Unscale:
    """Gradients count as divided by the loss scale from here on."""

    waits_for: ClassVar[tuple[str, ...]] = ("accumulate",)

    def __str__(self) -> str:
        return "unscale"


@dataclass(frozen=True)
class Check:
    """Gradients are checked for infinities and NaN; if there are any, the step's updates are
    skipped.
    """

    waits_for: ClassVar[tuple[str, ...]] = ("accumulate",)

    def __str__(self) -> str:
        return "check"


@dataclass(frozen=True)
class Norm:
    """The global gradient norm becomes known."""

    waits_for: ClassVar[tuple[str, ...]] = ("accumulate",)

    def __str__(self) -> str:
        return "norm"


@dataclass(frozen=True)
class Update:
    """The optimizer starts on a block."""

    block: int

    def __str__(self) -> str:
        return f"update B{self.block}"


@dataclass(frozen=True)
class Clear:
    """A block's gradient on the device is freed."""

    block: int

    def __str__(self) -> str:
        return f"clear B{self.block}"


@dataclass(frozen=True)
class Decide:
    """Gradients and the record of the step are durable: from here on its updates will be made, by
    this process or the next.
    """

    waits_for: ClassVar[tuple[str, ...]] = ("accumulate",)

    def __str__(self) -> str:
        return "decide"


@dataclass(frozen=True)
class Keep:
    """New versions of blocks are committed, before the blocks of the next turn are written."""

    blocks: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(["keep", *(f"B{block}" for block in self.blocks)])


@dataclass(frozen=True)
class Commit:
    """The step is complete."""

    waits_for: ClassVar[tuple[str, ...]] = ("accumulate", "update", "spread")

    def __str__(self) -> str:
        return "commit"


@dataclass(frozen=True)
class Spread:
    """Ranks that have updated their shares of a block's whole weights give each other the new
    ones.
    """

    block: int

    def __str__(self) -> str:
        return f"spread B{self.block}"


Action = (
    Start
    | Forward
    | Backward
    | Seed
    | Joint
    | Fetch
    | Release
    | Offload
    | Drop
    | Reload
    | Accumulate
    | Scale
    | Unscale
    | Check
    | Norm
    | Update
    | Spread
    | Clear
    | Decide
    | Keep
    | Commit
)


@dataclass(frozen=True, kw_only=True)
class ScheduledCall:
    """A call in a schedule: the dotted name of its module, and the indices of the blocks whose
    weights it reads.
    """

    site: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step (or a forward-only pass) in full.

    Attributes:
        blocks: names by index.
        calls: calls by index, in forward order.
        microbatches: their number.
        actions: in order.
        tail: first call of the tail, whose backward runs microbatch by microbatch before the joint
            backward; None if there is no tail.
        is_interleaved: microbatches take turns at the entries of segments.
    """

    blocks: tuple[str, ...]
    calls: tuple[ScheduledCall, ...]
    microbatches: int
    actions: tuple[Action, ...]
    tail: int | None = None
    is_interleaved: bool = False

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    def text(self) -> str:
        """Returns text: header lines that begin with `#`, then one action a line."""
        lines = [f"# microbatches {self.microbatches}" + " interleaved" * self.is_interleaved]
        lines += [] if self.tail is None else [f"# tail C{self.tail}"]
        lines += [f"# B{i} {name}" for i, name in enumerate(self.blocks)]
        for i, call in enumerate(self.calls):
            lines.append(" ".join([f"# C{i} {call.site}", *(f"B{b}" for b in call.blocks)]))
        return "\n".join([*lines, *map(str, self.actions)]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads the text that `text` writes.

        Raises:
            PlanError: a line that is not an action, with its number.
        """
        microbatches, is_interleaved = 1, False
        tail: int | None = None
        blocks: list[str] = []
        calls: list[ScheduledCall] = []
        actions: list[Action] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words:
                continue
            try:
                if words[0] != "#":
                    actions.append(parse_action(line))
                elif words[1] == "microbatches":
                    microbatches, is_interleaved = int(words[2]), words[3:] == ["interleaved"]
                    if words[3:] and not is_interleaved:
                        raise PlanError(f"unknown header {line!r}")
                elif words[1] == "tail":
                    tail = int(words[2].removeprefix("C"))
                elif words[1] == f"B{len(blocks)}":
                    blocks.append(words[2] if len(words) > 2 else "")
                elif words[1] == f"C{len(calls)}":
                    # A model that is itself the site has the empty name: then the third word is
                    # already a block.
                    named = len(words) > 2 and not re.fullmatch(r"B\d+", words[2])
                    uses = words[3:] if named else words[2:]
                    calls.append(
                        ScheduledCall(
                            site=words[2] if named else "", blocks=tuple(int(w.removeprefix("B")) for w in uses)
                        )
                    )
                else:
                    raise PlanError(f"unknown header {line!r}")
            except (ValueError, IndexError) as error:
                raise PlanError(f"line {number}: {error}") from error
        return cls(
            blocks=tuple(blocks),
            calls=tuple(calls),
            microbatches=microbatches,
            actions=tuple(actions),
            tail=tail,
            is_interleaved=is_interleaved,
        )


def parse_action(text: str) -> Action:
    """Reads one action, such as `"forward C5-7 m0"`.

    Raises:
        PlanError: not an action.
    """
    for pattern, make in _PATTERNS:
        match = pattern.fullmatch(text.strip())
        if match:
            return make(match.groups())
    raise PlanError(f"not an action: {text.strip()!r}")


def _microbatches(first: int, last: int) -> str:
    return f"m{first}" if first == last else f"m{first}-{last}"


def _calls(first: int, last: int) -> str:
    return f"C{first}" if first == last else f"C{first}-{last}"


def _span(first: str, last: str | None) -> tuple[int, int]:
    return int(first), int(first if last is None else last)


# Groups of a match: text, or None for the missing end of a span.
_PATTERNS: Sequence[tuple[re.Pattern[str], Callable[[Sequence[str]], Action]]] = [
    (re.compile(r"start m(\d+)"), lambda g: Start(int(g[0]))),
    (re.compile(r"forward C(\d+)(?:-(\d+))? m(\d+)"), lambda g: Forward(*_span(g[0], g[1]), int(g[2]))),
    (re.compile(r"backward C(\d+)(?:-(\d+))? m(\d+)"), lambda g: Backward(*_span(g[0], g[1]), int(g[2]))),
    (re.compile(r"seed m(\d+)(?:-(\d+))?"), lambda g: Seed(*_span(g[0], g[1]))),
    (re.compile(r"joint m(\d+)(?:-(\d+))?"), lambda g: Joint(*_span(g[0], g[1]))),
    (re.compile(r"fetch B(\d+)"), lambda g: Fetch(int(g[0]))),
    (re.compile(r"release B(\d+)"), lambda g: Release(int(g[0]))),
    (
        re.compile(rf"offload C(\d+) m(\d+) (?!device$)({TIER_PATTERN})"),
        lambda g: Offload(int(g[0]), int(g[1]), Tier(g[2])),
    ),
    (re.compile(r"drop C(\d+) m(\d+)"), lambda g: Drop(int(g[0]), int(g[1]))),
    (re.compile(r"reload C(\d+) m(\d+)"), lambda g: Reload(int(g[0]), int(g[1]))),
    (re.compile(r"accumulate B(\d+)"), lambda g: Accumulate(int(g[0]))),
    (re.compile(r"scale"), lambda _: Scale()),
    (re.compile(r"unscale"), lambda _: Unscale()),
    (re.compile(r"check"), lambda _: Check()),
    (re.compile(r"norm"), lambda _: Norm()),
    (re.compile(r"update B(\d+)"), lambda g: Update(int(g[0]))),
    (re.compile(r"spread B(\d+)"), lambda g: Spread(int(g[0]))),
    (re.compile(r"clear B(\d+)"), lambda g: Clear(int(g[0]))),
    (re.compile(r"decide"), lambda _: Decide()),
    (re.compile(r"keep((?: B\d+)+)"), lambda g: Keep(tuple(int(w.removeprefix("B")) for w in g[0].split()))),
    (re.compile(r"commit"), lambda _: Commit()),
]
