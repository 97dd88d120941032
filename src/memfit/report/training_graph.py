"""The training graph: what a step reads, makes and keeps, and who keeps whom alive.

In: `Profile` and the trace of a microbatch. Out: `TrainingGraph`, as data and in DOT; pictures of
it are in `report.training_graph`. All of plain training: every call keeps what it saves.

[Note: keepers of an activation]
Forward code holds a storage until it was used last. Behind that, autograd does: for the backward of
the call that saved it, for that of the code behind a call (told as the backward of that call, which
it comes before), or for the loss's. An activation without a keeper is freed in forward.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from html import escape
from itertools import groupby, pairwise

from memfit.core.errors import UsageError
from memfit.core.limits import format_bytes
from memfit.core.profile import CallProfile, Profile, TraceProfile
from memfit.core.step_report import joined_names


class NodeKind(StrEnum):
    """Kinds of nodes: computation (forward, loss, backward, update) and what it reads and makes."""

    INPUT = "input"
    WEIGHT = "weight"
    STATE = "state"
    FORWARD = "forward"
    ACTIVATION = "activation"
    LOSS = "loss"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    UPDATE = "update"


class EdgeKind(StrEnum):
    """Relations. KEEPS: computation holds an activation until it has run; all others are flows of
    data.
    """

    READS = "reads"
    MAKES = "makes"
    KEEPS = "keeps"
    NEXT = "next"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node.

    Attributes:
        name: unique, such as "forward 3", "weight h.0", "activation 17".
        kind: see `NodeKind`.
        label: its name for people: a module, a block, bytes.
        nbytes: of what it is; 0 for computation.
        members: nodes that it stands for, itself included.
    """

    name: str
    kind: NodeKind
    label: str
    nbytes: int = 0
    members: int = 1


@dataclass(frozen=True, kw_only=True, order=True)
class Edge:
    """An edge in the direction of data: an activation points at who keeps it."""

    source: str
    target: str
    kind: EdgeKind


