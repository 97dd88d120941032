"""What a stranger installs: a wheel with the allocator in it, a machine without a compiler, systems that are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import memfit
from memfit.core.errors import check_platform
from memfit.core.version import VERSION
from memfit.devices import compiling

ROOT = Path(__file__).parents[2]
HAS_COMPILER = any(shutil.which(name) for name in ("g++", "c++", "clang++"))


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == VERSION == memfit.__version__ == "0.1.0"


@pytest.mark.parametrize(
    ("platform", "words"), [("darwin", "this is macOS"), ("win32", "WSL 2"), ("freebsd14", "'freebsd14'")]
)
def test_other_systems_are_refused_with_where_to_go(platform: str, words: str) -> None:
    with pytest.raises(memfit.PlatformError, match="Linux only") as refused:
        check_platform(platform)
    assert words in str(refused.value)
    assert isinstance(refused.value, ImportError)
    check_platform("linux")


def test_import_itself_refuses_another_system() -> None:
    program = "import sys\nsys.platform = 'darwin'\nimport memfit"
    # Without site-packages: neither torch is imported, nor an installed memfit found.
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1])}
    child = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert child.returncode == 1
    assert "memfit runs on Linux only, and this is macOS" in child.stderr.splitlines()[-1]


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_a_prebuilt_library_is_loaded_without_a_compiler_and_a_foreign_one_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "allocator"
    package.mkdir()
    monkeypatch.setattr(compiling, "_SOURCE", Path(shutil.copy(compiling._SOURCE, package)))
    made = compiling.prebuild(package / "prebuilt")
    assert made.name == compiling.prebuilt_name()
    assert f"torch{torch.__version__.split('+')[0]}" in made.name
    assert str(Path(torch.__file__).parent).encode() not in made.read_bytes()  # no path of the building machine
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiling.load_library()._name == str(made)
    # Elsewhere: of a path that is loaded already, the loader gives what it has.
    other = tmp_path / "other"
    (other / "prebuilt").mkdir(parents=True)
    monkeypatch.setattr(compiling, "_SOURCE", Path(shutil.copy(package / "allocator.cpp", other)))
    (other / "prebuilt" / compiling.prebuilt_name()).write_bytes(b"of another machine")
    with pytest.raises(memfit.TierUnavailableError, match=r"no C\+\+ compiler"):
        compiling.load_library()
    assert "the allocator of the wheel cannot be used here" in caplog.text


PROGRAM = """
import sys, warnings
import torch
import memfit
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(8, 64)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with memfit.fit(model, optimizer, lambda m, b: m(b).square().mean(), batch, limit="2GiB") as job:
        job.step(batch)
        print(job.proof().line())
print(*(str(each.message) for each in told), sep="\\n")
"""


@pytest.mark.slow
def test_without_a_compiler_training_goes_on_and_says_what_is_lost(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "not-there", "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    proof, warning = child.stdout.splitlines()
    assert proof.startswith("proof: predicted peak")
    for words in ("has no allocator of memfit's", "off by up to 65 MB", "Install g++"):
        assert words in warning


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_a_wheel_carries_the_allocator_the_starters_and_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".hypothesis"),
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=source, env={**os.environ, "MEMFIT_PREBUILD": "1"}, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("memfit-0.1.0-py3-none-linux_*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert f"memfit/devices/prebuilt/{compiling.prebuilt_name()}" in names
    for name in (
        "cli/starters/text.txt",
        "report/page/page.js",
        "runs/__init__.py",
        "py.typed",
        "devices/allocator.cpp",
    ):
        assert f"memfit/{name}" in names
