"""Each test of this folder runs on the late device, where every access is checked, and on CUDA, where there is one.

One process has one accelerator: the late device is left out where CUDA is there, unless `--device late` asks for it.
`--lateness prompt` or `--lateness random:SEED` runs its streams' work at other times than as late as it may be.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accelerator.build import NoCompilerError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--device")
        kind = wanted or ("cuda" if torch.cuda.is_available() else "late")
        metafunc.parametrize("device", [kind], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        yield torch.device("cuda", torch.cuda.current_device())
        return
    late = pytest.importorskip(
        "accelerator.late", reason="the late device needs a C++ compiler", exc_type=NoCompilerError
    )
    torch.accelerator.empty_cache()
    is_latest = request.node.get_closest_marker("latest") is not None
    wanted = "latest" if is_latest else str(request.config.getoption("--lateness"))
    mode, _, seed = wanted.partition(":")
    with late.lateness(mode, int(seed or 0)), late.checked():
        yield torch.device("late", 0)
    # A limit that a job left behind would fail whatever comes after it.
    assert [late.native.limit_bytes(index) for index in range(2)] == [late.native.total_bytes()] * 2
