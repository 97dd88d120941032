"""Paths as people write them.

In: a text or a `Path`, with `~` for a home. Out: a `Path` that the file system can be asked about,
or an error that says what is wrong with the name.
"""

from __future__ import annotations

import os
from pathlib import Path

from memfit.core.errors import UsageError

# Linux: NAME_MAX, and PATH_MAX without its end.
_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095


def user_path(written: str | Path) -> Path:
    """Returns a path with the home of `~` in it.

    Raises:
        UsageError: no file can have this name.
    """
    try:
        path = Path(written).expanduser()
        encoded = os.fsencode(path)
    except (RuntimeError, ValueError) as error:  # an unknown user; half of a surrogate pair
        raise UsageError(f"the path {str(written)!r:.80} cannot be used: {error}. Write it in full") from error
    if (
        b"\0" in encoded
        or len(encoded) > _LONGEST_PATH_BYTES
        or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME_BYTES
    ):
        raise UsageError(
            f"no file can be called {str(written)!r:.80}: a name has at most {_LONGEST_NAME_BYTES} bytes, a path {_LONGEST_PATH_BYTES}, and none a zero. "
            "Give a shorter path"
        )
    return path
