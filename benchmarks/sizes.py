"""Sizes of the code of memfit, by package: `make sizes`.

    .venv/bin/python benchmarks/sizes.py
    .venv/bin/python benchmarks/sizes.py --other ../old/src/memfit

Code lines are lines without blanks, comments and docstrings, as `tests/test_sizes.py` counts them; tokens are those of Python on these lines; words are those of
docstrings and comments. `docs/architecture.md` holds the table, and `tests/test_sizes.py` compares both.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "memfit"
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a package, or of all of memfit."""

    files: int
    code_lines: int
    tokens: int
    words: int
    classes: int
    dataclasses: int
    functions: int
    imports: int
    """Import statements of other packages of memfit."""

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yields all strings that stand alone: of modules, classes and functions, and under attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def code_lines(text: str, tree: ast.AST) -> Counter[int]:
    """Returns the numbers of the lines with code (no blank lines, comments or docstrings), with how many tokens begin there."""
    lines = Counter[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines[token.start[0]] += 1
            lines.update(dict.fromkeys(range(token.start[0] + 1, token.end[0] + 1), 0))
    for each in docstrings(tree):
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1):
            lines.pop(line, None)
    return lines


def sizes_of(path: Path, source: Path) -> Sizes:
    """Counts a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = code_lines(text, tree)
    comments = (
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    )
    prose = [*(str(each.value) for each in docstrings(tree)), *comments]
    package = path.relative_to(source).parts[0]
    kinds = Counter(type(node) for node in ast.walk(tree))
    made = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return Sizes(
        files=1,
        code_lines=len(lines),
        tokens=lines.total(),
        words=sum(len(_WORD.findall(each)) for each in prose),
        classes=kinds[ast.ClassDef],
        dataclasses=sum("dataclass" in ast.unparse(mark) for each in made for mark in each.decorator_list),
        functions=kinds[ast.FunctionDef] + kinds[ast.AsyncFunctionDef],
        imports=sum(
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("memfit.")
            and (node.module or "").split(".")[1] != package
            for node in ast.walk(tree)
        ),
    )


def measure(source: Path = SOURCE) -> dict[str, Sizes]:
    """Returns the sizes by package, the largest first; public modules and `__init__` together as "(top)"."""
    sizes: dict[str, Sizes] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        package = parts[0] if len(parts) > 1 else "(top)"
        here = sizes_of(path, source)
        sizes[package] = sizes[package] + here if package in sizes else here
    return dict(sorted(sizes.items(), key=lambda item: -item[1].code_lines))


def table(sizes: dict[str, Sizes]) -> str:
    """Returns the table as Markdown."""
    names = [field.name.replace("_", " ") for field in fields(Sizes)]
    first, *others = sizes.values()
    whole = functools.reduce(Sizes.__add__, others, first)
    rows = [("package", *names), tuple("---" for _ in range(len(names) + 1))]
    rows += [
        (
            f"`{package}`" if package.isidentifier() else package,
            *(f"{getattr(each, field.name):,}" for field in fields(Sizes)),
        )
        for package, each in [*sizes.items(), ("**all**", whole)]
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--other", type=Path, help="another folder `memfit` of sources, printed below")
    asked = parser.parse_args()
    print(table(measure()))
    if asked.other is not None:
        print(f"\n{asked.other}\n\n{table(measure(asked.other))}")
