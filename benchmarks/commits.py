"""What a commit costs: a streamed "step" (read all, write all) on a store without promises, and with them, in turn, in one run.

    .venv/bin/python benchmarks/commits.py                        # 512 MiB of blocks, 8 rounds, about two minutes
    .venv/bin/python benchmarks/commits.py --mib 128 --rounds 3

bare        no checksums, no syncs: a working home
sums        checksums of what is written, no syncs
visits      the same, and every read compared
committed   checksums, a small state, and a durable commit at the end of each step
every 4     the same, committed every fourth step
journal     one slot a block: gradients (a third of a block, as with AdamW) made durable, blocks moved through the spare room, committed

Printed: medians over the rounds, seconds a step and the ratio to "bare" within the same round; what a commit takes alone; how fast
`verify` reads; how fast memory is summed by one thread; and what a journal takes beyond the time that its further bytes would take at the speed of "bare".
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import common
from memfit.core.limits import KIB, MIB
from memfit.store import CommittedStore, DiskIO, DiskStore, DiskTransfer, Memory, RegionSpec, aligned_memory, verify
from memfit.store.checksums import PIECE_BYTES, checksum
from memfit.store.journal import RECORD, Journal, record_region

BLOCK_BYTES = 16 * MIB
GRADIENT_BYTES = BLOCK_BYTES // 3 // PIECE_BYTES * PIECE_BYTES
STATE = {"step": 0, "random": bytes(5056), "groups": [{"lr": 1e-3}] * 2}


def transfer(store: DiskStore, memory: Memory) -> list[str]:
    """Each block is read whole and written whole at once; the first time it is only filled. The blocks with a new version."""
    names, flips = list(store.regions), []
    for name in names:
        region = store.region(name)
        is_first = region.step is None
        transfers = [] if is_first else [region.read(0, BLOCK_BYTES, memory)]
        transfers.append(
            region.write(
                0, BLOCK_BYTES, memory.narrow(BLOCK_BYTES, BLOCK_BYTES), slot="current" if is_first else "spare"
            )
        )
        for transfer in transfers:
            transfer.wait()
        flips += [] if is_first else [name]
    return flips


def step_of(store: DiskStore, memory: Memory) -> Callable[[int], float]:
    def run(step: int) -> float:
        began = time.perf_counter()
        store.commit(step, transfer(store, memory))
        return time.perf_counter() - began

    return run


def step_of_committed(store: CommittedStore, memory: Memory, commits: list[float]) -> Callable[[int], float]:
    def run(step: int) -> float:
        began = time.perf_counter()
        store.end_step(step, transfer(store.disk, memory))
        sealing = time.perf_counter()
        if store.commit({**STATE, "step": step}):
            commits.append(time.perf_counter() - sealing)
        return time.perf_counter() - began

    return run


def journaled(place: Path, names: list[str], io: DiskIO) -> CommittedStore:
    specs = {name: RegionSpec(nbytes=BLOCK_BYTES, slots=2) for name in names}
    specs |= {f"{name}/gradient": RegionSpec(nbytes=GRADIENT_BYTES) for name in names}
    return CommittedStore.create(
        place, {**specs, RECORD: record_region(64 * KIB)}, identity={}, units=[[name] for name in names], io=io
    )


def wait_for(transfers: Iterable[DiskTransfer]) -> None:
    for transfer in list(transfers):
        transfer.wait()


def step_of_journaled(
    store: CommittedStore, names: list[str], memory: Memory, commits: list[float]
) -> Callable[[int], float]:
    journal = Journal(store.disk, {name: [name] for name in names}, [f"{name}/gradient" for name in names])
    old, new, third = memory, memory.narrow(BLOCK_BYTES, BLOCK_BYTES), aligned_memory(GRADIENT_BYTES)

    def run(step: int) -> float:
        began = time.perf_counter()
        if store.step is None:
            for name in names:
                store.region(name).write(0, BLOCK_BYTES, new, slot="current").wait()
        else:
            journal.begin_step()
            gradients = [store.region(f"{name}/gradient") for name in names]
            wait_for(gradient.write(0, GRADIENT_BYTES, new, slot="current") for gradient in gradients)
            deciding = time.perf_counter()
            journal.begin(step, STATE)
            waited = time.perf_counter() - deciding
            for blocks in journal.turns():
                for name in blocks:
                    gradient, region = store.region(f"{name}/gradient"), store.region(name)
                    wait_for(
                        (
                            gradient.read(0, GRADIENT_BYTES, third),
                            region.read(0, BLOCK_BYTES, old),
                            region.write(0, BLOCK_BYTES, new),
                        )
                    )
                moving = time.perf_counter()
                journal.moved(blocks, STATE)
                waited += time.perf_counter() - moving
            commits.append(waited)
        store.end_step(step)
        store.commit({**STATE, "step": step})
        return time.perf_counter() - began

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    specs = {f"h.{n}": RegionSpec(nbytes=BLOCK_BYTES, slots=2) for n in range(options.mib * MIB // BLOCK_BYTES)}
    memory, commits, moves = aligned_memory(2 * BLOCK_BYTES), list[float](), list[float]()
    memory.view()[:] = os.urandom(2 * BLOCK_BYTES)
    print(common.machine())
    with tempfile.TemporaryDirectory(dir=options.directory) as where, DiskIO() as io:
        place = Path(where)
        plain = {"identity": {}, "durable": False, "io": io}
        bare = DiskStore.create(place / "bare", specs, **plain)
        sums = DiskStore.create(place / "sums", specs, piece_bytes=PIECE_BYTES, **plain)
        visits = DiskStore.create(place / "visits", specs, piece_bytes=PIECE_BYTES, verifies=True, **plain)
        committed = CommittedStore.create(place / "committed", specs, identity={}, io=io)
        fourth = CommittedStore.create(place / "fourth", specs, identity={}, io=io, durability=4)
        journal = journaled(place / "journal", list(specs), io)
        steps = {
            "bare": step_of(bare, memory),
            "sums": step_of(sums, memory),
            "visits": step_of(visits, memory),
            "committed": step_of_committed(committed, memory, commits),
            "every 4": step_of_committed(fourth, memory, []),
            "journal": step_of_journaled(journal, list(specs), memory, moves),
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for round_number in range(options.rounds + 1):
            for name, run in steps.items():
                taken = run(round_number)
                if round_number:  # The first fills, and reads nothing.
                    seconds[name].append(taken)
        rows = [
            (
                name,
                f"{statistics.median(found):.3f}",
                f"{statistics.median(a / b for a, b in zip(found, seconds['bare'], strict=True)):.3f}",
            )
            for name, found in seconds.items()
        ]
        print(common.table(("store", "s/step", "to bare"), rows))
        more = 1 + GRADIENT_BYTES / BLOCK_BYTES
        ratios = [a / b / more for a, b in zip(seconds["journal"], seconds["bare"], strict=True)]
        low, found, high = statistics.quantiles(ratios, n=4)
        print(
            f"journal: moves {more:.2f} times the bytes of bare, and takes {found:.3f} ({low:.3f} to {high:.3f}) times what these would; "
            f"all its commits of a step but the seal: median {statistics.median(moves) * 1e3:.1f} ms"
        )
        print(f"a commit alone: median {statistics.median(commits) * 1e3:.1f} ms, most {max(commits) * 1e3:.1f} ms")
        manifest_bytes = (place / "committed" / "manifest.json").stat().st_size
        print(f"manifest: {manifest_bytes} bytes for {len(specs)} blocks, {options.mib * MIB // PIECE_BYTES} pieces")
        for store in (bare, sums, visits, committed, fourth, journal):
            store.close()
        began = time.perf_counter()
        report = verify(place / "committed")
        assert report.is_whole
        print(f"verify: {report.checked_bytes / (time.perf_counter() - began) / 1e9:.2f} GB/s")
    for what, function in (("crc32c", checksum), ("zlib.crc32", zlib.crc32)):
        began = time.perf_counter()
        for start in range(0, memory.nbytes, MIB):
            function(memory.view()[start : start + MIB])
        print(f"{what}: {memory.nbytes / (time.perf_counter() - began) / 1e9:.1f} GB/s, one thread")


if __name__ == "__main__":
    main()
