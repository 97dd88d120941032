"""The training graph: what a step reads, makes and keeps, and who keeps whom alive.

In: `Profile` and the trace of a microbatch. Out: `TrainingGraph`, as data and in DOT; pictures of
it are in `report.graph_picture`. All of plain training: every call keeps what it saves.

[Note: keepers of an activation]
Forward code holds a storage until it was used last. Behind that, autograd does: for the backward of
the call that saved it, for that of the code behind a call (told as the backward of that call, which
it comes before), or for the loss's. An activation without a keeper is freed in forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from memfit.core.errors import UsageError
from memfit.core.numbered_names import joined_names
from memfit.core.profile import CallProfile, Profile, TraceProfile
from memfit.core.units import format_bytes


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
