"""Which files hold a model's weights.

In: a directory. Out: names of the safetensors files in it, from `model.safetensors.index.json` where there is one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.runtime.export.files import INDEX_NAME

_LIMIT_BYTES = 100_000_000


def weight_file_names(source: Path, known: re.Pattern[str]) -> list[str]:
    """File names, sorted; one `model.safetensors` where there is no index.

    Args:
        source: the directory.
        known: what a file of weights may be called.

    Raises:
        StoreError: the index is none, or names other files.
    """
    index = source / INDEX_NAME
    if not index.exists():
        return ["model.safetensors"]
    try:
        if index.stat().st_size > _LIMIT_BYTES:
            raise StoreError(f"{index} is too large to be an index of weights; take another save")  # noqa: TRY301
        document = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(document["weight_map"].values()))
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{index} is no index of weights ({type(error).__name__}: {error}); take another save"
        ) from error
    for name in names:
        # A name with directories in it would read files from elsewhere.
        if not isinstance(name, str) or Path(name).name != name or not known.fullmatch(name):
            raise StoreError(f"{index} names the file {str(name)[:80]!r}, which is none of a save; take another save")
    return names
