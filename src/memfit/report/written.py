"""Files of reports.

In: text. Out: the file, or an error in words.
"""

from __future__ import annotations

from pathlib import Path

from memfit.core.errors import UsageError


def write_report(path: str | Path, text: str) -> None:
    """Writes a file of a report, in the place of an older one.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name another file") from error
