"""Parameters on a server: weights, sums of gradients and optimizer states at their homes.

In: a model, its optimizer, the parameters that are this server's. Out: `ServedParameters`: bytes of
gradients come in, bytes of weights go out, updates by the user's own optimizer class in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memfit.core.errors import PeerError, UsageError
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
from memfit.job.push_clocks import Clocks, ServerFailedError
from memfit.mesh.collectives import Pending
from memfit.mesh.rank_group import CollectiveThread
from memfit.mesh.transport import BrokenTransportError, transporting
from memfit.optimizers import OptimizerDriver, OwnerCallbacks, UpdateKind
from memfit.tensors.trees import bytes_view, typed_view

# Messages between a worker and a server, over a group of these two.
#
# In: a process group of two ranks. Out: heads of requests and answers, texts, bytes in pieces.
#
# [Note: what travels]
# A worker asks, a server answers; nothing else begins a message. A push is a head and the gradient,
# and has no answer: what goes wrong on the server is the answer of the worker's next pull, or of
# its leaving. A pull is a head; its answer is a head and the weight, or a head and a text. Values
# travel in pieces of 1 MiB, so that neither side stages more; each byte once.

PIECE_BYTES = 1 << 20
_HEAD_NUMBERS = 3


class Ask(IntEnum):
    """A request of a worker."""

    PUSH = 0
    PULL = 1
    LEAVE = 2


@dataclass(frozen=True)
class Head:
    """The beginning of a message.

    Attributes:
        what: of a request its `Ask`; of an answer 0, or 1 for an error.
        index: of a request, the parameter's; of an answer, how stale it is, or the length of the
            text.
        has_bytes: values follow.
    """

    what: int
    index: int = 0
    has_bytes: bool = False


class Pair:
    """One end of the connection of a worker and a server; used by one thread at a time.

    Args:
        group: of these two ranks.
        peer: the other one's rank in it, 0 for the server and 1 for the worker.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer

    def send_head(self, head: Head) -> None:
        """Sends the beginning of a message."""
        self._send(torch.tensor([head.what, head.index, int(head.has_bytes)], dtype=torch.int64))

    def receive_head(self) -> Head:
        """Waits for the beginning of a message."""
        numbers = torch.empty(_HEAD_NUMBERS, dtype=torch.int64)
        self._receive(numbers)
        what, index, has_bytes = numbers.tolist()
        return Head(what, index, bool(has_bytes))

    def send_text(self, text: str) -> None:
        """Sends a text, as the answer of something that failed."""
        encoded = bytearray(text.encode() or b" ")
        self.send_head(Head(1, len(encoded)))
        self._send(torch.frombuffer(encoded, dtype=torch.uint8))

    def receive_text(self, head: Head) -> str:
        """Waits for the text behind such a head."""
        encoded = torch.empty(head.index, dtype=torch.uint8)
        self._receive(encoded)
        return bytes(encoded.tolist()).decode(errors="replace")

    def send_bytes(self, nbytes: int, part: Callable[[int, int], torch.Tensor]) -> None:
        """Sends values.

        Args:
            nbytes: of all.
            part: returns the bytes of a range (offset, length), in host memory.
        """
        for offset, length in _pieces(nbytes):
            self._send(part(offset, length))

    def receive_bytes(
        self, nbytes: int, part: Callable[[int, int], torch.Tensor], take: Callable[[int, int, torch.Tensor], None]
    ) -> None:
        """Waits for values.

        Args:
            nbytes: of all.
            part: returns memory for the bytes of a range.
            take: called with the range and that memory, when it is filled. Where it fails, the rest
                is received all the same, so that the next message is found; then it raises.
        """
        failed: Exception | None = None
        for offset, length in _pieces(nbytes):
            piece = part(offset, length)
            self._receive(piece)
            if failed is None:
                try:
                    take(offset, length, piece)
                except Exception as error:  # noqa: BLE001, raised below
                    failed = error
        if failed is not None:
            raise failed

    def drop_bytes(self, nbytes: int) -> None:
        """Waits for values that nobody wants."""
        for _, length in _pieces(nbytes):
            self._receive(torch.empty(length, dtype=torch.uint8))

    def close(self) -> None:
        """Gives the connection up. May be repeated."""
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    def _send(self, values: torch.Tensor) -> None:
        with transporting():
            dist.send(values, group=self._group, group_dst=self._peer)

    def _receive(self, values: torch.Tensor) -> None:
        with transporting():
            dist.recv(values, group=self._group, group_src=self._peer)


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, nbytes, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, nbytes - offset)


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


