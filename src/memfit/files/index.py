"""Which files hold a model's weights.

In: a directory. Out: names of the files of weights in it, from `model.safetensors.index.json` (or
`pytorch_model.bin.index.json`) where there is one.
"""

from __future__ import annotations

import re
from pathlib import Path

from memfit.core.documents import ROOM_BYTES, parse_json, read_document
from memfit.core.errors import StoreError

_LIMIT_BYTES = 100_000_000


def weight_file_names(source: Path, known: re.Pattern[str], *, single: str = "model.safetensors") -> list[str]:
    """File names, sorted; the one of all weights where there is no index.

    Args:
        source: the directory.
        known: what a file of weights may be called.
        single: the one of all weights; its index is called after it.

    Raises:
        StoreError: the index is invalid, or names other files.
    """
    index = source / f"{single}.index.json"
    if not index.exists() and not index.is_symlink():
        return [single]
    try:
        content = read_document(index, limit_bytes=_LIMIT_BYTES)
        weights_bytes = sum(path.lstat().st_size for path in source.iterdir() if known.fullmatch(path.name))
        document = parse_json(content, room_bytes=ROOM_BYTES + weights_bytes)
        names = sorted(set(document["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{index} is no index of weights ({type(error).__name__}: {str(error)[:200]}); take another save"
        ) from error
    for name in names:
        # A name with directories in it would read files from elsewhere.
        if not isinstance(name, str) or Path(name).name != name or not known.fullmatch(name):
            raise StoreError(f"{index} names the file {str(name)[:80]!r}, which no save has; take another save")
    return names
