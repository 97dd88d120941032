"""`memfit.parameter_server.create`, and what it returns on servers and workers.

In: a model, an optimizer, ranks. Out: `ParameterServer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from memfit.core.errors import DoesNotFitError, UnsupportedError, UsageError
from memfit.core.limits import Limits, format_bytes
from memfit.core.tiers import Tier
from memfit.job.served import (
    Pair,
    ServedParameters,
    ServerLink,
    Serving,
    WorkerLinks,
    divided,
    home_bytes,
    staged_bytes,
)
from memfit.machine.limits_of_process import check_limit
from memfit.machine.machine import Machine, open_machine
from memfit.mesh.agreement import agree
from memfit.mesh.collectives import Pending
from memfit.mesh.rank_group import DEFAULT_TIMEOUT_S, RankGroup, open_group
from memfit.optimizers import OptimizerDriver
from memfit.planner.problem import driver_of
from memfit.planner.together import prepare_together


@dataclass
class _ServerSide:
    """A server: its threads, its parameters, its limit."""

    serving: Serving
    served: ServedParameters
    machine: Machine


class ParameterServer:
    """This rank's part of a parameter server; made by `create`, on all ranks.

    A context manager: a server stays in it until all workers have left theirs. Then its parameters
    and optimizer states are ordinary ones again, with their last values.

    Attributes:
        rank: of this process.
        servers: ranks that hold parameters.
        workers: ranks that train.
        is_server: this process is one of the servers.
        is_worker: it is one of the workers.
        predicted_peak_bytes: on a server, the most that its tensors take.
    """

    def __init__(
        self,
        rank: int,
        servers: Sequence[int],
        workers: Sequence[int],
        side: _ServerSide | WorkerLinks,
        predicted_peak_bytes: int,
    ) -> None:
        self.rank = rank
        self.servers = tuple(servers)
        self.workers = tuple(workers)
        self.is_server = isinstance(side, _ServerSide)
        self.is_worker = not self.is_server
        self.predicted_peak_bytes = predicted_peak_bytes
        self._side: _ServerSide | WorkerLinks | None = side
        self._lost: tuple[int, ...] = ()
        self._stalest = 0

    def __repr__(self) -> str:
        kind = "server" if self.is_server else "worker"
        return f"<memfit parameter server: rank {self.rank}, a {kind}; servers {list(self.servers)}, workers {list(self.workers)}>"

    def push(self, index: int, gradient: torch.Tensor | None, *, async_op: bool = False) -> Pending[None]:
        """Sends a gradient to the server that has the parameter.

        Args:
            index: of the parameter, in `model.parameters()`.
            gradient: of its shape and dtype; None if this worker has not used the parameter.
            async_op: returns at once. The gradient must stay as it is until the result was waited
                for.

        Returns:
            What to wait for; nothing is left to wait for unless `async_op`.

        Raises:
            UsageError: this rank is a server, or the optimizer does not update the parameter, or
                the gradient is another one.
            PeerError: the server was lost.
        """
        pending = self._links().push(index, gradient)
        if not async_op:
            pending.wait()
        return pending

    def pull(self, index: int, into: torch.Tensor | None = None, *, async_op: bool = False) -> Any:
        """Gets a parameter's weights, with the pushes that the staleness promises.

        Args:
            index: of the parameter, in `model.parameters()`.
            into: a tensor of its shape and dtype that is filled, the parameter itself for example;
                None: a new one.
            async_op: returns a `Pending` of the tensor at once.

        Raises:
            UsageError: this rank is a server, or there is no such parameter.
            PeerError: the server failed, with its text, or was lost.
        """
        pending = self._links().pull(index, into)
        return pending if async_op else pending.wait()

    @property
    def stalest_pull(self) -> int:
        """On a worker, by how many clocks its stalest pull missed pushes of another one."""
        return self._side.stalest if isinstance(self._side, WorkerLinks) else self._stalest

    @property
    def lost_workers(self) -> tuple[int, ...]:
        """On a server, the workers that ended without leaving; the others go on without them."""
        return tuple(self._side.serving.lost) if isinstance(self._side, _ServerSide) else self._lost

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of values that this rank has (received, sent)."""
        side = self._side
        if isinstance(side, _ServerSide):
            return side.serving.received, side.serving.sent
        return (0, 0) if side is None else (side.received, side.sent)

    def close(self, *, restore: bool = True) -> None:
        """Ends this rank's part: a worker leaves, a server waits until all have left. May be
        repeated.

        Args:
            restore: on a server, False gives up what rests in its homes; True makes parameters and
                states ordinary ones again, in memory, without the limit.

        Raises:
            PeerError: on a worker, a server had failed.
            Exception: on a server, what it failed by.
        """
        side, self._side = self._side, None
        if isinstance(side, WorkerLinks):
            self._stalest = side.stalest
            side.leave()
        elif side is not None:
            try:
                side.serving.wait()
            except BaseException as error:
                # The homes stay: threads may be receiving into their memory still.
                side.serving.fail(error)
                raise
            self._lost = tuple(side.serving.lost)
            failure = side.serving.failure
            # First: all weights and states at once may be above the limit.
            side.machine.hard_limit.disarm()
            side.served.close(restore=restore and failure is None)
            if failure is not None:
                raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        side = self._side
        if isinstance(side, _ServerSide):
            side.serving.fail(error)
        try:
            self.close()
        except BaseException as other:  # noqa: BLE001, added to the error that leaves
            if other is not error:
                error.add_note(f"and at the end of the parameter server: {type(other).__name__}: {other}")

    def _links(self) -> WorkerLinks:
        if isinstance(self._side, WorkerLinks):
            return self._side
        raise UsageError(
            "the parameter server was closed"
            if self._side is None
            else f"rank {self.rank} is a server: workers push and pull"
        )