# The work of a server: one thread for each worker, which answers what it asks.
#
# In: connections to the workers, the parameters that are served. Out: pushes taken, pulls answered,
# until all workers have left or are lost.


class Serving:
    """Answers workers, each in a thread of its own. See `push_clocks`, [Note: clocks].

    Args:
        served: the parameters.
        pairs: by worker, the connection to it.
        staleness: of the clocks.

    Attributes:
        lost: workers that ended without leaving.
        received: bytes of gradients that have come.
        sent: bytes of weights that have gone.
    """

    def __init__(self, served: ServedParameters, pairs: Mapping[int, Pair], staleness: int) -> None:
        self._served = served
        self._pairs = dict(pairs)
        self._numbers = {worker: number for number, worker in enumerate(sorted(pairs))}
        self._clocks = Clocks(sorted(pairs), sorted(served.trained), staleness, served.update)
        self.lost: list[int] = []
        self.received = self.sent = 0
        self._counting = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"memfit-serve-{worker}", daemon=True)
            for worker in self._pairs
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> BaseException | None:
        """Why the server failed; None while all is well."""
        return self._clocks.failure

    def fail(self, error: BaseException) -> None:
        """Ends all that workers wait for: the error is the answer."""
        self._clocks.fail(error)

    def wait(self) -> None:
        """Returns when all workers have left or are lost."""
        for thread in self._threads:
            # In turns: a wait without an end would not see Ctrl-C on every platform.
            while thread.is_alive():
                thread.join(0.2)

    def _serve(self, worker: int) -> None:
        pair = self._pairs[worker]
        try:
            while self._answer(worker, pair, pair.receive_head()):
                pass
        except BrokenTransportError:
            # Its sockets have closed: what it had begun to push does not count.
            self.lost.append(worker)
        except BaseException as error:  # noqa: BLE001, told to the other workers, and raised by `close`
            self.fail(error)
        finally:
            self._leave(worker)
            pair.close()

    def _leave(self, worker: int) -> None:
        try:
            self._clocks.leave(worker)
        except ServerFailedError:
            return
        except BaseException as error:  # noqa: BLE001, as above: an update failed that waited for this worker
            self.fail(error)

    def _answer(self, worker: int, pair: Pair, head: Head) -> bool:
        """Answers a request; returns False when the worker leaves."""
        if head.what == Ask.PUSH:
            self._take(worker, pair, head)
        elif head.what == Ask.PULL:
            self._give(worker, pair, head.index)
        else:
            self._say(pair, lambda: pair.send_head(Head(0)))
        return head.what != Ask.LEAVE

    def _take(self, worker: int, pair: Pair, head: Head) -> None:
        index, has_come = head.index, not head.has_bytes
        nbytes = self._served.nbytes(index) if head.has_bytes else 0
        try:
            with self._clocks.push(worker, index, has_gradient=head.has_bytes) as is_first:
                if head.has_bytes:
                    sink = self._served.gradient_sink(index, self._numbers[worker], is_first=is_first)
                    pair.receive_bytes(nbytes, sink.part, sink.take)
                    has_come = True
                    sink.add()
        except ServerFailedError:
            # Told with the worker's next pull; until then it must find somebody who listens.
            if not has_come:
                pair.drop_bytes(nbytes)
        except BrokenTransportError:
            raise
        except Exception as error:  # noqa: BLE001, told to all workers, and raised by `close`
            self.fail(error)
        with self._counting:
            self.received += nbytes

    def _give(self, worker: int, pair: Pair, index: int) -> None:
        nbytes = self._served.nbytes(index)

        def give() -> None:
            with self._clocks.pull(worker, index) as lag:
                pair.send_head(Head(0, lag, has_bytes=True))
                pair.send_bytes(nbytes, self._served.weight_part(index))
            with self._counting:
                self.sent += nbytes

        self._say(pair, give)

    def _say(self, pair: Pair, answer: Callable[[], None]) -> None:
        """Gives an answer, or says why the server cannot."""
        if self.failure is None:
            try:
                answer()
            except ServerFailedError:
                pass
            else:
                return
        assert self.failure is not None
        pair.send_text(f"{type(self.failure).__name__}: {self.failure}")


