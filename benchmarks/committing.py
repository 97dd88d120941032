"""What it costs a streamed training step to be committed: the same job with and without a store, turn by turn, in one process.

    .venv/bin/python benchmarks/committing.py                                    # GPT of 4 layers, 768 wide; about five minutes on two cores
    .venv/bin/python benchmarks/committing.py --layers 12 --tokens 512 --rounds 5
    .venv/bin/python benchmarks/committing.py --only step journal --rounds 12

plain       homes on disk, in place, updates in backward, no promise
step        every step committed, durable before the next one begins
every 4     every fourth
exit        none but the first and the last
resident    all in memory, every step committed: what a commit writes of blocks that rest in memory
late        "plain" with gradients at home on disk and updates after backward, as a journal needs them
journal     every step committed by a journal

Printed: medians over the rounds of seconds a step, and of the ratio (with its quartiles) to "plain" (or to the resident job without a store) within the
same round, of wall-clock and of CPU time (which other work on the machine moves less); seconds of a commit alone; bytes that a step
reads and writes. Of the journal also: what it takes beyond "plain", over what its further bytes take alone: reading and writing a file
is timed in each round. The fewer tokens a batch has, the larger the share of the disk: few tokens are the worst case.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memfit
from memfit.core.limits import MIB, format_bytes
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.integrations.recipes.gpt import build_adamw, causal_language_loss
from memfit.store import DiskIO, aligned_memory, open_file

VOCABULARY = 4096
_ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DISK)
_PROBE_BYTES = 256 * MIB
_UNCOUNTED = 2
"""Turns: states come up, libraries are loaded; and both slots are written for the first time, which costs a file system that claimed their room twice as much."""


def build(layers: int, width: int, tokens: int) -> nn.Module:
    """A GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=tokens, n_embd=width, n_layer=layers, n_head=width // 64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


@dataclass
class Contestant:
    """A job, and what its steps took."""

    name: str
    against: str
    job: Any
    step_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    read: int = 0
    written: int = 0

    def step(self, batch: Tensor) -> None:
        """One step and, in a store, its commit, as the durability asks for it."""
        before = self.moved()
        began, busy = time.perf_counter(), time.process_time()
        self.job.step(batch)
        if self.job.commits is not None and self.job.commits.durability == "step":
            # What the next step would do first: here, so that each step pays for its own commit. Rarer ones are paid for by the step after them.
            sealing = time.perf_counter()
            self.job.commit()
            self.commit_s.append(time.perf_counter() - sealing)
        self.step_s.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - busy)
        self.read, self.written = (now - then for now, then in zip(self.moved(), before, strict=True))

    def moved(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        read, written = self.job.bytes_moved
        return sum(read.values()), sum(written.values())

    def forget(self) -> None:
        """What steps took so far."""
        for seconds in (self.step_s, self.commit_s, self.cpu_s):
            seconds.clear()


class Disk:
    """A file beside the homes, to time the disk alone.

    Attributes:
        read_s: seconds a byte, a round each.
        write_s: likewise.
    """

    def __init__(self, path: Path) -> None:
        self.read_s: list[float] = []
        self.write_s: list[float] = []
        self._io, self._handle = DiskIO(), open_file(path, create=True)
        self._handle.allocate(0, _PROBE_BYTES)
        self._memory = aligned_memory(self._io.piece_bytes)
        self._memory.view()[:] = os.urandom(self._memory.nbytes)
        self._move(self._io.write)

    def time(self) -> None:
        """One round."""
        self.write_s.append(self._move(self._io.write))
        self.read_s.append(self._move(self._io.read))

    def _move(self, act: Callable[..., Any]) -> float:
        began = time.perf_counter()
        for transfer in [act(self._handle, at, self._memory) for at in range(0, _PROBE_BYTES, self._memory.nbytes)]:
            transfer.wait()
        return (time.perf_counter() - began) / _PROBE_BYTES

    def close(self) -> None:
        """Ends it."""
        self._handle.close()
        self._io.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument(
        "--only", nargs="+", default=None, help="of the names above; what each is compared with comes along"
    )
    options = parser.parse_args()
    batch = torch.randint(VOCABULARY, (options.batch, options.tokens + 1))
    with tempfile.TemporaryDirectory(prefix="memfit-committing-", dir=options.directory) as name:
        contestants, disk = make(options, batch, Path(name)), Disk(Path(name) / "probe")
        for turn in range(-_UNCOUNTED, options.rounds):
            for contestant in contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]:
                contestant.step(batch)
                if turn < 0:
                    contestant.forget()
            if turn >= 0:
                disk.time()
        tell(contestants, options)
        tell_journal({contestant.name: contestant for contestant in contestants}, disk)
        disk.close()
        for contestant in contestants:
            contestant.job.close(restore=False)


