"""The side of a worker: pushes and pulls, in order for each server, in a thread for each.

In: gradients, tensors to be filled. Out: `Pending` results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from memfit.core.errors import PeerError, UsageError
from memfit.distributed.collective_thread import CollectiveThread
from memfit.distributed.collectives import Pending
from memfit.parameter_server.pairs import Ask, Head, Pair

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
