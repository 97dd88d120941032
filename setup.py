"""What `pyproject.toml` cannot say: a wheel may carry the compiled allocator.

With MEMFIT_PREBUILD=1 in the environment (`make wheel`) the allocator is compiled for the torch that
is installed, and the wheel is one for this machine's kind; else the wheel is pure Python, and the
first `fit` compiles.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

PREBUILDS = os.environ.get("MEMFIT_PREBUILD") == "1"


class BuildWithAllocator(build_py):
    """Puts the compiled allocator beside its source in what is built."""

    def run(self) -> None:
        """See setuptools."""
        super().run()
        if PREBUILDS:
            sys.path.insert(0, str(Path(__file__).parent / "src"))
            from memfit.devices.compiling import prebuild

            made = prebuild(Path(self.build_lib) / "memfit" / "devices" / "prebuilt")
            print(f"compiled {made.name}")  # noqa: T201


class ProjectWithAllocator(Distribution):
    """The project, as one with compiled code in it where it has some."""

    def has_ext_modules(self) -> bool:
        """See setuptools."""
        return PREBUILDS


class WheelForThisMachine(bdist_wheel):
    """A wheel with compiled code in it is for one kind of machine, and any Python 3."""

    def get_tag(self) -> Any:
        """See setuptools."""
        found = super().get_tag()
        return ("py3", "none", found[2]) if PREBUILDS else found


setup(distclass=ProjectWithAllocator, cmdclass={"build_py": BuildWithAllocator, "bdist_wheel": WheelForThisMachine})
