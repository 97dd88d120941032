"""What the benchmarks share: models, plans, workers that step on command, disk speed at a given mix, tables.

In: nothing. Out: parts. Every configuration runs in a process of its own that steps when told to, so that several can be interleaved in one
run while each keeps its own allocator and its own peaks. Ratios are taken within a round and their median is reported, because another program on
the machine slows a whole round, not one side of it.
"""

from __future__ import annotations

import os
import shutil

# Read by OpenMP when torch loads it: idle threads sleep instead of spinning on cores that the other side of a pair needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memfit.core.plan import BlockPlan
    from memfit.core.profile import Profile
    from memfit.job.job import Job

MIB = 1 << 20


# --- one step, measured ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of one worker.

    Attributes:
        wall_s: from call to return.
        cpu_s: of all threads of the process.
        loss: of the whole batch, so that the two sides of a pair can be seen to do the same work.
        live_peak_bytes: most bytes of tensors alive; None where memfit's allocator is not under torch.
        process_peak_bytes: most that was resident since the step before ended (VmHWM).
        read, written: bytes of the disk by purpose.
    """

    wall_s: float
    cpu_s: float
    loss: float
    live_peak_bytes: int | None
    process_peak_bytes: int
    read: dict[str, int] = field(default_factory=dict[str, int])
    written: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def read_bytes(self) -> int:
        """All that was read."""
        return sum(self.read.values())

    @property
    def written_bytes(self) -> int:
        """All that was written."""
        return sum(self.written.values())


def measured(
    step: Callable[[], float], moved: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]] | None = None
) -> Step:
    """Runs one step and measures it. `step` returns the loss; `moved` gives (read, written) bytes so far."""
    from memfit.devices.binding import installed
    from memfit.machine.meters import ProcessMeter

    process, allocator = ProcessMeter(), installed()
    before = moved() if moved else ({}, {})
    # Peaks between steps belong to the next step; the job's own phases start the kernel's peak again, so it is read first.
    peak = process.peak_bytes().whole_bytes
    if allocator is not None:
        allocator.reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = moved() if moved else ({}, {})
    read, written = (
        {tag: b[tag] - a.get(tag, 0) for tag in b if b[tag] != a.get(tag, 0)}
        for a, b in zip(before, after, strict=True)
    )
    return Step(
        wall_s=wall,
        cpu_s=cpu,
        loss=loss,
        live_peak_bytes=allocator.stats().peak_bytes if allocator is not None else None,
        process_peak_bytes=max(peak, process.peak_bytes().whole_bytes),
        read=read,
        written=written,
    )


def measured_job_step(job: Job, batch: torch.Tensor) -> Step:
    """One step of a job; the job's own record gives its peaks, because its phases reset the meters."""
    seen: list[int] = []

    def step() -> float:
        result = job.step(batch)
        seen.append(result.peak_bytes)
        if result.departures:
            raise RuntimeError(f"the step departed from its schedule: {result.departures[:3]}")
        return result.loss

    found = measured(step, lambda: job.bytes_moved)
    live = max(record.peak_bytes for record in job.proof().phases if record.name in ("first step", "steady"))
    return Step(
        **{**asdict(found), "live_peak_bytes": live, "process_peak_bytes": max(found.process_peak_bytes, *seen)}
    )


# --- workers --------------------------------------------------------------------------------------------------------------------


class Worker:
    """A child process that does one request at a time: a line of JSON in, a line of JSON out.

    Args:
        script: the file that calls `serve`.
        name: for messages.
        request: what `serve`'s function is called with.
        environment: added to this process's.
        on_start: is told the child's number before it has done anything.
    """

    def __init__(
        self,
        script: str,
        name: str,
        request: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        on_start: Callable[[int], None] | None = None,
    ) -> None:
        self.name = name
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115, lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, script, "--worker", json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        if on_start is not None:
            on_start(self._process.pid)
        self.hello: dict[str, Any] = self._receive()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def step(self) -> Step:
        """One step."""
        return Step(**self.ask("step"))

    def ask(self, request: str) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            RuntimeError: the child ended; with the end of what it wrote.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the answer says why
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(f"worker {self.name!r} ended with {code}:\n{self._errors.read()[-3000:]}")

    def close(self) -> None:
        """Ends the child and waits for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(hello: Mapping[str, Any], handlers: Mapping[str, Callable[[], Step | Mapping[str, Any]]]) -> None:
    """The child's side: says hello, then answers requests until its input ends."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        answer = handlers[line.strip()]()
        print(json.dumps(asdict(answer) if isinstance(answer, Step) else answer), flush=True)


def interleave(workers: Sequence[Worker], rounds: int, *, warm_up: int = 1, note: str = "") -> dict[str, list[Step]]:
    """Steps all workers in turn, in every second round in the opposite order; checks that all compute the same losses.

    Raises:
        RuntimeError: two workers' losses differ by more than rounding.
    """
    found: dict[str, list[Step]] = {worker.name: [] for worker in workers}
    for number in range(warm_up + rounds):
        for worker in workers if number % 2 == 0 else workers[::-1]:
            step = worker.step()
            if number >= warm_up:
                found[worker.name].append(step)
            print(
                f"  {note} {worker.name:<28} {'warm-up' if number < warm_up else number - warm_up + 1} of {rounds}: "
                f"{step.wall_s:6.2f} s, {step.cpu_s:6.2f} CPU-s, loss {step.loss:.4f}",
                file=sys.stderr,
                flush=True,
            )
        losses = [steps[-1].loss for steps in found.values() if steps]
        if losses and max(losses) - min(losses) > 1e-4 * abs(losses[0]):
            raise RuntimeError(f"the workers do not compute the same: losses {losses} of {[w.name for w in workers]}")
    return found


