"""Tutorials and guides run: the Python blocks of a page, in order, as a reader would type them."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = {path.stem: path for path in [*sorted((DOCS / "tutorials").glob("*.md")), DOCS / "howtos.md"]}
SLOW = {"bigger_than_memory", "lora", "trainer"}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TUTORIALS])
def test_a_tutorial_runs_as_it_stands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = python_blocks(TUTORIALS[name].read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    for number, block in enumerate(blocks):
        # This process holds what other tests have loaded: a limit for a fresh one may be below it.
        text = re.sub(r'(limit"?[=:] ?)"1GiB"', r'\1"8GiB"', block)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Of other libraries among each other.
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft|accelerate")
            exec(compile(text, f"{name}.md, block {number + 1}", "exec"), names)


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://|mailto:|#", target):
            continue
        assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_sites_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    told = set(re.findall(r"([a-z_/]+\.md)", site))
    assert told == {page.relative_to(DOCS).as_posix() for page in pages()}


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for page in pages():
        assert (tmp_path / page.relative_to(DOCS).with_suffix("") / "index.html").exists() or page.stem == "index"
