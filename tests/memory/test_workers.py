"""Children of the process: what they hold beside it is counted once, whoever maps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from memfit.core.errors import TierUnavailableError
from memfit.devices import procfs
from memfit.machine.meters import Family, ProcessMeter

MIB = 1 << 20

FORKS = """
import os, sys
import numpy as np
from memfit.machine import meters as family
from memfit.machine.meters import ProcessMeter

family._READING_SHARE = 0.0
meter = ProcessMeter(with_children=True)
held = np.ones(200 << 20, dtype=np.uint8)
alone = meter.resident_bytes().whole_bytes
ready, tell = os.pipe()
def child(own, nested):
    if os.fork() == 0:
        mine = np.ones(own << 20, dtype=np.uint8)
        if nested:
            child(nested, 0)
        os.write(tell, b"x")
        sys.stdin.read()
        os._exit(0)
child(10, 30)
child(20, 0)
for _ in range(3):
    os.read(ready, 1)
print(meter.resident_bytes().whole_bytes - alone, meter.peak_bytes().whole_bytes - alone, flush=True)
held[:] = 2  # now the children hold the old pages, once for all of them, and this process new ones
meter.reset_peak()
print(meter.resident_bytes().whole_bytes - alone, meter.peak_bytes().whole_bytes - alone, flush=True)
sys.stdin.read()
"""


def test_what_forked_children_share_counts_once_and_what_they_keep_of_their_own_counts() -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        before, before_peak = (int(word) / MIB for word in parent.stdout.readline().split())
        after, after_peak = (int(word) / MIB for word in parent.stdout.readline().split())
        parent.stdin.close()
    # 10 + 30 + 20 of their own; by resident sizes it would be some 700 more.
    assert 60 <= before < 90
    assert before <= before_peak < 95
    assert 260 <= after < 290
    assert after_peak >= after


LOADER = """
import sys, torch
import numpy as np
from torch import nn
import memfit
import memfit.api
from memfit.machine.machine import prepare_process

class Rows(torch.utils.data.Dataset):
    held = np.ones(150 << 20, dtype=np.uint8)
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return torch.full((64,), float(index))

if __name__ == "__main__":
    method, workers = sys.argv[1], int(sys.argv[2])
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, rows: model(rows).square().mean()
    resident = prepare_process().resident_bytes().whole_bytes
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=workers, multiprocessing_context=method)
    limit = resident + (int(sys.argv[3]) << 20)
    with memfit.fit(model, optimizer, loss, torch.ones(8, 64), limit=limit, plan=memfit.Plan()) as job:
        for _ in range(2):  # workers come and go with each epoch
            for batch in loader:
                job.step(batch)
        proof = job.proof()
        steps = [phase for phase in proof.phases if phase.name in ("first step", "steady")]
        peak = max(phase.process_peak_bytes for phase in steps)
        print(job.steps, peak - resident, proof.holds)
"""


@pytest.mark.filterwarnings("ignore")
def test_forked_workers_of_a_loader_do_not_breach_a_limit_by_pages_that_they_share(tmp_path: Path) -> None:
    steps, grown, holds = _run_loader(tmp_path, "fork", workers=3, room=160)
    assert steps == 12
    # Three workers of 8 MiB and more each; by their resident sizes it would be above 1,000.
    assert 10 * MIB < grown < 160 * MIB
    assert holds


@pytest.mark.slow
def test_spawned_workers_of_a_loader_count_by_what_each_of_them_holds(tmp_path: Path) -> None:
    steps, grown, holds = _run_loader(tmp_path, "spawn", workers=2, room=1200)
    assert steps == 12
    assert grown > 2 * 250 * MIB  # the data set in each, and an interpreter with torch
    assert holds


def _run_loader(tmp_path: Path, method: str, *, workers: int, room: int) -> tuple[int, int, bool]:
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), method, str(workers), str(room)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps, grown, holds = done.stdout.split()
    return int(steps), int(grown), holds == "True"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_child_whose_pages_may_not_be_read_counts_by_its_resident_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of another user; and its peak, which cannot be started again, is what it was."""
    others = _children()
    heard, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(heard, 1)
        os._exit(0)
    os.close(heard)
    own_share, own_reset = procfs.read_shares, procfs.reset_peak
    monkeypatch.setattr(procfs, "read_shares", lambda pid="self": own_share() if pid == "self" else None)

    def reset(pid: int | str = "self") -> None:
        if pid != "self":
            raise TierUnavailableError("not permitted")
        own_reset()

    monkeypatch.setattr(procfs, "reset_peak", reset)
    try:
        status = procfs.read_status(child)
        meter = ProcessMeter(with_children=True)
        meter.reset_peak()
        own = procfs.read_status().resident_bytes
        beside = meter.resident_bytes().whole_bytes - own
        assert beside > 0
        beside -= sum(procfs.read_status(pid).resident_bytes for pid in others)
        assert beside <= status.anonymous_bytes + status.shared_bytes + MIB
    finally:
        os.close(tell)
        os.waitpid(child, 0)


def test_shares_are_read_seldom_where_nobody_comes_or_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[int | str] = []
    read, others = procfs.read_shares, _children()

    def noted(pid: int | str = "self") -> procfs.PageShares | None:
        readings.append(pid)
        return read(pid)

    monkeypatch.setattr(procfs, "read_shares", noted)
    monkeypatch.setattr("memfit.machine.meters._READING_SHARE", 1e6)
    family = Family()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        for _ in range(20):
            assert family.beside_bytes() > 0
        child.stdin.close()
    assert sorted(map(str, readings)) == sorted(map(str, ["self", *others, child.pid]))
    assert others or family.beside_bytes() == 0


def _children() -> list[int]:
    """Processes that earlier tests left to this one: ranks, and the server that forks them."""
    return [child.pid for child in psutil.Process().children(recursive=True)]
