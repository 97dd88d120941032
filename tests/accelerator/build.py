"""Builds the late device once per torch, source and compiler, into a cache in the user's home."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import stat
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


class BuildError(RuntimeError):
    """The module was not built, or what was built cannot be loaded."""


def load() -> ModuleType:
    """Builds (35 to 60 s of one core, the first time) and loads the native module; one that is damaged is built again.

    Raises:
        NoCompilerError: Neither `$CXX` nor g++ nor clang++ is there.
        BuildError: The compiler refused the source (its first lines are in the message), or the module does not load.
    """
    if "late_native" in sys.modules:
        return sys.modules["late_native"]
    try:
        return _loaded(built())
    except ImportError as error:
        if isinstance(error, NoCompilerError):
            raise
    # Not an ImportError: tests of the device are skipped for want of a compiler, and for nothing else.
    path = built(again=True)
    try:
        return _loaded(path)
    except ImportError as error:
        raise BuildError(f"the late device was built and does not load: {error}") from error


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("late_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["late_native"] = module
    return module


def built(*, again: bool = False) -> Path:
    """The path of the built module, in the cache, or where that cannot be written in a directory of this user's for temporary files.

    Args:
        again: The one that is there is not to be used.

    Raises:
        NoCompilerError: See `load`.
        BuildError: See `load`; or neither directory can be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompilerError(
            "the late device is built by a C++ compiler, and none was found: install g++ (Debian and Ubuntu: apt install g++)"
        )
    name = f"late-{_key(compiler)}.so"
    roots = _roots()
    if not again:
        for root in roots:
            if _is_own(root) and (root / name).exists():
                return root / name
    for root in roots:
        try:
            _prepare(root)
            lock = (root / name).with_suffix(".lock").open("w")
        except OSError:
            continue  # the next one, or the error below
        # Workers of one run start together, and one build is enough. Whoever is killed lets the lock go.
        with lock:
            began = _stamp(root / name)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if again and began == _stamp(root / name):
                (root / name).unlink(missing_ok=True)
            if not (root / name).exists():
                _compile(compiler, root / name)
        return root / name
    raise BuildError(f"the late device cannot be built: {' and '.join(map(str, roots))} cannot be written")


def _key(compiler: str) -> str:
    key = hashlib.sha256()
    for part in (torch.__version__, sys.version, compiler, *_FLAGS):
        key.update(part.encode())
    for source in sorted(_NATIVE.iterdir()):
        key.update(source.read_bytes())
    return key.hexdigest()[:16]


def _roots() -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit-tests"
    return [cache, Path(tempfile.gettempdir()) / f"memfit-tests-{os.getuid()}"]


def _prepare(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_own(root):
        raise PermissionError(f"{root} belongs to others, or they can write it")


def _is_own(root: Path) -> bool:
    """Nobody else can write the directory: code is loaded from it."""
    try:
        status = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _compile(compiler: str, target: Path) -> None:
    headers = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # Built beside and moved: whoever is killed leaves no half a module, but what it was building, which goes now (the lock is ours).
    prefix = f"{target.stem}-building-"
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
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
            raise BuildError("the late device does not compile:\n" + "\n".join(result.stderr.splitlines()[:60]))
        made.replace(target)
