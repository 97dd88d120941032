"""Parameters on a server: weights, sums of gradients and optimizer states at their homes.

In: a model, its optimizer, the parameters that are this server's. Out: `ServedParameters`: bytes of
gradients come in, bytes of weights go out, updates by the user's own optimizer class in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.engine.housing import House
from memfit.homes.factories import HomeRequest, own_factories
from memfit.homes.home import ByteHome, write_tensor
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.regions import gradient_region
from memfit.homes.update_pieces import PieceUpdates
from memfit.homes.updates import UpdateWorker
from memfit.homes.weights import BlockWeights
from memfit.optimizers import OptimizerDriver, OwnerCallbacks, UpdateKind
from memfit.parameter_server.pairs import PIECE_BYTES
from memfit.tensors.trees import bytes_view, typed_view

_SEVERAL = 2
_PIECES_ALIVE = 3


@dataclass(frozen=True)
class GradientSink:
    """Place of a gradient that comes.

    Attributes:
        part: returns memory for a range (offset, length) of its bytes.
        take: takes the range that was filled.
        add: adds the whole to the sum, when it has come.
    """

    part: Callable[[int, int], torch.Tensor]
    take: Callable[[int, int, torch.Tensor], None]
    add: Callable[[], None]


class ServedParameters:
    """Parameters of a server. Each is a block of its own.

    Memory: what rests on the device, and besides `staged_bytes`.

    Args:
        named: the parameters by their index, with their names.
        optimizer: the user's; it may have other parameters too.
        driver: of this optimizer.
        tier: where everything rests.
        directory: of homes on disk; None makes a temporary one.
        workers: their number.
        adds: gradients of several workers are added up before an update.

    Attributes:
        trained: indices of the parameters that the optimizer updates.
    """

    def __init__(
        self,
        named: Mapping[int, tuple[str, torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        driver: OptimizerDriver,
        tier: Tier,
        directory: str | Path | None,
        *,
        workers: int,
        adds: bool,
    ) -> None:
        self._optimizer = optimizer
        self._driver = driver
        self._order = {index: place for place, index in enumerate(named)}
        self._blocks = [BlockWeights(place, name, [(name, p)]) for place, (name, p) in enumerate(named.values())]
        names = set(driver.names)
        self.trained = frozenset(index for index, (name, _) in named.items() if name in names)
        self._states = {
            block.index: BlockStates(block, {block.name: driver.state_layout(block.name)})
            for block in self._blocks
            if block.name in names
        }
        homes = BlockPlan(weight_home=tier, gradient_home=tier, state_home=tier)
        # Of several ranks: then gradients have homes in any tier, the device too
        # (`Plan.accumulates`).
        plan = Plan(ranks=_SEVERAL, blocks={block.name: homes for block in self._blocks})
        device = torch.device("cpu")
        # One update at a time: it works on the optimizer's one shadow, and in the memory of one.
        self._updating = threading.Lock()
        with ExitStack() as stack:
            self._house = House(
                plan,
                self._blocks,
                self._states,
                own_factories(device, directory),
                keeps_gradients=False,
                keeps_norms=False,
            )
            stack.callback(self._house.close)
            self._house.move_in()
            self._house.place_states()
            self._arrivals: dict[int, ByteHome] = {}
            if adds:
                factory = own_factories(device, None)[tier]
                stack.callback(factory.close)
                largest = max((block.master_nbytes for block in self._blocks), default=0)
                wanted = [
                    HomeRequest(region=f"arrival/{worker}", nbytes=largest, tier=tier, tag="gradient")
                    for worker in range(workers if largest else 0)
                ]
                factory.prepare(wanted, offloads=False)
                self._arrivals = {worker: factory.home(request) for worker, request in enumerate(wanted)}
            callbacks = OwnerCallbacks(gather_state=self._gather, scatter_state=self._scatter, zero_grad=_keep)
            for name, state in driver.adopt(callbacks):
                place = next((block for block in self._blocks if block.name == name), None)
                if place is None:
                    driver.restore(name, state)
                else:
                    self._states[place.index].put(place.slots[0], state)
            self._house.first_commit()
            self._updates = UpdateWorker(PieceUpdates(driver, self._states, self._house.gradients))
            stack.callback(self._updates.close)
            self._open = stack.pop_all()

    def nbytes(self, index: int) -> int:
        """Returns the bytes of a parameter's weight, which are those of its gradient."""
        return self._block(index).slots[0].nbytes

    def weight_part(self, index: int) -> Callable[[int, int], torch.Tensor]:
        """Returns what gives the bytes of a range of a weight."""
        home = self._block(index).home
        assert home is not None
        return lambda offset, length: _read(home, offset, length)

    def gradient_sink(self, index: int, worker: int, *, is_first: bool) -> GradientSink:
        """Returns what receives a gradient.

        Args:
            index: of the parameter.
            worker: number of the worker.
            is_first: there is no sum yet.
        """
        total = self._sum(index)
        # Not straight into a sum: of a worker that is lost half of it would stay there.
        into = total if is_first else self._arrivals[worker]

        def part(offset: int, length: int) -> torch.Tensor:
            resting = into.memory
            return torch.empty(length, dtype=torch.uint8) if resting is None else bytes_view(resting, offset, length)

        def take(offset: int, length: int, piece: torch.Tensor) -> None:
            if into.memory is None:
                write_tensor(into, offset, piece).wait()

        return GradientSink(part, take, lambda: None if is_first else self._add(index, into, total))

    def update(self, index: int) -> None:
        """Updates a parameter with its sum, as `optimizer.step` would."""
        block = self._block(index)
        settings = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        with self._updating, torch.no_grad():
            self._house.gradients.take_up([block.name], None)
            # Without hooks: no step of the whole model is made here.
            self._driver.begin_again(settings)
            try:
                self._updates.submit(block, is_beside=False).wait()
            finally:
                self._driver.abandon_step()

    def close(self, *, restore: bool) -> None:
        """Frees all homes. May be repeated.

        Args:
            restore: gives weights and states back to the model and the optimizer, in memory.
        """
        if restore:
            for block in self._blocks:
                if block.index in self._states and block.home is not None:
                    self._driver.restore(block.name, self._gather(block.name))
            self._house.give_back()
        self._driver.release()
        self._open.close()

    def _block(self, index: int) -> BlockWeights:
        return self._blocks[self._order[index]]

    def _named(self, name: str) -> BlockWeights:
        return next(block for block in self._blocks if block.name == name)

    def _gather(self, name: str) -> dict[str, Any]:
        block = self._named(name)
        return self._states[block.index].gather(block.slots[0])

    def _scatter(self, name: str, state: dict[str, Any]) -> None:
        block = self._named(name)
        self._states[block.index].put(block.slots[0], state)

    def _sum(self, index: int) -> ByteHome:
        return self._house.placed[gradient_region(self._block(index).name)][1]

    def _add(self, index: int, arrived: ByteHome, total: ByteHome) -> None:
        """Adds a gradient to the sum of those of lower ranks, piece by piece."""
        slot = self._block(index).slots[0]
        with torch.no_grad():
            for offset in range(0, slot.nbytes, PIECE_BYTES):
                length = min(PIECE_BYTES, slot.nbytes - offset)
                mine, sums = (_read(home, offset, length).view(slot.dtype) for home in (arrived, total))
                sums.add_(mine)
                if total.memory is None:
                    write_tensor(total, offset, sums).wait()


