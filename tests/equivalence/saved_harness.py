"""Drives frames of saved tensors without an engine: hooks on a few modules, a policy for each call, plain autograd for
the rest.

In: a model, its sites and policies. Out: losses, gradients, buffers and generator state, to compare bit for bit with
those of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from memfit.core.plan import CallPlan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.engine.frames import CallSite, Frame, make_frame
from memfit.engine.offload import Offloader
from memfit.engine.recompute import SegmentGroup
from memfit.engine.writes import Writes
from memfit.homes.offloaded import HostPool, ScratchPool
from memfit.store import DiskIO, ScratchFile

KEEP = CallPlan(saved=Saved.KEEP)
RECOMPUTE = CallPlan(saved=Saved.RECOMPUTE)
SELECT = CallPlan(saved=Saved.SELECT)
TO_HOST = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST)
TO_DISK = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)
BOUNDARY_AWAY = CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.HOST)
SELECT_BOUNDARY_AWAY = CallPlan(saved=Saved.SELECT, boundary_home=Tier.DISK)
JOINED = CallPlan(saved=Saved.RECOMPUTE, joins_previous=True)
JOINED_SELECT = CallPlan(saved=Saved.SELECT, joins_previous=True)

POLICIES: dict[str, Sequence[CallPlan]] = {
    "keep": (KEEP,),
    "recompute": (RECOMPUTE,),
    "select": (SELECT,),
    "offload to host": (TO_HOST,),
    "offload to disk": (TO_DISK,),
    "boundary away": (BOUNDARY_AWAY,),
    "select, boundary away": (SELECT_BOUNDARY_AWAY,),
    "segments of 2": (RECOMPUTE, JOINED),
    "segments of 3": (RECOMPUTE, JOINED, JOINED),
    "select, segments of 2": (SELECT, JOINED_SELECT),
    "mixed": (KEEP, RECOMPUTE, TO_DISK, SELECT, BOUNDARY_AWAY, JOINED),
}
"""Repeated over the calls of a model."""

CPU = torch.device("cpu")
WRITES = Writes()
"""Of all forwards of this process's tests; what nobody holds is forgotten."""
WIDTH, ROWS = 64, 32
HIDDEN_BYTES = ROWS * WIDTH * 4


@contextmanager
def make_offloader(directory: Path, *, minimum_bytes: int = 256) -> Iterator[Offloader]:
    """An offloader with an emulated host and a real scratch file; small tensors move too, so that tiny models test
    it."""
    io = DiskIO(read_threads=1, write_threads=1)
    scratch = ScratchFile(directory, io)
    try:
        yield Offloader(
            {Tier.HOST: HostPool(CPU), Tier.DISK: ScratchPool(scratch)},
            device=CPU,
            minimum_bytes=minimum_bytes,
            writes=WRITES,
        )
    finally:
        scratch.close()
        io.close()


