"""Docstrings, comments and messages in the register of PyTorch's documentation: first words, private words, columns."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from sizes import docstrings

SOURCE = Path(__file__).parents[1] / "src" / "memfit"

MOST_COLUMNS = 100
FIRST_WORDS = frozenset({"What", "Of", "Whether", "They"})
"""No docstring begins with one of these: the first word is a verb, or a noun that names the thing."""

# Words of our own that hid the field's, and the field's. In names, docstrings, comments and messages.
PRIVATE_WORDS = {
    r"parcels?": "offloaded storage",
    r"slopes?": "gradient of the logits",
    r"births?|born|unborn": "deferred initialization, deferred",
    r"fates?": "policy",
    r"forgetful": "no-op (KV cache)",
    r"tickets?": "transfer handle",
    r"seal(?:s|ed|ing)?": "commit",
    r"settl(?:e|es|ed|ing)": "wait",
    r"amend(?:s|ed|ing)?": "write",
    r"glue": "code between calls",
    r"rungs?|ladders?": "Pareto point, Pareto front",
    r"cens(?:us|uses)": "leak report",
    r"(?:is|are|was|were) (?-i:none)(?<!there is none)(?<!there are none)(?<!there was none)": "invalid, or say what it is",
}
_PRIVATE = re.compile(rf"\b(?:{'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)

KEPT = {
    "verification/__init__.py: census": "the public name: job.census()",
    "machine/leak_report.py: census": "the public name: job.census()",
    "job/job_facts.py: census": "the public name: job.census()",
    "job/step_runner.py: census": "the public name: job.census()",
    "trace/measuring.py: slope": "of a straight line through measurements",
}
"""File and word, as "file: word" -> why the word stays there: a key on disk, a term of the field."""


def words_of(token: tokenize.TokenInfo) -> str:
    """Returns a token's text; the words of a name apart."""
    if token.type == tokenize.NAME:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", token.string.replace("_", " "))
    return token.string if token.type in {tokenize.STRING, tokenize.COMMENT, _MIDDLE} else ""


_PRAGMA = re.compile(r"noqa|type: ignore|pyright: ignore")
_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", -1)


def find_faults(path: Path, name: str) -> Iterator[str]:
    """Yields what is against the rules in a file, with the line."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    prose: set[int] = set()
    for constant in docstrings(ast.parse(text)):
        assert isinstance(constant.value, str)
        prose.update(range(constant.lineno, (constant.end_lineno or constant.lineno) + 1))
        first = re.match(r"\W*(\w+)", constant.value)
        if first is not None and first.group(1) in FIRST_WORDS:
            yield f"{name}:{constant.lineno}: begins with {first.group(1)!r}: {constant.value.strip()[:60]}"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            prose.add(token.start[0])
        for found in _PRIVATE.finditer(" ".join(words_of(token).split())):
            if f"{name}: {found.group().lower()}" not in KEPT:
                yield f"{name}:{token.start[0]}: {found.group()!r} in {token.string.strip()[:60]!r}"
    for number in sorted(prose):
        line = lines[number - 1]
        if (
            len(line) > MOST_COLUMNS
            and not line.lstrip("# ").startswith("|")
            and "://" not in line
            and not _PRAGMA.search(line)
        ):
            yield f"{name}:{number}: {len(line)} columns of prose"


def rooms() -> list[str]:
    """Names of the rooms, and of the files beside them."""
    return sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py")


@pytest.mark.parametrize("room", rooms())
def test_a_room_is_written_in_plain_english(room: str) -> None:
    path = SOURCE / room
    faults = [
        fault
        for path in ([path] if path.is_file() else sorted(path.rglob("*.py")))
        for fault in find_faults(path, path.relative_to(SOURCE).as_posix())
    ]
    assert faults == []


def test_the_checker_finds_planted_faults(tmp_path: Path) -> None:
    planted = f'''"""What a module is."""
x = 1  # {"c" * 100}
class SomeParcel:
    """Of two."""
def settle_it(value):
    """Waits; None if there is none.

    {"d" * 100}
    """
    raise ValueError("a number that is none")
'''
    path = tmp_path / "planted.py"
    path.write_text(planted, encoding="utf-8")
    found = [fault.removeprefix("planted.py:").split(" in ")[0] for fault in find_faults(path, "planted.py")]
    assert found == [
        "1: begins with 'What': What a module is.",
        "4: begins with 'Of': Of two.",
        "3: 'Parcel'",
        "5: 'settle'",
        "10: 'is none'",
        "2: 109 columns of prose",
        "8: 104 columns of prose",
    ]


HAZARDOUS = (
    "devices/accelerator.py",
    "devices/binding.py",
    "devices/cuda.py",
    "devices/fallback.py",
    "devices/kernel.py",
    "engine/backward.py",
    "engine/coroutines.py",
    "engine/engine.py",
    "engine/entered_calls.py",
    "engine/housing.py",
    "engine/modules.py",
    "engine/offload.py",
    "engine/run.py",
    "engine/streaming.py",
    "engine/tail.py",
    "engine/update_phase.py",
    "engine/work.py",
    "homes/disk.py",
    "homes/gradients.py",
    "homes/home.py",
    "homes/memory.py",
    "homes/offloaded.py",
    "homes/staging.py",
    "homes/update_pieces.py",
    "homes/updates.py",
    "homes/weights.py",
    "store/io.py",
    "store/transfer.py",
)
"""Files in which threads, freed memory or an order matter at many lines."""


@pytest.mark.parametrize("name", HAZARDOUS)
def test_hazards_stand_beside_the_line(name: str) -> None:
    tokens = list(tokenize.generate_tokens(io.StringIO((SOURCE / name).read_text(encoding="utf-8")).readline))
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
    prose = {n for c in docstrings(tree) for n in range(c.lineno, (c.end_lineno or c.lineno) + 1)}
    code = {token.start[0] for token in tokens if token.string.strip()} - comments - prose
    assert len(comments) >= 0.08 * len(code)
