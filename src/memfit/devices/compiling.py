"""Compiles `allocator.cpp` once for this source, torch and set of flags, and finds it again
afterwards.

In: a library that came with the wheel, or the system's C++ compiler and torch's c10 headers. Out:
the loaded library. What is compiled lies in the user's cache
(`$XDG_CACHE_HOME/memfit/allocator/<hash>/`), written to a temporary name and renamed, so that
processes which build at once both end with a whole file. Code is loaded only from the package
itself, and from directories and files that this user owns and nobody else may write.

[Note: prebuilt]
c10's classes are torch's own business: their layout may change with each version. A wheel carries
libraries for the versions of torch that it was built for (`make wheel`), by name; with any other
version it is compiled, and where there is no compiler the `FallbackAllocator` measures.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

from memfit.core.errors import LOG, TierUnavailableError

INTERFACE = 3  # memfit_interface() in allocator.cpp: raised together whenever a C function changes

_SOURCE = Path(__file__).with_name("allocator.cpp")
_LIBRARY_NAME = "memfit_allocator.so"
_BUILD_TIMEOUT_S = 300


def load_library() -> ctypes.CDLL:
    """Loads the compiled allocator: the wheel's, the cache's, or a new one.

    Compiling takes about 2 seconds and 0.3 GB.

    Returns:
        The library, with its interface version checked; it is not yet under torch.

    Raises:
        TierUnavailableError: no compiler, a failed build, or a library that cannot be loaded.
    """
    prebuilt = _SOURCE.parent / "prebuilt" / prebuilt_name()
    if prebuilt.is_file():
        try:
            return _open(prebuilt)
        except TierUnavailableError as unusable:
            # Of a newer C library, say.
            LOG.warning("the allocator of the wheel cannot be used here, another one is built: %s", unusable)
    directory = _cache_directory()
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="memfit-allocator-") as private:
            return _open(_build(Path(private)))  # the mapping outlives the file
    library = directory / _LIBRARY_NAME
    if _is_ours(library, stat.S_ISREG):
        try:
            return _open(library)
        except TierUnavailableError as damaged:
            LOG.warning("building the allocator again: %s", damaged)
    return _open(_build(directory))


def prebuilt_name() -> str:
    """Returns the file name of a prebuilt library for this source, torch and machine. See [Note:
    prebuilt].
    """
    source = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    # Builds for CPUs and for CUDA ("+cpu", "+cu130") have the same c10.
    version = torch.__version__.partition("+")[0]
    abi = "cxx11" if torch.compiled_with_cxx11_abi() else "old"
    return f"memfit_allocator-{source}-torch{version}-{abi}-{platform.machine()}.so"


def prebuild(directory: Path) -> Path:
    """Compiles the library into a directory, under the name that a wheel has it by.

    Raises:
        TierUnavailableError: no compiler, or a failed build.
    """
    directory.mkdir(parents=True, exist_ok=True)
    made = _build(directory, has_rpath=False)
    made.chmod(0o755)
    return made.replace(directory / prebuilt_name())


def find_compiler() -> str:
    """The C++ compiler: `$CXX` if set, else g++, c++ or clang++ on the PATH.

    Raises:
        TierUnavailableError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return found
    raise TierUnavailableError(
        f"no C++ compiler ({'CXX=' + wanted if wanted else 'g++, c++ or clang++'}) was found, so the CPU allocator "
        "cannot be built; install one, or use memfit.allocator.FallbackAllocator, which is less exact"
    )


def _flags(*, has_rpath: bool = True) -> list[str]:
    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        "-std=c++20", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(root / "include"),
        f"-L{root / 'lib'}", *([f"-Wl,-rpath,{root / 'lib'}"] if has_rpath else []),
    ]  # fmt: skip


def _key() -> str:
    parts = [_SOURCE.read_text("utf-8"), torch.__version__, platform.machine(), *_flags()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cache_directory() -> Path | None:
    """The directory for this build, or None where the cache cannot be written or others could have
    written it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base
    try:
        base.mkdir(parents=True, exist_ok=True)
        for name in ("memfit", "allocator", _key()):
            directory = directory / name
            directory.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(directory, stat.S_ISDIR):
                LOG.warning("%s belongs to or can be written by others; building the allocator privately", directory)
                return None
    except OSError as error:
        LOG.warning("cannot use %s (%s); building the allocator for this process only", directory, error)
        return None
    if not os.access(directory, os.W_OK | os.X_OK):
        LOG.warning("%s cannot be written; building the allocator for this process only", directory)
        return None
    return directory


def _is_ours(path: Path, is_kind: object) -> bool:
    """Tells whether `path` is of the kind, no link, owned by this user, not writable by everyone
    else.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    assert callable(is_kind)
    return (
        bool(is_kind(status.st_mode))
        and status.st_uid == os.geteuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _build(directory: Path, *, has_rpath: bool = True) -> Path:
    """Compiles into `directory` under a temporary name, then renames.

    Of several builders the last wins.

    Args:
        directory: of the library.
        has_rpath: torch's directory on this machine is written into it; torch is loaded before it
            in any case.
    """
    compiler = find_compiler()
    handle, name = tempfile.mkstemp(prefix="building-", suffix=".so", dir=directory)
    os.close(handle)
    command = [compiler, *_flags(has_rpath=has_rpath), "-o", name, str(_SOURCE), "-lc10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise TierUnavailableError(f"the CPU allocator did not compile: {' '.join(command)}\n{done.stderr[-4000:]}")
        Path(name).chmod(0o700)
        library = directory / _LIBRARY_NAME
        Path(name).replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TierUnavailableError(f"the CPU allocator could not be built in {directory}: {error}") from error
    finally:
        Path(name).unlink(missing_ok=True)
    return library


def _open(library: Path) -> ctypes.CDLL:
    try:
        handle = ctypes.CDLL(str(library))
        interface = int(handle.memfit_interface())
    except (OSError, AttributeError) as error:
        raise TierUnavailableError(f"the CPU allocator {library} cannot be loaded: {error}") from error
    if interface != INTERFACE:
        raise TierUnavailableError(
            f"the CPU allocator {library} has interface {interface}, this memfit needs {INTERFACE}: delete the file"
        )
    return handle