def create(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    servers: int | Sequence[int] = 1,
    staleness: int = 0,
    home: str | None = None,
    limit: int | str | None = None,
    directory: str | Path | None = None,
    emulate_device: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ParameterServer:
    """Makes some of the ranks servers of a model's parameters, and the others workers; all ranks
    call it, with models of the same shapes.

    Each server has a part of the parameters: their weights, sums of gradients and states of the
    optimizer, whose class updates them there, with the settings that its groups have when a
    gradient comes. Its hooks and schedulers are not called. Buffers of the model are not served.

    Gradients of one clock are added up: with a mean over the rows of a worker, push that of
    `loss * own_rows / all_rows`.

    Args:
        model: on servers, the values to begin with; on workers, an ordinary model.
        optimizer: over the model's parameters. On workers it is not used.
        servers: how many of the first ranks are servers, or which ranks.
        staleness: 0: synchronous, the same bits as data parallel. s: a pull may miss the last s
            pushes of other workers.
        home: tier of the servers' parameters and states: "device" or "disk"; None: the device, or
            the disk if they do not fit the limit there.
        limit: of each server process, as in `memfit.fit`.
        directory: of homes on disk.
        emulate_device: the limit counts tensors alone.
        timeout_s: a worker that sends nothing for so long counts as lost; so does a server whose
            answer does not come.

    Raises:
        UsageError: there are too few ranks, the ranks ask for different things, or an argument is
            invalid.
        UnsupportedError: an optimizer that needs all parameters at once; a server's model that is
            not in host memory.
        DoesNotFitError: the limit is below what the process holds.
    """
    if staleness < 0:
        raise UsageError(f"staleness is a number of clocks, not {staleness}")
    if home not in (None, "device", "disk"):
        raise UsageError(f"home is 'device', 'disk' or None, not {home!r:.80}")
    ranks = open_group()
    try:
        chosen = _chosen(servers, ranks)
        parameters = dict(enumerate(model.named_parameters()))
        agree(ranks, "memfit.parameter_server.create", digest=_described(parameters, chosen, staleness))
        return _create(
            ranks, chosen, model, optimizer, parameters, staleness, home, Limits.read(limit), directory,
            emulate_device=emulate_device, timeout_s=timeout_s,
        )  # fmt: skip
    finally:
        # From here on each worker and server has a connection of its own: a rank that is lost is
        # no error of the others.
        ranks.close()


def _create(
    ranks: RankGroup,
    servers: Sequence[int],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[int, tuple[str, torch.nn.Parameter]],
    staleness: int,
    home: str | None,
    limits: Limits,
    directory: str | Path | None,
    *,
    emulate_device: bool,
    timeout_s: float,
) -> ParameterServer:
    workers = [rank for rank in range(ranks.size) if rank not in servers]
    owners = divided({index: p.nbytes for index, (_, p) in parameters.items()}, servers)
    pairs = ranks.watched(lambda: _connect(ranks.rank, servers, workers, timeout_s))
    with ExitStack() as stack:
        for pair in pairs.values():
            stack.callback(pair.close)

        def prepare() -> tuple[_ServerSide | WorkerLinks, int]:
            driver = driver_of(optimizer, model)
            if ranks.rank not in servers:
                links = {server: ServerLink(server, pair, timeout_s) for server, pair in pairs.items()}
                return WorkerLinks(parameters, set(driver.names), owners, links), 0
            own = {index: named for index, named in parameters.items() if owners[index] == ranks.rank}
            return _serve(own, optimizer, driver, pairs, staleness, home, limits, directory, emulate_device)

        name = "memfit.parameter_server.create"
        side, predicted = prepare_together(ranks, name, prepare)
        agree(ranks, name)
        stack.pop_all()
    return ParameterServer(ranks.rank, servers, workers, side, predicted)


def _serve(
    own: Mapping[int, tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    driver: OptimizerDriver,
    pairs: Mapping[int, Pair],
    staleness: int,
    home: str | None,
    limits: Limits,
    directory: str | Path | None,
    emulate_device: bool,  # noqa: FBT001, in this module
) -> tuple[_ServerSide, int]:
    """Moves a server's parameters home under its limit, and begins to answer."""
    if any(p.device.type != "cpu" for _, p in own.values()):
        raise UnsupportedError("a server keeps parameters in host memory or on disk: build its model on the processor")
    device = torch.device("cpu")
    check_limit(limits, device, is_emulated=emulate_device)
    machine = open_machine(device, limits, is_emulated=emulate_device)
    workers = len(pairs)
    adds = staleness == 0 and workers > 1
    resting = home_bytes(driver, own, arrivals=workers if adds else 0)
    staged = staged_bytes(driver, own, workers, adds=adds)
    room = machine.budget([p for _, p in own.values()]).tensor_bytes
    if home is None:
        home = "device" if room is None or resting + staged <= room else "disk"
    predicted = staged + (resting if home == "device" else 0)
    if room is not None and predicted > room:
        raise DoesNotFitError(
            f"the server's parameters take {format_bytes(predicted)} with homes on {home}, and its limit leaves "
            f"{format_bytes(room)}: use home='disk', more servers, or a larger limit",
            smallest_limit_bytes=None,
        )
    served = ServedParameters(own, optimizer, driver, Tier(home), directory, workers=workers, adds=adds)
    try:
        machine.hard_limit.arm()
    except BaseException:
        served.close(restore=True)
        raise
    return _ServerSide(Serving(served, pairs, staleness), served, machine), predicted


def _chosen(servers: int | Sequence[int], ranks: RankGroup) -> tuple[int, ...]:
    chosen = tuple(range(servers)) if isinstance(servers, int) else tuple(sorted(set(servers)))
    if not chosen or len(chosen) >= ranks.size or not set(chosen) <= set(range(ranks.size)):
        raise UsageError(
            f"servers={servers!r} of {ranks.size} ranks: at least one is a server and at least one a worker (start them with torchrun)"
        )
    return chosen


def _connect(rank: int, servers: Sequence[int], workers: Sequence[int], timeout_s: float) -> dict[int, Pair]:
    """Connects each worker to each server; all ranks call it.

    Returns:
        By the other rank, the connections of this one.
    """
    found: dict[int, Pair] = {}
    for server in servers:
        for worker in workers:
            # Of all ranks, in one order: torch.distributed numbers groups by how many were made.
            group = dist.new_group([server, worker], timeout=timedelta(seconds=timeout_s), backend="gloo")
            if rank == server and isinstance(group, dist.ProcessGroup):
                found[worker] = Pair(group, group.rank() ^ 1)
            elif rank == worker and isinstance(group, dist.ProcessGroup):
                found[server] = Pair(group, group.rank() ^ 1)
    return found


def _described(parameters: Mapping[int, tuple[str, torch.nn.Parameter]], servers: Sequence[int], staleness: int) -> str:
    """Describes what must be equal on all ranks."""
    lines = [f"servers {list(servers)}", f"staleness {staleness}"]
    return "\n".join([*lines, *(f"{name} {tuple(p.shape)} {p.dtype} {p.stride()}" for name, p in parameters.values())])
