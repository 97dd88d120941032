"""Builds the late device once per torch, source and compiler, into a cache in the user's home."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import include_paths, library_paths

_NATIVE = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=late_native")


class NoCompilerError(ImportError):
    """No C++ compiler is at hand."""


def load() -> ModuleType:
    """Builds (35 to 60 s of one core, the first time) and loads the native module.

    Raises:
        NoCompilerError: Neither `$CXX` nor g++ nor clang++ is there.
        RuntimeError: The compiler refused the source; its last lines are in the message.
    """
    if "late_native" in sys.modules:
        return sys.modules["late_native"]
    path = built()
    spec = importlib.util.spec_from_file_location("late_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["late_native"] = module
    return module


def built() -> Path:
    """The path of the built module."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompilerError(
            "the late device is built by a C++ compiler, and none was found: install g++ (Debian and Ubuntu: apt install g++)"
        )
    sources = sorted(_NATIVE.iterdir())
    key = hashlib.sha256()
    for part in (torch.__version__, sys.version, compiler, *_FLAGS):
        key.update(part.encode())
    for source in sources:
        key.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit-tests"
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"late-{key.hexdigest()[:16]}.so"
    # Workers of one run start together, and one build is enough.
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    headers = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # Built beside and moved: whoever is killed leaves no half a file.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [
            compiler,
            *_FLAGS,
            abi,
            *headers,
            str(_NATIVE / "module.cpp"),
            "-o",
            str(made),
            *libraries,
            "-lc10",
            "-ltorch_cpu",
            "-ltorch",
            "-ltorch_python",
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError("the late device does not compile:\n" + "\n".join(result.stderr.splitlines()[:60]))
        made.replace(target)
