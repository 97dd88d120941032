"""The report page as a file: it parses, asks nothing of the network, is small, and no name can break out of its place."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from memfit.report import page as page_module
from memfit.report.memory_tables import closed_forms
from memfit.report.page import page_data, render_page
from unit.profiles import gpt_profile
from unit.report.subjects import streamed_plan, subject_of

MIB = 1 << 20
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Checks that elements nest, and collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts: list[dict[str, Any]] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in {"href", "src", "srcset", "action", "data"} and value]
        self.attributes += [name for name, _ in attrs]
        if tag == "script":
            self.scripts.append({**found, "text": ""})

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1]["text"] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def data_in(reader: Reader) -> Any:
    (block,) = [script for script in reader.scripts if script.get("type") == "application/json"]
    return json.loads(block["text"])


def test_the_page_parses_and_carries_the_data_of_its_subject() -> None:
    subject = subject_of()
    reader = read(render_page(subject))
    assert data_in(reader) == json.loads(json.dumps(page_data(subject)))
    assert len(reader.ids) == len(set(reader.ids))
    # Every part of the page that the script asks for by its id is there, and every anchor has its target.
    script = "".join(script["text"] for script in reader.scripts if "type" not in script)
    assert {*re.findall(r'\$\("([\w-]+)"\)', script)} <= set(reader.ids)
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)


def test_the_page_asks_nothing_of_the_network() -> None:
    text = render_page(subject_of())
    assert (
        re.findall(r"https?:|//\w+\.|@import|url\((?!#)", re.sub(r"url\(#[^)]*\)|url\(#p-\$\{[^`]*`", "", text)) == []
    )
    assert "default-src 'none'" in text
    assert all(not name.startswith("on") for name in read(text).attributes)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028\"'`${1}$title"


def test_hostile_names_stay_names() -> None:
    profile = gpt_profile(layers=2)
    blocks = tuple(replace(block, name=HOSTILE if block.name == "ln_f" else block.name) for block in profile.blocks)
    traces = {
        rows: replace(
            trace,
            calls=tuple(
                replace(call, site=HOSTILE, blocks=(HOSTILE,)) if call.site == "ln_f" else call for call in trace.calls
            ),
            largest_saved=((HOSTILE, 8),),
        )
        for rows, trace in profile.traces.items()
    }
    states = {HOSTILE if name == "ln_f" else name: nbytes for name, nbytes in profile.state_bytes.items()}
    hostile = replace(profile, blocks=blocks, traces=traces, state_bytes=states)
    plain, meant = read(render_page(subject_of(layers=2))), subject_of(profile=hostile, layers=2, title=HOSTILE)
    text = render_page(meant)
    reader = read(text)
    assert len(reader.scripts) == len(plain.scripts)
    assert sorted(reader.ids) == sorted(plain.ids)
    assert "onerror" not in reader.attributes
    told = data_in(reader)
    assert told["title"] == told["blocks"][-2] == told["calls"][-2] == told["memory"]["largest_saved"][0][0] == HOSTILE
    assert "alert(1)</script>" not in text


@pytest.mark.usefixtures("older_objects_are_passed_over")
def test_a_page_of_126_layers_and_16_microbatches_is_small() -> None:
    layers = 126
    profile = gpt_profile(layers=layers, batch_rows=16, rows=(1,), tokens=8, vocabulary=64)
    subject = subject_of(streamed_plan(layers, 16), profile)
    assert len(subject.predicted.moments) > 6_000
    text = render_page(subject)
    assert len(text.encode()) < 2 * MIB
    read(text)


@pytest.mark.usefixtures("older_objects_are_passed_over")
def test_the_largest_timeline_that_a_page_draws_is_below_five_mebibytes() -> None:
    # Forty copies of a step, as if it had forty times the actions: folded, and bounded.
    subject = subject_of(streamed_plan(60, 8), gpt_profile(layers=60, rows=(1,), tokens=8, vocabulary=64))
    once = subject.predicted
    long = replace(
        once,
        moments=once.moments * 40,
        intervals=tuple(
            i._replace(moment=i.moment + k * len(once.moments), start_s=i.start_s + k * 10, end_s=i.end_s + k * 10)
            for k in range(40)
            for i in once.intervals
        ),
    )
    tiers = {tier: column * 40 for tier, column in subject.tiers.items()}
    assert len(long.moments) > 50_000
    text = render_page(replace(subject, predicted=long, measured=long, tiers=tiers))
    assert len(text.encode()) < 5 * MIB


def test_the_pages_closed_forms_are_those_of_python() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here to run the page's script with")
    forms = closed_forms(gpt_profile(layers=5, rows=(2, 8)))
    asked = [(rows, recomputed) for rows in (1, 3, 8, 40) for recomputed in (0, 1, 3, 5)]
    script = Path(page_module.__file__).with_name("page") / "closed_forms.js"
    program = (
        f"{script.read_text(encoding='utf-8')}\n"
        f"const forms = {json.dumps(forms.data())}, asked = {json.dumps(asked)};\n"
        "console.log(JSON.stringify(asked.map(([rows, recomputed]) => closedPeak(forms, rows, { recomputed }).peak)));"
    )
    result = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [forms.peak_bytes(rows, recomputed) for rows, recomputed in asked]