def staged_bytes(
    driver: OptimizerDriver, named: Mapping[int, tuple[str, torch.nn.Parameter]], workers: int, *, adds: bool
) -> int:
    """Returns the most that a server whose homes are not in memory takes beside them: a piece for
    each worker that pulls or pushes, two where it is added, and the pieces of one update.
    """
    update, largest, trained = 0, 0, set(driver.names)
    for name, p in named.values():
        largest = max(largest, p.nbytes)
        if name not in trained:
            continue
        states = sum(t.nbytes for t in driver.state_layout(name) if t.shape_kind != "scalar")
        whole = driver.verdict(name).kind is not UpdateKind.ELEMENTWISE
        elements = max(p.numel() if whole else min(p.numel(), PIECE_ELEMENTS), 1)
        each = elements * 2 * p.element_size() + states * elements // max(p.numel(), 1)
        # One comes, one is worked on, one leaves.
        alive = min(-(-p.numel() // elements), _PIECES_ALIVE)
        update = max(update, alive * each + driver.update_cost(name).scratch_of(elements))
    return update + (2 if adds else 1) * workers * min(PIECE_BYTES, largest)


def home_bytes(driver: OptimizerDriver, named: Mapping[int, tuple[str, torch.nn.Parameter]], arrivals: int) -> int:
    """Returns the bytes of all homes: weights, sums, states, and as many gradients that arrive."""
    total, largest = 0, 0
    trained = set(driver.names)
    for name, p in named.values():
        total += 2 * p.nbytes
        largest = max(largest, p.nbytes)
        if name in trained:
            total += sum(t.nbytes for t in driver.state_layout(name) if t.shape_kind != "scalar")
    return total + arrivals * largest


def divided(sizes: Mapping[int, int], servers: Sequence[int]) -> dict[int, int]:
    """Divides parameters among servers, the largest first, each to the one that has least so far.

    Returns:
        By index, the rank of the server.
    """
    loads = dict.fromkeys(servers, 0)
    found: dict[int, int] = {}
    for index in sorted(sizes, key=lambda i: (-sizes[i], i)):
        server = min(loads, key=lambda s: (loads[s], s))
        loads[server] += sizes[index]
        found[index] = server
    return found


def _keep(set_to_none: bool) -> None:  # noqa: FBT001, the optimizer's own signature
    """Gradients of a server are not on `.grad`."""


def _read(home: ByteHome, offset: int, length: int) -> torch.Tensor:
    """Returns the bytes of a range of a home: in place, or read."""
    resting = home.memory
    if resting is not None:
        return bytes_view(resting, offset, length)
    piece = torch.empty(length, dtype=torch.uint8)
    home.read(offset, length, piece.untyped_storage()).wait()
    return typed_view(piece.untyped_storage(), 0, torch.uint8, (length,))
