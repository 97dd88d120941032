"""Lines of the program that operations come from.

In: Python's stack, as an operation is watched. Out: "folder/file.py:line" of the innermost frame
that is neither torch's, nor memfit's, nor the standard library's: of a model of transformers its
modeling file, of a model of the user's own the user's.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

_MEMFIT = Path(__file__).parents[1]
_PASSED_OVER = (_MEMFIT, Path(torch.__file__).parent, Path(os.__file__).parent)
# They are models like any user's, and packages lie inside the standard library's folder.
_PROGRAMS = (_MEMFIT / "recipes",)
_PACKAGES = ("site-packages", "dist-packages")


def calling_line() -> str:
    """Returns the line of the program that runs; "" where there is none on this stack."""
    frame = sys._getframe(1)
    while frame is not None:
        shown = _shown(frame.f_code.co_filename)
        if shown:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def _shown(file: str) -> str:
    """Returns the file as it is shown; "" of one that is passed over."""
    path = Path(file)
    if file.startswith("<") or not path.name:
        return ""
    is_package = any(part in _PACKAGES for part in path.parts)
    if not any(path.is_relative_to(folder) for folder in _PROGRAMS):
        for folder in _PASSED_OVER:
            is_standard = folder is _PASSED_OVER[-1]
            if path.is_relative_to(folder) and not (is_standard and is_package):
                return ""
    return "/".join(path.parts[-2:])
