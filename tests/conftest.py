"""What every test stands on: settings before torch is imported, hypothesis' profile, markers, equal random numbers."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

# Read by the libraries when they are loaded, so before any test module: idle OpenMP threads sleep instead of spinning
# on cores that other workers need, and no test may reach for a model hub.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What `memfit probe` once measured for the person at this machine prices no plan of a test.
os.environ["MEMFIT_HARDWARE_CACHE"] = os.devnull
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

DEFAULT_EXAMPLES = 25
LATE_DEVICE = tuple(Path(__file__).parent / name for name in ("accelerator", "device"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memfit")
    group.addoption(
        "--examples",
        type=int,
        default=None,
        help=f"random examples a property test draws (default {DEFAULT_EXAMPLES}, always the same ones; "
        "a number given here draws fresh ones)",
    )
    group.addoption(
        "--device", choices=["late", "cuda"], help="accelerator of tests/device (default: CUDA where it is)"
    )
    group.addoption(
        "--lateness",
        default="latest",
        help="when the late device runs what streams hold: latest (as late as it may), prompt, or random:SEED",
    )
    group.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    examples: int | None = config.getoption("--examples")
    settings.register_profile(
        "memfit",
        max_examples=DEFAULT_EXAMPLES if examples is None else examples,
        # The default suite must not fail on one run and pass on the next; a search that is asked for shall search.
        derandomize=examples is None,
        # Wall-clock time says nothing on a busy machine.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=True,
    )
    settings.load_profile("memfit")


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name)


def _skips_without_a_compiler(error: BaseException) -> None:
    """On a machine without a C++ compiler, tests that need memfit's own allocator cannot be run: theirs is the error that says so, here or in a child."""
    if _has_compiler():
        return
    seen: BaseException | None = error
    while seen is not None:
        if "no C++ compiler" in str(seen):
            pytest.skip("needs a C++ compiler: memfit's own allocator is built by one")
        seen = seen.__cause__ or seen.__context__


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        _skips_without_a_compiler(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        _skips_without_a_compiler(error)
        raise


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the late device's tests unless they are asked for by name: it is registered with torch for good in a process."""
    is_asked = any(
        Path(argument.split("::")[0]).resolve().is_relative_to(folder)
        for argument in config.args
        for folder in LATE_DEVICE
    )
    return True if collection_path in LATE_DEVICE and not is_asked else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without the collector of cycles, which goes through half a million objects that all stay for a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _mark_what_is_thinned_out(items: Iterable[pytest.Item]) -> None:
    """Marks as slow the cases of `thinned` tests whose values of each parameter come in other cases, too, as often as the mark says.

    The next case taken is the one with most new values, so that n x m cases become about the larger of n and m.
    """
    grids = defaultdict[str, list[tuple[pytest.Function, frozenset[tuple[str, object]]]]](list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("thinned")
            and not item.get_closest_marker("slow")
        ):
            values = frozenset((name, _value(value)) for name, value in item.callspec.params.items())
            grids[item.nodeid.partition("[")[0]].append((item, values))
    for cases in grids.values():
        (times,) = next(cases[0][0].iter_markers("thinned")).args or (1,)
        for _ in range(times):
            wanted = set[tuple[str, object]]().union(*(values for _, values in cases))
            while wanted:
                best = max(range(len(cases)), key=lambda index: (len(cases[index][1] & wanted), -index))
                wanted -= cases.pop(best)[1]
        for item, _ in cases:
            item.add_marker("slow")


def _value(value: object) -> object:
    """Stands for a parameter's value where values are compared."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_what_is_thinned_out(items)
    skip_slow = pytest.mark.skip(reason="slow: run with --slow")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    cuda_is_there: bool | None = None
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if item.get_closest_marker("gpu"):
            if cuda_is_there is None:
                import torch

                cuda_is_there = torch.cuda.is_available()
            if not cuda_is_there:
                item.add_marker(skip_gpu)


@pytest.fixture(autouse=True)
def equal_random_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it in the same process."""
    torch = sys.modules.get("torch")  # torch-free tests do not pay for its import
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def exact_counts() -> None:
    """Tensors are counted by memfit's own allocator; without a compiler the test is skipped, for the fallback measures the whole process."""
    from memfit.devices.binding import install

    install()


@pytest.fixture(scope="session")
def a_compiler() -> None:
    """For what is advised, or set, otherwise where there is none."""
    if not _has_compiler():
        pytest.skip("needs a C++ compiler: other settings are right without one")


@pytest.fixture(scope="module")
def older_objects_are_passed_over() -> Iterator[None]:
    """Leaves what was there before a file's tests out of collections: half a million objects of libraries made each last a third of a second.

    For files that collect often. Not for those that look for objects through the collector, which frozen ones hide from.
    """
    from memfit.trace import standins

    gc.collect()
    standins._cached_functions(len(sys.modules))  # looks through all objects, so before they are hidden
    gc.freeze()
    yield
    gc.unfreeze()
    standins._cached_functions.cache_clear()