# The side of a worker: pushes and pulls, in order for each server, in a thread for each.
#
# In: gradients, tensors to be filled. Out: `Pending` results.

# Pulls whose staleness is summed up at once.
_MANY = 1000


class ServerLink:
    """A worker's connection to one server: what it asks is done in the order in which it asks, by
    one thread.

    Args:
        server: its rank.
        pair: the connection.
        timeout_s: after which the connection gives up.
    """

    def __init__(self, server: int, pair: Pair, timeout_s: float) -> None:
        self._server = server
        self._pair = pair
        self._timeout_s = timeout_s
        self._thread = CollectiveThread(f"memfit-server-{server}", self._name_loss)

    def _name_loss(self, error: BaseException) -> None:
        error.args = (
            f"server {self._server} was lost, or has not answered for {self._timeout_s:.0f} s: {error.args[0].partition(': ')[2]}",
        )

    def push(self, index: int, gradient: torch.Tensor | None) -> Pending[None]:
        """Begins to send a gradient, 1-D in memory order."""

        def act() -> None:
            self._pair.send_head(Head(Ask.PUSH, index, gradient is not None))
            if gradient is not None:
                flat = gradient.view(torch.uint8)
                self._pair.send_bytes(flat.numel(), lambda offset, length: flat[offset : offset + length].cpu())

        return Pending(self._thread.submit(act), [None])

    def pull(self, index: int, flat: torch.Tensor, whole: torch.Tensor) -> tuple[Pending[torch.Tensor], list[int]]:
        """Begins to fill a tensor.

        Args:
            index: of the parameter.
            flat: its elements in memory order.
            whole: the result.

        Returns:
            The result, and a list that gets how stale it is.
        """
        stale: list[int] = []

        def act() -> None:
            self._pair.send_head(Head(Ask.PULL, index))
            head = self._pair.receive_head()
            if head.what:
                raise PeerError(f"rank {self._server}: {self._pair.receive_text(head)}")
            stale.append(head.index)
            values = flat.view(torch.uint8)
            is_here = values.device.type == "cpu"

            def part(offset: int, length: int) -> torch.Tensor:
                return values[offset : offset + length] if is_here else torch.empty(length, dtype=torch.uint8)

            def take(offset: int, length: int, piece: torch.Tensor) -> None:
                if not is_here:
                    values[offset : offset + length] = piece.to(values.device)

            self._pair.receive_bytes(values.numel(), part, take)

        return Pending(self._thread.submit(act), [whole]), stale

    def leave(self) -> None:
        """Leaves the server, behind all that was asked before.

        Raises:
            PeerError: the server has failed, or is lost.
        """

        def act() -> None:
            self._pair.send_head(Head(Ask.LEAVE))
            head = self._pair.receive_head()
            if head.what:
                raise PeerError(f"rank {self._server}: {self._pair.receive_text(head)}")

        try:
            self._thread.submit(act).wait()
        finally:
            self._thread.close()
            self._pair.close()