@dataclass
class Driver:
    """Hooks on the sites of a model; use as a context manager.

    Attributes:
        policies: repeated over the calls.
        reloads: issue reload before backward; otherwise backward asks on demand.
        copies_inputs: names of sites that change arguments.
    """

    model: nn.Module
    sites: Sequence[str]
    policies: Sequence[CallPlan]
    offloader: Offloader | None = None
    reloads: bool = True
    copies_inputs: Iterable[str] = ()
    extra_stays: Sequence[torch.Tensor] = ()
    frames: list[Frame] = field(default_factory=list)
    _is_passing: bool = False
    _open: list[Frame] = field(default_factory=list)
    _group: SegmentGroup | None = None
    _removers: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        there = {
            t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers(), *self.extra_stays)
        }
        for name in self.sites:
            module = self.model.get_submodule(name)
            site = CallSite(
                name=name,
                module=module,
                call=self._calling(module),
                device=CPU,
                stays=lambda storage: storage._cdata in there,
                copies_inputs=name in self.copies_inputs,
                writes=WRITES,
            )
            pre = module.register_forward_pre_hook(self._entering(site), prepend=True, with_kwargs=True)
            post = module.register_forward_hook(self._leaving(), with_kwargs=True, always_call=True)
            self._removers += [pre, post]
        return self

    def __exit__(self, *error: object) -> None:
        for remover in self._removers:
            remover.remove()
        self.finish()

    def _calling(self, module: nn.Module) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            self._is_passing = True
            try:
                return nn.Module.__call__(module, *args, **kwargs)
            finally:
                self._is_passing = False

        return call

    def _entering(self, site: CallSite) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_passing:
                return
            index = len(self.frames)
            policy = self.policies[index % len(self.policies)]
            joins_next = self.policies[(index + 1) % len(self.policies)].joins_previous
            if not policy.joins_previous:
                self._group = SegmentGroup() if joins_next else None
            frame = make_frame(policy, site, args, kwargs, offloader=self.offloader, group=self._group)
            self.frames.append(frame)
            self._open.append(frame)
            frame.enter()

        return enter

    def _leaving(self) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self._is_passing:
                self._open.pop().leave(output)

        return leave

    def end_forward(self) -> None:
        """All that shall leave leaves."""
        for frame in self.frames:
            frame.offload()
        for frame in self.frames:
            frame.drop()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Reloads if it shall, then runs backward."""
        if self.reloads:
            for frame in reversed(self.frames):
                frame.reload()
        loss.backward(**options)

    def finish(self) -> None:
        """Ends all frames."""
        for frame in self.frames:
            frame.finish()
        self.frames.clear()
        self._group = None


@dataclass
class Outcome:
    """All that training could notice."""

    losses: list[torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    generator: torch.Tensor

    def assert_equal(self, other: Outcome) -> None:
        """Bit for bit."""
        for ours, plain in zip(self.losses, other.losses, strict=True):
            assert torch.equal(ours, plain), "loss"
        assert self.gradients.keys() == other.gradients.keys()
        for name, ours in self.gradients.items():
            plain = other.gradients[name]
            assert (ours is None) == (plain is None), name
            assert ours is None or plain is None or torch.equal(ours, plain), f"gradient of {name}"
        for name, ours in self.buffers.items():
            assert torch.equal(ours, other.buffers[name]), f"buffer {name}"
        assert torch.equal(self.generator, other.generator), "generator"


Loss = Callable[[nn.Module], torch.Tensor]


def run_plain(model: nn.Module, loss: Loss, *, steps: int = 2) -> Outcome:
    """Plain PyTorch, on a model that it leaves as it was."""
    return _run(model, loss, steps, None)


def run_driven(model: nn.Module, loss: Loss, driver: Driver, *, steps: int = 2) -> Outcome:
    """The same under frames."""
    with driver:
        return _run(model, loss, steps, driver)


def _run(model: nn.Module, loss: Loss, steps: int, driver: Driver | None) -> Outcome:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    losses: list[torch.Tensor] = []
    for _ in range(steps):  # gradients add up over the steps, so that both are compared
        with nullcontext() if driver is None else WRITES.watching():
            value = loss(model)
        losses.append(value.detach().clone())
        if driver is None:
            value.backward()
        else:
            driver.end_forward()
            driver.backward(value)
            driver.finish()
    outcome = Outcome(
        losses=losses,
        gradients={name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        generator=torch.get_rng_state(),
    )
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return outcome


class Block(nn.Module):
    """Norm, two layers, dropout; `run` may wrap the inside."""

    def __init__(self, width: int = 8, run: Callable[..., torch.Tensor] | None = None, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.run = run

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.inside(hidden) if self.run is None else self.run(self.inside, hidden)
        return torch.sin(hidden + mixed)


def blocks(count: int = 3, width: int = 8, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(Block(width, **options) for _ in range(count)))


def sites(model: nn.Sequential) -> list[str]:
    return [name for name, _ in model.named_children()]


def under(
    policies: Sequence[CallPlan], model: nn.Sequential, offloader: Offloader | None = None, **options: Any
) -> Driver:
    return Driver(model, sites(model), policies, offloader=offloader, **options)
