"""Picture of a training graph as SVG: a column a call, a row a kind of node.

In: `TrainingGraph`, of a chain or around one block. Out: one SVG file without network.

[Note: layout]
Forward reads from left to right, backward runs below it from right to left. A column is a node of
forward; weights and states stand over it, what it makes between its forward and its backward,
gradients and updates below. Edges that keep an activation alive are red, all others grey.
"""

from __future__ import annotations

from collections import Counter
from html import escape

from memfit.report.training_graph import COMPUTATION, Edge, EdgeKind, Node, NodeKind, TrainingGraph, text_of

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
