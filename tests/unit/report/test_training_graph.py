"""The training graph, against the storages of a hand-made profile, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core.errors import UsageError
from memfit.report.training_graph import EdgeKind, NodeKind, TrainingGraph, chain, draw_graph, training_graph
from unit.profiles import gpt_profile

LAYERS, ROWS = 4, 8
PROFILE = gpt_profile(layers=LAYERS, batch_rows=ROWS)
TRACE = PROFILE.traces[ROWS]
GRAPH = training_graph(PROFILE, TRACE)
# Calls of the profile: embedding, layers, norm, head.
NORM, HEAD = LAYERS + 1, LAYERS + 2


def bytes_of(graph: TrainingGraph, kind: NodeKind) -> int:
    return sum(node.nbytes for node in graph.nodes if node.kind is kind)


def test_each_byte_of_the_model_and_of_its_activations_is_in_one_node() -> None:
    assert bytes_of(GRAPH, NodeKind.WEIGHT) == bytes_of(GRAPH, NodeKind.GRADIENT) == PROFILE.weight_bytes
    assert bytes_of(GRAPH, NodeKind.STATE) == 2 * PROFILE.weight_bytes
    made = sum(storage.nbytes for storage in TRACE.storages if not storage.is_input)
    assert bytes_of(GRAPH, NodeKind.ACTIVATION) == made
    assert bytes_of(chain(GRAPH, TRACE), NodeKind.ACTIVATION) == made


def test_who_keeps_whom_alive() -> None:
    inside, output, logits = "activation 2", "activation 3", f"activation {len(TRACE.storages) - 1}"
    assert GRAPH.keepers(inside) == ("backward 1",)
    assert GRAPH.keepers(output) == ("backward 2",)  # the next layer's argument, saved in there
    assert GRAPH.keepers(logits) == ("loss",)
    assert set(GRAPH.kept_by("backward 2")) == {output, "activation 4"}
    kept = {name for node in GRAPH.nodes for name in GRAPH.kept_by(node.name)}
    assert kept == {f"activation {s.index}" for s in TRACE.storages if s.saved_inside or s.saved_outside}


def test_a_tied_weight_is_read_and_given_gradients_at_both_ends() -> None:
    profile = gpt_profile(layers=2, batch_rows=2, is_tied=True)
    graph = training_graph(profile, profile.traces[2])
    readers = {e.target for e in graph.edges if e.source == "weight wte" and e.kind is EdgeKind.READS}
    assert readers == {"forward 0", "forward 4", "backward 0", "backward 4", "update wte"}
    makers = {e.source for e in graph.edges if e.target == "gradient wte"}
    assert makers == {"backward 0", "backward 4"}


def test_equal_layers_are_one_column_of_the_chain() -> None:
    columns = [node.label for node in chain(GRAPH, TRACE).nodes if node.kind is NodeKind.FORWARD]
    assert columns == ["wte", f"h.0-{LAYERS - 1}", "ln_f", "lm_head"]


def test_around_a_call_stands_what_it_is_joined_to() -> None:
    near = {node.name for node in GRAPH.around(["forward 1"]).nodes}
    made = {f"activation {s.index}" for s in TRACE.storages if s.segment == 1 or 1 in s.argument_of}
    assert near == {"forward 0", "forward 1", "forward 2", "weight h.0", *made}
    with pytest.raises(UsageError, match="no node 'forward 99'"):
        GRAPH.around(["forward 99"])


def test_files_hold_the_whole_graph_with_names_escaped() -> None:
    read = json.loads(GRAPH.to_json())
    assert {node["name"] for node in read["nodes"]} == {node.name for node in GRAPH.nodes}
    assert len(read["edges"]) == len(GRAPH.edges)
    dot = GRAPH.to_dot()
    assert dot.count(" -> ") == len(GRAPH.edges)
    assert dot.count("color=red") == sum(e.kind is EdgeKind.KEEPS for e in GRAPH.edges)
    drawn = ET.fromstring(draw_graph(chain(GRAPH, TRACE), "a <model> & more"))
    space = "{http://www.w3.org/2000/svg}"
    assert drawn.findtext(f"{space}title") == "a <model> & more"
    assert len(drawn.findall(f"{space}g")) == len(chain(GRAPH, TRACE).nodes)
    assert len(drawn.findall(f"{space}path")) == len(chain(GRAPH, TRACE).edges)


def test_profile_writes_the_graph_and_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    runner = CliRunner()
    for name in ("graph.json", "graph.dot", "graph.svg"):
        done = runner.invoke(app, ["profile", "--recipe", "gpt-tiny", "--graph", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).stat().st_size > 1000
    part = json.loads((tmp_path / "graph.json").read_text())
    assert "loss" in {node["kind"] for node in part["nodes"]}
    refused = runner.invoke(app, ["profile", "--recipe", "gpt-tiny", "--graph", "graph.png"])
    assert refused.exit_code == 2
    assert ".json, .dot, .svg" in " ".join(refused.output.split())
    unknown = ["profile", "--recipe", "gpt-tiny", "--graph", str(tmp_path / "x.svg"), "--graph-of", "blocks.99"]
    refused = runner.invoke(app, unknown)
    assert refused.exit_code == 2
    assert "no call of the step" in " ".join(refused.output.split())
    assert not (tmp_path / "x.svg").exists()
