"""The report page in headless Chromium: it draws without errors, answers keys, and breaks no rule of axe.

Skipped where there is no Chromium (`apt install chromium`). The rules need axe-core: `npm pack axe-core`, unpacked, and
its `axe.min.js` named in MEMFIT_AXE.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.report.page import render_page
from memfit.report.subject import PlanPoint, ReportSubject
from unit.profiles import gpt_profile
from unit.report.subjects import subject_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = os.environ.get("MEMFIT_AXE")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt install chromium"),
]

# Runs behind the page's own script; what it leaves in #answer comes back. Errors of the page come first.
_ASK = """
<pre id="answer"></pre><script>
const say = (value) => (document.getElementById("answer").textContent = JSON.stringify(value));
const key = (id, key) => { const at = document.getElementById(id); at.focus(); at.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true})); return at; };
(async () => { try { say({errors, found: await (async () => { %s })()}); } catch (error) { say({errors: [...errors, String(error)]}); } })();
</script>
"""
_NOTE_ERRORS = '<script>const errors = []; addEventListener("error", (event) => errors.push(event.message));</script>'


def ask(path: Path, subject: ReportSubject, script: str, *, beside: str = "", is_dark: bool = False) -> Any:
    """Opens the page of a subject with a script behind it; returns what that returns."""
    text = render_page(subject).replace("<head>", f"<head>{_NOTE_ERRORS}", 1)
    text = text.replace("</body>", f"{beside}{_ASK % script}</body>")
    path.write_text(text, encoding="utf-8")
    assert CHROMIUM is not None
    flags = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    result = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1600", *flags,
         f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=20000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    said = re.search(r'<pre id="answer">(.*?)</pre>', result.stdout, re.DOTALL)
    assert said is not None and said.group(1), result.stdout[-500:] + result.stderr[-500:]
    answer = json.loads(html.unescape(said.group(1)))
    assert answer["errors"] == []
    return answer["found"]


def test_the_page_draws_every_part_without_an_error(tmp_path: Path) -> None:
    notes = ("does not fit", "chosen", "fits")
    front = [PlanPoint(name=note, peak_bytes=(9 - i) << 20, seconds=1 + i, note=note) for i, note in enumerate(notes)]
    counts = ask(
        tmp_path / "page.html",
        subject_of(front=front),
        """const count = (s) => document.querySelectorAll(s).length;
        return {memory: count("#memory-chart path"), lanes: count("#lanes-chart path"), tables: count("table"),
                lifetimes: count("#lifetimes-chart g"), front: count("#front-chart circle"), theme: document.documentElement.dataset.theme,
                requests: performance.getEntriesByType("resource").length};""",
    )
    # A path for each category that is used; one for each kind of each lane.
    subject = subject_of()
    used = {c for m in subject.predicted.moments for c, nbytes in m.by_category.items() if nbytes}
    assert counts["memory"] == len(used)
    assert counts["lanes"] == len({(i.lane, i.kind, i.name) for i in subject.predicted.intervals})
    assert counts["lifetimes"] == 7
    assert counts["front"] == len(front)
    assert counts["tables"] >= 9
    assert counts["theme"] == "light"
    assert counts["requests"] == 0


def test_keys_move_through_the_actions_and_say_them(tmp_path: Path) -> None:
    subject = subject_of()
    found = ask(
        tmp_path / "page.html",
        subject,
        """const said = [];
        for (const name of ["End", "Home", "ArrowRight", "p"]) { const at = key("memory-chart", name); said.push([at.ariaValueNow, at.ariaValueText]); }
        key("memory-chart", "+"); key("memory-chart", "0");
        const lane = key("lanes-chart", "ArrowRight"); said.push([lane.ariaValueNow, lane.ariaValueText]);
        document.getElementById("theme").click(); document.getElementById("theme").click();
        said.push(document.documentElement.dataset.theme);
        const rows = document.getElementById("whatif-recomputed"); rows.value = 4; rows.dispatchEvent(new Event("input", {bubbles: true}));
        said.push(document.querySelector("#whatif-out tr.total").textContent);
        return said;""",
    )
    last = len(subject.predicted.moments) - 1
    peaks = [moment.peak_bytes for moment in subject.predicted.moments]
    assert [int(now) for now, _ in found[:4]] == [last, 0, 1, peaks.index(max(peaks))]
    assert found[0][1].startswith("commit")
    assert "microbatch" in found[1][1] and "at its peak" in found[1][1]
    assert "compute" in found[4][1]
    assert found[5] == "dark"
    assert re.fullmatch(r"peak[\d.]+ [KMG]iB", found[6])


def test_hovering_an_action_names_its_block_its_largest_saved_tensor_and_the_line_that_made_it(tmp_path: Path) -> None:
    profile = gpt_profile(layers=4)
    saved = tuple((f"aten.addmm in h.{i}.mlp: (8, {i}) float32", (i + 1) << 20) for i in range(4))
    traces = {
        rows: replace(trace, largest_saved=saved, made_at={saved[2][0]: "model.py:7"})
        for rows, trace in profile.traces.items()
    }
    subject = subject_of(profile=replace(profile, traces=traces))
    actions = [moment.action for moment in subject.predicted.moments]
    at = actions.index("forward C3 m0")  # of h.2: the embedding is C0
    said = ask(
        tmp_path / "page.html",
        subject,
        f"""key("memory-chart", "Home");
        for (let i = 0; i < {at}; i++) key("memory-chart", "ArrowRight");
        return document.getElementById("tip").innerText;""",
    )
    assert (
        "h.2" in said
        and "its largest saved tensor: 3.00 MiB, aten.addmm in h.2.mlp: (8, 2) float32, model.py:7" in said
    )


@pytest.mark.skipif(AXE is None, reason="MEMFIT_AXE names no axe.min.js: npm pack axe-core, and unpack it")
@pytest.mark.parametrize("is_dark", [False, True])
def test_no_rule_of_axe_is_broken(tmp_path: Path, is_dark: bool) -> None:
    assert AXE is not None
    axe = f"<script>{Path(AXE).read_text(encoding='utf-8')}</script>"
    broken = ask(
        tmp_path / "page.html",
        subject_of(front=[PlanPoint(name="a plan", peak_bytes=1 << 20, seconds=1.0, note="fits")]),
        """const found = await axe.run(document, {resultTypes: ["violations"]});
        const broken = found.violations.map((v) => [v.id, v.nodes.slice(0, 3).map((n) => n.html + n.failureSummary)]);
        return [document.documentElement.dataset.theme, broken, found.passes.length];""",
        beside=axe,
        is_dark=is_dark,
    )
    assert broken[0] == ("dark" if is_dark else "light")
    assert broken[1] == []
    assert broken[2] > 20
