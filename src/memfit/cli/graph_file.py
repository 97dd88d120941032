"""Files of the training graph that `memfit profile --graph` writes."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.core.errors import UsageError
from memfit.report.written import write_report

if TYPE_CHECKING:
    from memfit.core.profile import Profile

_ENDINGS = (".json", ".dot", ".svg")


def check_graph_file(path: Path | None, module: str | None) -> None:
    """Checks the two options before anything is traced.

    Raises:
        UsageError: the file ends in something else than .json, .dot or .svg, or a module is named
            without a file.
    """
    if path is None and module is not None:
        raise UsageError("--graph-of says which part of the training graph to write: name a file with --graph as well")
    if path is not None and path.suffix not in _ENDINGS:
        raise UsageError(f"--graph {path}: the ending says the form, one of {', '.join(_ENDINGS)}")


def write_graph(path: Path, module: str | None, title: str, profile: Profile) -> None:
    """Writes the graph of a plain step of the whole batch, or of a module's calls in it.

    Raises:
        UsageError: the module is not called, or the file cannot be written.
    """
    from memfit.report.graph_picture import draw_graph
    from memfit.report.training_graph import chain, training_graph

    trace = profile.traces[profile.batch_rows]
    graph = training_graph(profile, trace)
    if module is not None:
        sites = {call.site for call in trace.calls}
        calls = [call for call in trace.calls if call.site == module]
        if not calls:
            near = difflib.get_close_matches(module, sites, n=3, cutoff=0.3)
            raise UsageError(
                f"--graph-of {module!r}: no call of the step is of that module; there are {near or sorted(sites)[:5]}"
            )
        names = [f"{what} {c.index}" for c in calls for what in ("forward", "backward")]
        known = {node.name for node in graph.nodes}
        graph = graph.around(name for name in names if name in known)
    if path.suffix == ".json":
        write_report(path, graph.to_json() + "\n")
    elif path.suffix == ".dot":
        write_report(path, graph.to_dot())
    else:
        shown = graph if module is not None else chain(graph, trace)
        write_report(path, draw_graph(shown, f"training graph of {title}" + (f", {module}" if module else "")))
