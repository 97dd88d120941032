"""Building the late device: a machine without a compiler is told so, and its tests are skipped with these words."""

from __future__ import annotations

import pytest

from accelerator import build


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    with pytest.raises(ImportError, match=r"none was found: install g\+\+"):
        build.built()
