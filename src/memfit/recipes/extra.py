"""Imports of transformers and tokenizers, which memfit's own code does not, says so in one sentence
where they are missing.
"""

from __future__ import annotations

import importlib

from memfit.core.errors import UsageError

_PACKAGES = ("tokenizers", "transformers")


def need_transformers(what: str) -> None:
    """Refuses what cannot be done without the extra.

    Args:
        what: needs it; the begin of the sentence.

    Raises:
        UsageError: `transformers` or `tokenizers` is not installed.
    """
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:
                raise  # it is there, and broken
            raise UsageError(
                f"{what} needs {error.name}, which is not installed: pip install 'memfit[transformers]'"
            ) from error