@dataclass(frozen=True, kw_only=True)
class TrainingGraph:
    """A step of one microbatch.

    Attributes:
        nodes: by column of the picture: in forward order.
        edges: each once.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def keepers(self, activation: str) -> tuple[str, ...]:
        """Returns the names of the computations that keep an activation alive behind its last use
        in forward.
        """
        return tuple(e.target for e in self.edges if e.kind is EdgeKind.KEEPS and e.source == activation)

    def kept_by(self, computation: str) -> tuple[str, ...]:
        """Returns the names of the activations that wait for a computation."""
        return tuple(e.source for e in self.edges if e.kind is EdgeKind.KEEPS and e.target == computation)

    def around(self, names: Iterable[str]) -> TrainingGraph:
        """Returns these nodes, all that an edge joins them to, and the edges between all those.

        Raises:
            UsageError: there is no such node.
        """
        wanted = set(names)
        if missing := wanted - {node.name for node in self.nodes}:
            raise UsageError(f"the training graph has no node {min(missing)!r}")
        near = wanted | {end for e in self.edges if wanted & {e.source, e.target} for end in (e.source, e.target)}
        return TrainingGraph(
            nodes=tuple(node for node in self.nodes if node.name in near),
            edges=tuple(e for e in self.edges if wanted & {e.source, e.target}),
        )

    def merged(self, group: Callable[[Node], tuple[str, str]]) -> TrainingGraph:
        """Returns the graph with each group of nodes as one; bytes are summed, edges inside of a
        group are left out.

        Args:
            group: gives the name and the label of a node's group, of nodes of one kind.
        """
        found: dict[str, Node] = {}
        of: dict[str, str] = {}
        for node in self.nodes:
            name, label = group(node)
            of[node.name] = name
            old = found.get(name)
            nbytes, members = (0, 0) if old is None else (old.nbytes, old.members)
            found[name] = Node(
                name=name,
                kind=node.kind,
                label=label,
                nbytes=nbytes + node.nbytes,
                members=members + node.members,
            )
        edges = dict.fromkeys(Edge(source=of[e.source], target=of[e.target], kind=e.kind) for e in self.edges)
        return TrainingGraph(nodes=tuple(found.values()), edges=tuple(e for e in edges if e.source != e.target))

    def to_json(self) -> str:
        """Returns JSON: {"nodes": [...], "edges": [...]} with the fields of `Node` and `Edge`."""
        return json.dumps(
            {"nodes": [asdict(n) for n in self.nodes], "edges": [asdict(e) for e in self.edges]}, indent=1
        )

    def to_dot(self) -> str:
        """Returns the graph in DOT, which Graphviz draws: computation as boxes, edges that keep in
        red.
        """
        lines = ["digraph training {", " rankdir=LR;", ' node [fontname="sans-serif"];']
        for node in self.nodes:
            shape = "box" if node.kind in COMPUTATION else "ellipse"
            lines.append(f" {_quoted(node.name)} [label={_quoted(text_of(node))}, shape={shape}];")
        for edge in self.edges:
            style = ", color=red" if edge.kind is EdgeKind.KEEPS else ""
            lines.append(f' {_quoted(edge.source)} -> {_quoted(edge.target)} [label="{edge.kind}"{style}];')
        return "\n".join([*lines, "}", ""])


COMPUTATION = (NodeKind.FORWARD, NodeKind.LOSS, NodeKind.BACKWARD, NodeKind.UPDATE)


def text_of(node: Node) -> str:
    """A node in words: kind, label, how many it stands for, bytes."""
    count = f" ({node.members} tensors)" if node.kind is NodeKind.ACTIVATION and node.members > 1 else ""
    size = f"\n{format_bytes(node.nbytes)}" if node.nbytes else ""
    return f"{node.kind} {node.label}{count}{size}".strip()


def training_graph(profile: Profile, trace: TraceProfile) -> TrainingGraph:
    """Makes the graph of a step of plain training with one microbatch.

    Args:
        profile: blocks and states.
        trace: of the microbatch.
    """
    nodes = [*_blocks(profile), *_calls(trace), *_activations(trace)]
    known = {node.name for node in nodes}
    edges = dict.fromkeys([*_flow(trace), *_weight_edges(profile, trace), *_activation_edges(trace)])
    return TrainingGraph(nodes=tuple(nodes), edges=tuple(e for e in edges if {e.source, e.target} <= known))


def _blocks(profile: Profile) -> Iterator[Node]:
    for block in profile.blocks:
        yield Node(name=f"weight {block.name}", kind=NodeKind.WEIGHT, label=block.name, nbytes=block.weight_bytes)
        if block.trains:
            nbytes, states = block.gradient_bytes, profile.state_bytes.get(block.name, 0)
            yield Node(name=f"gradient {block.name}", kind=NodeKind.GRADIENT, label=block.name, nbytes=nbytes)
            yield Node(name=f"update {block.name}", kind=NodeKind.UPDATE, label=block.name)
            if states:
                yield Node(name=f"state {block.name}", kind=NodeKind.STATE, label=block.name, nbytes=states)


def _calls(trace: TraceProfile) -> Iterator[Node]:
    yield Node(name="input", kind=NodeKind.INPUT, label="and code before the first call")
    for call in trace.calls:
        yield Node(name=f"forward {call.index}", kind=NodeKind.FORWARD, label=call.site)
        if call.has_backward:
            yield Node(name=f"backward {call.index}", kind=NodeKind.BACKWARD, label=call.site)
    yield Node(name="loss", kind=NodeKind.LOSS, label="and code behind the last call")


def _activations(trace: TraceProfile) -> Iterator[Node]:
    for storage in trace.storages:
        kind = NodeKind.INPUT if storage.is_input else NodeKind.ACTIVATION
        made = "input" if storage.segment < 0 else trace.calls[storage.segment].site
        yield Node(name=f"activation {storage.index}", kind=kind, label=f"of {made}", nbytes=storage.nbytes)


def _flow(trace: TraceProfile) -> Iterator[Edge]:
    forward = ["input", *(f"forward {call.index}" for call in trace.calls), "loss"]
    backward = ["loss", *(f"backward {call.index}" for call in reversed(trace.calls) if call.has_backward)]
    for names in (forward, backward):
        for source, target in pairwise(names):
            yield Edge(source=source, target=target, kind=EdgeKind.NEXT)


def _weight_edges(profile: Profile, trace: TraceProfile) -> Iterator[Edge]:
    # Code between calls counts for the call before it; what stands behind the last is the loss's.
    reads = [(name, call.index) for call in trace.calls for name in call.blocks]
    loose = [(name, calls - 1) for name, calls in trace.loose_reads]
    for name, index in dict.fromkeys([*reads, *loose]):
        last = index >= len(trace.calls) or ((name, index) in loose and index == len(trace.calls) - 1)
        forward = "loss" if last else f"forward {index}" if index >= 0 else "input"
        backward = "loss" if last else f"backward {index}"
        yield Edge(source=f"weight {name}", target=forward, kind=EdgeKind.READS)
        if backward != "loss":
            yield Edge(source=f"weight {name}", target=backward, kind=EdgeKind.READS)
        yield Edge(source=backward, target=f"gradient {name}", kind=EdgeKind.MAKES)
    for block in profile.blocks:
        for kind in ("gradient", "state", "weight"):
            yield Edge(source=f"{kind} {block.name}", target=f"update {block.name}", kind=EdgeKind.READS)


def _activation_edges(trace: TraceProfile) -> Iterator[Edge]:
    last = len(trace.calls) - 1
    for storage in trace.storages:
        name = f"activation {storage.index}"
        if not storage.is_input:
            made = f"forward {storage.segment}" if storage.segment >= 0 else "input"
            yield Edge(source=made, target=name, kind=EdgeKind.MAKES)
        for call in storage.argument_of:
            yield Edge(source=name, target=f"forward {call}", kind=EdgeKind.READS)
        for call in storage.saved_inside:
            yield Edge(source=name, target=f"backward {call}", kind=EdgeKind.KEEPS)
        for segment in storage.saved_outside:
            keeper = "loss" if segment == last else f"backward {_next_backward(trace.calls, segment)}"
            yield Edge(source=name, target=keeper, kind=EdgeKind.KEEPS)


def _next_backward(calls: tuple[CallProfile, ...], segment: int) -> int:
    """The call whose backward runs next behind that of the code after a call (-1: before all)."""
    return next((c.index for c in reversed(calls[: segment + 1]) if c.has_backward), calls[0].index)


def chain(graph: TrainingGraph, trace: TraceProfile) -> TrainingGraph:
    """Returns the graph with runs of equal calls as one column, and what each of them makes as one
    node.
    """
    column = _columns(trace)
    blocks: dict[str, str] = {}
    for call in trace.calls:
        for name in call.blocks:
            blocks.setdefault(name, column[call.index])

    def group(node: Node) -> tuple[str, str]:
        what, _, which = node.name.partition(" ")
        if node.kind is NodeKind.ACTIVATION:
            segment = trace.storages[int(which)].segment
            where = column[segment] if segment >= 0 else "input"
            return f"activation {where}", f"of {where}"
        if node.kind in (NodeKind.FORWARD, NodeKind.BACKWARD):
            where = column[int(which)]
            return f"{what} {where}", where
        if node.kind in (NodeKind.INPUT, NodeKind.LOSS):
            return str(node.kind), ""
        where = blocks.get(which, which)
        return f"{what} {where}", where

    return graph.merged(group)


def _columns(trace: TraceProfile) -> Mapping[int, str]:
    """Names of runs of equal calls, by call; two runs of one name are told apart by their calls."""
    found: dict[int, str] = {}
    for _, run in groupby(trace.calls, key=lambda call: call.kind if call.is_repeated else f"{call.index}"):
        calls = list(run)
        name = joined_names(call.site for call in calls) or "model"
        name = name if name not in found.values() else f"{name} again at {calls[0].index}"
        found.update((call.index, name) for call in calls)
    return found


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# Picture of a training graph as SVG: a column a call, a row a kind of node.
#
# In: `TrainingGraph`, of a chain or around one block. Out: one SVG file without network.
#
# [Note: layout]
# Forward reads from left to right, backward runs below it from right to left. A column is a node of
# forward; weights and states stand over it, what it makes between its forward and its backward,
# gradients and updates below. Edges that keep an activation alive are red, all others grey.

_ROWS = (
    NodeKind.STATE,
    NodeKind.WEIGHT,
    NodeKind.FORWARD,
    NodeKind.ACTIVATION,
    NodeKind.BACKWARD,
    NodeKind.GRADIENT,
    NodeKind.UPDATE,
)
_WIDTH, _HEIGHT, _GAP, _BETWEEN = 180, 44, 40, 34
_STYLE = (
    "text{font:11px sans-serif;fill:#1b1b1f}.box{fill:#e8eefc;stroke:#3457a8}.data{fill:#f6f4ee;stroke:#8a8371}"
    ".flow{stroke:#8b8f98;fill:none}.keeps{stroke:#c0392b;fill:none;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){svg{background:#15171c}text{fill:#e9e9ee}.box{fill:#22325c;stroke:#8ea9ea}"
    ".data{fill:#33312b;stroke:#a49c86}.keeps{stroke:#ff7b6b}}"
)


def draw_graph(graph: TrainingGraph, title: str) -> str:
    """Returns an SVG document; some 1 KiB a node."""
    places = _places(graph)
    right = max((x for x, _ in places.values()), default=0) + _WIDTH + _GAP
    bottom = max((y for _, y in places.values()), default=0) + _HEIGHT + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" width="{right}" height="{bottom}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
    ]
    parts += [_line(edge, places) for edge in graph.edges]
    parts += [_box(node, *places[node.name]) for node in graph.nodes]
    return "\n".join([*parts, "</svg>", ""])


def _places(graph: TrainingGraph) -> dict[str, tuple[int, int]]:
    """Upper left corners. See [Note: layout]."""
    kinds = {node.name: node.kind for node in graph.nodes}
    column: dict[str, int] = {}
    order = [n for n in graph.nodes if n.kind in (NodeKind.INPUT, NodeKind.FORWARD, NodeKind.LOSS)]
    order.sort(key=lambda n: (n.kind is NodeKind.LOSS) - (n.kind is NodeKind.INPUT))
    for position, node in enumerate(order):
        column[node.name] = position
    # Others stand where a neighbour does: first what is joined to forward, then what to those.
    while len(column) < len(kinds):
        before = len(column)
        for edge in graph.edges:
            for end, other in ((edge.source, edge.target), (edge.target, edge.source)):
                if end in column and other not in column and _may_place(kinds[end], kinds[other], edge):
                    column[other] = column[end]
        if len(column) == before:
            column.update((name, len(order)) for name in kinds if name not in column)
    used: Counter[tuple[int, NodeKind]] = Counter()
    heights = {
        row: max(Counter(column[n.name] for n in graph.nodes if _row(n) is row).values(), default=0) for row in _ROWS
    }
    tops, top = {}, _GAP
    for row in _ROWS:
        tops[row] = top
        top += heights[row] * (_HEIGHT + 8) + (_BETWEEN if heights[row] else 0)
    places: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        row = _row(node)
        cell = (column[node.name], row)
        places[node.name] = (_GAP + cell[0] * (_WIDTH + _GAP), tops[row] + used[cell] * (_HEIGHT + 8))
        used[cell] += 1
    return places


def _row(node: Node) -> NodeKind:
    return NodeKind.FORWARD if node.kind in (NodeKind.INPUT, NodeKind.LOSS) else node.kind


def _may_place(placed: NodeKind, other: NodeKind, edge: Edge) -> bool:
    """Says whether a node stands in the column of the one that an edge joins it to."""
    if other is NodeKind.ACTIVATION:
        return edge.kind is EdgeKind.MAKES
    if other is NodeKind.BACKWARD:
        # Its column is its forward's, whose weights it reads and whose activations it waits for.
        return edge.kind is EdgeKind.KEEPS or placed is NodeKind.WEIGHT
    return edge.kind is not EdgeKind.NEXT


def _line(edge: Edge, places: dict[str, tuple[int, int]]) -> str:
    (x1, y1), (x2, y2) = places[edge.source], places[edge.target]
    x1, x2 = x1 + _WIDTH // 2, x2 + _WIDTH // 2
    if y1 == y2:
        x1, x2 = (x1 + _WIDTH // 2, x2 - _WIDTH // 2) if x1 < x2 else (x1 - _WIDTH // 2, x2 + _WIDTH // 2)
        y1 = y2 = y1 + _HEIGHT // 2
    else:
        y1, y2 = (y1 + _HEIGHT, y2) if y1 < y2 else (y1, y2 + _HEIGHT)
    middle = (y1 + y2) // 2
    kind = "keeps" if edge.kind is EdgeKind.KEEPS else "flow"
    said = escape(f"{edge.source} {'is kept for' if kind == 'keeps' else '->'} {edge.target}")
    return f'<path class="{kind}" d="M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {y2}"><title>{said}</title></path>'


def _box(node: Node, x: int, y: int) -> str:
    lines = [line if len(line) < 32 else f"{line[:30]}\u2026" for line in text_of(node).split("\n")]
    first = y + _HEIGHT // 2 - 7 * (len(lines) - 1) + 4
    text = "".join(
        f'<text x="{x + _WIDTH // 2}" y="{first + 14 * i}" text-anchor="middle">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    kind, corner = ("box", 3) if node.kind in COMPUTATION else ("data", _HEIGHT // 2)
    return (
        f'<g><title>{escape(text_of(node))}</title><rect class="{kind}" x="{x}" y="{y}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" rx="{corner}"/>{text}</g>'
    )