def ratio(steps: Sequence[Step], reference: Sequence[Step], what: str = "wall_s") -> float:
    """Median over rounds of one side over the other."""
    return statistics.median(getattr(a, what) / getattr(b, what) for a, b in zip(steps, reference, strict=True))


def median(steps: Sequence[Step], what: str) -> float:
    """Median over rounds."""
    return statistics.median(getattr(step, what) for step in steps)


# --- the disk -------------------------------------------------------------------------------------------------------------------


def disk_seconds(
    directory: Path, read_bytes: int, written_bytes: int, *, most_bytes: int = 2 << 30, file_bytes: int = 1 << 30
) -> float:
    """Seconds that the disk alone takes to read and write as much at once, through the same threads as a job's homes.

    Moves at most `most_bytes`, in the same proportion, and scales up. Requests of 4 MiB over a file of at most `file_bytes`; a window keeps both
    directions busy until both are done. A disk that is fast for a few seconds and slower when that lasts is known by what it does over more bytes.
    """
    from memfit.store.checksums import aligned_memory
    from memfit.store.files import FileOperations, open_unnamed
    from memfit.store.io import DiskIO

    total = read_bytes + written_bytes
    if total == 0:
        return 0.0
    scale = min(1.0, most_bytes / total)
    request = 4 * MIB
    counts = {"read": round(read_bytes * scale / request), "write": round(written_bytes * scale / request)}
    room = min(file_bytes, shutil.disk_usage(directory).free // 2)
    file_requests = max(1, min(room // request, max(counts.values())))
    handle = open_unnamed(directory, FileOperations())
    buffers = {side: aligned_memory(request) for side in counts}
    for buffer in buffers.values():
        buffer.view()[:] = os.urandom(request)  # not zeros: some disks store those for free
    try:
        handle.allocate(0, file_requests * request)
        with DiskIO() as io:
            for transfer in [io.write(handle, n * request, buffers["write"]) for n in range(file_requests)]:
                transfer.wait()
            began = time.perf_counter()
            pending: dict[str, list[Any]] = {"read": [], "write": []}
            done = {"read": 0, "write": 0}
            while any(done[side] < counts[side] or pending[side] for side in counts):
                for side, start in (("read", io.read), ("write", io.write)):
                    while len(pending[side]) < 4 and done[side] < counts[side]:
                        # Half a file apart, so that a read never asks for what is being written.
                        at = (done[side] + (file_requests // 2 if side == "write" else 0)) % file_requests
                        pending[side].append(start(handle, at * request, buffers[side]))
                        done[side] += 1
                oldest = max(pending.values(), key=len)
                oldest.pop(0).wait()
            moved = sum(counts.values()) * request
            return (time.perf_counter() - began) * total / max(moved, 1)
    finally:
        handle.close()


# --- models and plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT and its batch.

    Attributes:
        layers: blocks of width 768 with 12 heads, as GPT-2 small has 12.
        vocabulary: 50,257 as GPT-2.
        rows, tokens: of a step's whole batch.
    """

    layers: int = 12
    vocabulary: int = 50_257
    rows: int = 16
    tokens: int = 256


def build_gpt(shape: Shape, seed: int = 0) -> nn.Module:
    """GPT-2 of a shape, fp32, training mode, without dropout, tied."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=shape.layers, vocab_size=shape.vocabulary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def token_batch(rows: int, tokens: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Random token numbers of shape (rows, tokens + 1): cost does not depend on what a text says."""
    import torch

    return torch.randint(0, vocabulary, (rows, tokens + 1), generator=torch.Generator().manual_seed(seed))


def on_disk(profile: Profile, homes: BlockPlan | None = None) -> dict[str, BlockPlan]:
    """Weights and states of every block that may leave on disk; gradients stay where the update in backward takes them."""
    from memfit.core.plan import BlockPlan
    from memfit.core.tiers import Tier

    homes = homes or BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    return {block.name: homes for block in profile.blocks if not block.is_spanning}


def tail_of(profile: Profile) -> int | None:
    """The first call behind the last repeated one; None if nothing comes behind it."""
    calls = next(iter(profile.traces.values())).calls
    repeated = [call.index for call in calls if call.is_repeated]
    return repeated[-1] + 1 if repeated and repeated[-1] + 1 < len(calls) else None


# --- words ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def memory_group(limit_bytes: int | None = None) -> Iterator[Path]:
    """A memory cgroup inside this process's own one, removed at the end. Processes enter it by writing their number into `cgroup.procs`.

    Args:
        limit_bytes: of its memory, page cache included, which the kernel takes back; an overrun is a kill. None: who enters it sets it.

    Raises:
        RuntimeError: there is no version 1 memory controller here that this process may write.
    """
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next((p for _, controllers, p in own if "memory" in controllers.split(",")), None)
    root = Path("/sys/fs/cgroup/memory")
    if path is None or not os.access(root / path.lstrip("/"), os.W_OK):
        raise RuntimeError("a memory cgroup needs root and the version 1 memory controller")
    group = root / path.lstrip("/") / f"memfit-limits-{os.getpid()}"
    group.mkdir()
    try:
        if limit_bytes is not None:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def mib(nbytes: float | None) -> str:
    """Whole MiB, without the unit: it stands in the table's head."""
    return "-" if nbytes is None else f"{nbytes / MIB:,.0f}"


def machine() -> dict[str, Any]:
    """Where this ran, for the log."""
    import torch
    import transformers

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_average": os.getloadavg()[0],
    }