def make(options: argparse.Namespace, batch: Tensor, place: Path) -> list[Contestant]:
    """The jobs, side by side."""
    shape = (options.layers, options.width, options.tokens)
    model = build(*shape)
    found = memfit.profile(model, build_adamw(model, learning_rate=1e-4), causal_language_loss, batch)
    calls = next(iter(found.traces.values())).calls
    streamed = Plan(
        blocks={block.name: _ON_DISK for block in found.blocks if not block.is_spanning},
        calls=tuple(CallPlan(saved=Saved.RECOMPUTE) if c.is_repeated and c.has_backward else CallPlan() for c in calls),
    )
    homes = {name: replace(block, gradient_home=Tier.DISK) for name, block in streamed.blocks.items()}
    late = replace(streamed, blocks=homes, update=UpdateTime.AFTER_BACKWARD)
    kinds: list[tuple[str, str, Plan, dict[str, Any]]] = [
        ("plain", "plain", streamed, {}),
        ("step", "plain", streamed, {"durability": "step"}),
        ("every 4", "plain", streamed, {"durability": 4}),
        ("exit", "plain", streamed, {"durability": "exit"}),
        ("late", "plain", late, {}),
        ("journal", "plain", late, {"scheme": "journal"}),
        ("resident, plain", "resident, plain", Plan(), {}),
        ("resident, step", "resident, plain", Plan(), {"durability": "step"}),
    ]
    if options.only is not None:
        wanted = {kind[0] for kind in kinds if kind[0] in options.only} | {
            kind[1] for kind in kinds if kind[0] in options.only
        }
        kinds = [kind for kind in kinds if kind[0] in wanted]
    contestants: list[Contestant] = []
    for index, (name, against, plan, known) in enumerate(kinds):
        model = build(*shape)
        where = {"store": place / f"run-{index}"} if known else {"directory": place / f"homes-{index}"}
        optimizer = build_adamw(model, learning_rate=1e-4)
        job = memfit.fit(model, optimizer, causal_language_loss, batch, plan=plan, **where, **known)
        contestants.append(Contestant(name, against, job))
    return contestants


def tell(contestants: list[Contestant], options: argparse.Namespace) -> None:
    """The table."""
    by_name = {contestant.name: contestant for contestant in contestants}
    print(
        f"GPT, {options.layers} layers, {options.width} wide, batch of {options.batch} x {options.tokens} tokens, {options.rounds} rounds"
    )
    for contestant in contestants:
        other = by_name[contestant.against]
        ratio = statistics.median(a / b for a, b in zip(contestant.step_s, other.step_s, strict=True))
        busy = statistics.median(a / b for a, b in zip(contestant.cpu_s, other.cpu_s, strict=True))
        commits = ""
        if contestant.commit_s:
            alone = statistics.median(contestant.commit_s)
            commits = f"commit alone {alone * 1e3:.1f} ms (most {max(contestant.commit_s) * 1e3:.1f})"
        spread = statistics.quantiles((a / b for a, b in zip(contestant.step_s, other.step_s, strict=True)), n=4)
        print(
            f"{contestant.name:<16} {statistics.median(contestant.step_s):7.3f} s a step, {ratio:5.3f} ({spread[0]:5.3f} to {spread[2]:5.3f}) "
            f"of {contestant.against!r}, CPU time {busy:5.3f} of its, {format_bytes(contestant.read)} read and {format_bytes(contestant.written)} written "
            f"a step  {commits}"
        )


def tell_journal(by_name: Mapping[str, Contestant], disk: Disk) -> None:
    """What a journal takes beyond others, over what its further bytes take."""
    journal = by_name.get("journal")
    for other in (by_name.get("plain"), by_name.get("late")):
        if journal is None or other is None:
            continue
        read, written = journal.read - other.read, journal.written - other.written
        more = [a - b for a, b in zip(journal.step_s, other.step_s, strict=True)]
        alone = [read * r + written * w for r, w in zip(disk.read_s, disk.write_s, strict=True)]
        print(
            f"journal: {statistics.median(more):.3f} s beyond {other.name!r}; {read / MIB:.1f} MiB more read and {written / MIB:.1f} MiB more written, "
            f"which take {statistics.median(alone):.3f} s alone"
        )
        if min(alone) > 0:
            low, middle, high = statistics.quantiles((m / a for m, a in zip(more, alone, strict=True)), n=4)
            print(f"    {middle:.2f} ({low:.2f} to {high:.2f}) times its further bytes over the bandwidth")


if __name__ == "__main__":
    main()