class WorkerLinks:
    """A worker's connections to all servers.

    Args:
        parameters: by index, with their names.
        trained: names of those that the optimizer updates.
        owners: by index, the server that has it.
        links: by server.

    Attributes:
        received: bytes of weights that have come.
        sent: bytes of gradients that have gone.
    """

    def __init__(
        self,
        parameters: Mapping[int, tuple[str, torch.nn.Parameter]],
        trained: Collection[str],
        owners: Mapping[int, int],
        links: Mapping[int, ServerLink],
    ) -> None:
        # Without the parameters: what the model becomes meanwhile is the worker's business.
        self._forms = {
            index: (name, tuple(p.shape), tuple(p.stride()), p.dtype, p.device)
            for index, (name, p) in parameters.items()
        }
        self._trained = frozenset(trained)
        self._owners = dict(owners)
        self._links = dict(links)
        self._stale: list[list[int]] = []
        self._stalest = 0
        self.received = self.sent = 0

    @property
    def stalest(self) -> int:
        """See `ParameterServer.stalest_pull`."""
        # Those that have come; a list each, because pulls end in threads of their own.
        self._stalest = max([self._stalest, *(each[0] for each in self._stale if each)])
        self._stale = [each for each in self._stale if not each]
        return self._stalest

    def push(self, index: int, gradient: torch.Tensor | None) -> Pending[None]:
        """See `ParameterServer.push`."""
        name = self._known(index)
        if name not in self._trained:
            raise UsageError(f"push({index}): the optimizer does not update {name!r}")
        flat = None if gradient is None else self._flat(index, gradient.detach(), "the gradient")
        if flat is None and gradient is not None:
            _, shape, stride, dtype, _ = self._forms[index]
            own = torch.empty_strided(shape, stride, dtype=dtype, device=gradient.device).copy_(gradient.detach())
            flat = own.as_strided((own.numel(),), (1,))
        self.sent += 0 if flat is None else flat.nbytes
        return self._links[self._owners[index]].push(index, flat)

    def pull(self, index: int, into: torch.Tensor | None) -> Pending[torch.Tensor]:
        """See `ParameterServer.pull`."""
        self._known(index)
        _, shape, stride, dtype, device = self._forms[index]
        whole = torch.empty_strided(shape, stride, dtype=dtype, device=device) if into is None else into
        flat = self._flat(index, whole.detach(), "the tensor that is filled")
        if flat is None:
            raise UsageError(
                f"pull({index}): the tensor that is filled has strides {tuple(whole.stride())}, the parameter {stride}"
            )
        pending, stale = self._links[self._owners[index]].pull(index, flat, whole)
        if len(self._stale) > _MANY:
            self.stalest  # noqa: B018, sums up what has come
        self._stale.append(stale)
        self.received += flat.nbytes
        return pending

    def leave(self) -> None:
        """Leaves all servers; raises the first error of any."""
        first: BaseException | None = None
        for link in self._links.values():
            try:
                link.leave()
            except PeerError as error:
                first = first or error
        if first is not None:
            raise first

    def _known(self, index: int) -> str:
        if index not in self._forms:
            raise UsageError(f"there is no parameter {index} among {len(self._forms)}")
        return self._forms[index][0]

    def _flat(self, index: int, given: torch.Tensor, what: str) -> torch.Tensor | None:
        """Returns a tensor's elements in the parameter's memory order; None: its order is another.

        Raises:
            UsageError: it has another shape or dtype.
        """
        name, shape, stride, dtype, _ = self._forms[index]
        if given.layout is not torch.strided or tuple(given.shape) != shape or given.dtype != dtype:
            raise UsageError(
                f"{what} of {name!r} is {tuple(given.shape)} of {given.dtype}, the parameter {shape} of {dtype}"
            )
        # Where a dimension is 1, its stride says nothing.
        same = all(a == b for a, b, size in zip(given.stride(), stride, shape, strict=True) if size > 1)
        return given.as_strided((given.numel(),), (1,)) if same or not given.numel() else None
