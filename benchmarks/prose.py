"""Words that hide the noun, in 1,000 words of docstrings, comments, messages and documents: `make prose`.

    .venv/bin/python benchmarks/prose.py

torch has 0.2 "what", 3 "one" and 5 "it" in 1,000 words of docstrings. Documents are counted without code blocks and tables of code.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sizes import SOURCE

ROOT = Path(__file__).parents[1]
MOST = {"what": 3.0, "one": 4.0, "it": 8.0}
"""Most of each in 1,000 words."""
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def texts_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) of a source file: "docstrings", "comments", "messages" (strings with a space)."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    alone = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in alone:
                yield "docstrings", node.value
            elif node.value.strip().count(" ") > 1:
                yield "messages", node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield "comments", token.string


def count(texts: list[str]) -> tuple[int, dict[str, float]]:
    """Returns the number of words, and how often each word of `MOST` stands in 1,000 of them."""
    words = [word.lower() for text in texts for word in _WORD.findall(_CODE.sub(" ", text))]
    often = Counter(words)
    return len(words), {word: 1000 * often[word] / max(len(words), 1) for word in MOST}


def measure(source: Path = SOURCE, root: Path = ROOT) -> dict[str, tuple[int, dict[str, float]]]:
    """Returns the counts by kind of text."""
    kinds: dict[str, list[str]] = {"docstrings": [], "comments": [], "messages": [], "documents": []}
    for path in sorted(source.rglob("*.py")):
        for kind, text in texts_of(path):
            kinds[kind].append(text)
    kinds["documents"] = [
        path.read_text(encoding="utf-8") for path in (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    ]
    return {kind: count(texts) for kind, texts in kinds.items()}


if __name__ == "__main__":
    counts, is_over = measure(), False
    print(f"{'':12}{'words':>9}" + "".join(f"{word:>8}" for word in MOST))
    for kind, (words, often) in counts.items():
        print(f"{kind:12}{words:9,}" + "".join(f"{value:8.1f}" for value in often.values()))
        is_over = is_over or any(value > MOST[word] for word, value in often.items())
    sys.exit(is_over)
