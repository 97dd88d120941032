"""Backward passes of one run: of tails, of all microbatches jointly from the cuts of their tails,
or of whole losses.

In: losses with their factors. Out: gradients on the parameters; hooks tell the run meanwhile which
call autograd has come to.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from memfit import devices
from memfit.core.errors import MemfitWarning, UnsupportedError, UsageError
from memfit.core.schedule import Schedule
from memfit.engine.tail import CutEdge, TailAliases, differentiate_tail, hooks_of, withheld
from memfit.engine.work import EngineParts
from memfit.tensors.autograd_graph import sequence_number

# Seeds of backward: each microbatch's loss, and its factor.
#
# In: results of the user's function. Out: scalar losses and their factors, which make the weighted
# mean of the whole batch.
#
# [Note: counts that come late]
# A loss that returns (sum, count) is divided by the total of the counts, which is known when the
# last microbatch has run forward. Where all of them begin backward together, that is in time, and
# the gradient is that of `sum / total`. Where one goes back before the next has run (one after the
# other, or a tail at once), its sum begins with a power of two near the inverse of the total,
# guessed from the first count, so that fp16 sees gradients of the usual size and nothing is
# rounded; what is missing, guess over total, multiplies the finished gradients on their way to the
# update, with what unscales and clips them. No update begins before the last microbatch went back.
# These are the same sums with one rounding more: *reordered*.


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Losses of some microbatches, with their graphs, and the gradients that they begin with.

    Attributes:
        losses: scalars.
        shares: weight of each in the whole batch's loss; None: 1.
        factors: the weights as tensors like the losses.
    """

    losses: list[torch.Tensor]
    shares: list[float | None]
    factors: list[torch.Tensor | None]


class Counts:
    """Counts of the losses of one step. See [Note: counts that come late].

    Args:
        microbatches: number in the step.
        over_ranks: adds a number up over all processes that train together; called once when the
            first counts are known, and once when all are.
    """

    def __init__(self, microbatches: int, over_ranks: Callable[[float], float] | None = None) -> None:
        self._over_ranks = over_ranks or float
        self._missing = microbatches
        self._total = 0.0
        self._divisor: float | None = None

    def add(self, counts: Sequence[float]) -> float:
        """Adds the counts of the microbatches that begin backward next.

        Returns:
            The factor that their sums begin with.

        Raises:
            UsageError: a count is invalid, or all are known and add up to 0.
        """
        if not all(0.0 <= count < math.inf for count in counts):
            raise UsageError(
                f"a loss that returns (sum, count) must count from 0 up; it gave {list(counts)}. Return the number of "
                "targets that the sum is of"
            )
        self._missing -= len(counts)
        self._total += sum(counts)
        if self.is_complete:
            self._total = self._over_ranks(self._total)
        if self.is_complete and not self._total > 0.0:
            raise UsageError(
                "the loss returned (sum, count), and the counts of the whole batch add up to 0: there is no mean. Skip a batch "
                "without targets"
            )
        if self._divisor is None:
            so_far = self._total if self.is_complete else self._over_ranks(self._total)
            guess = so_far / len(counts) * (len(counts) + self._missing)
            self._divisor = self._total if self.is_complete else 2.0 ** round(math.log2(max(guess, 1.0)))
        return 1.0 / self._divisor

    @property
    def is_complete(self) -> bool:
        """True if all microbatches were counted."""
        return self._missing == 0

    @property
    def share(self) -> float:
        """Weight of each sum in the mean, when all were counted."""
        assert self.is_complete
        return 1.0 / self._total

    @property
    def correction(self) -> float:
        """Factor by which gradients must be multiplied, when all were counted: 1 if all began
        backward together.
        """
        assert self.is_complete and self._divisor is not None
        return self._divisor / self._total


def seed(
    results: Sequence[Any], shares: Sequence[float] | None, *, counts: Counts, scale: float | None = None
) -> Seeds:
    """Returns losses and factors of microbatches that have run forward.

    Args:
        results: scalars, or pairs (sum, count).
        shares: loss weight of each scalar result; None for one microbatch: 1.
        counts: of the step; the counts of these results are added, if they have any.
        scale: factors are multiplied by it.

    Raises:
        UsageError: a loss is not a differentiable scalar, or its count is invalid.
    """
    losses: list[torch.Tensor]
    for result in results:
        check_result(result)
    if any(isinstance(r, tuple) for r in results):
        found_counts = [float(count) for _, count in results]
        if any(0.0 < count < 1.0 for count in found_counts):
            warnings.warn(
                f"the loss returned a pair whose second is {min(c for c in found_counts if c > 0.0):.6g}: memfit takes a pair for (sum, count) and divides by "
                "it. If it is a metric, such as an accuracy, return the loss alone",
                MemfitWarning,
                stacklevel=2,
            )
        share = counts.add(found_counts)
        losses, found = [loss for loss, _ in results], [share] * len(results)
    else:
        losses, found = list(results), [None] * len(results) if shares is None else list(shares)
    for loss in losses:
        check_loss(loss)
    return Seeds(
        losses=losses,
        shares=list(found),
        factors=[_factor(loss, share, scale) for loss, share in zip(losses, found, strict=True)],
    )


def _factor(loss: torch.Tensor, share: float | None, scale: float | None) -> torch.Tensor | None:
    if share is None and scale is None:
        return None
    # Each rounded before they are multiplied, as a loss that is multiplied with one and then with
    # the other is differentiated.
    share_of, scale_of = (
        torch.tensor(1.0 if x is None else x, dtype=loss.dtype, device=loss.device) for x in (share, scale)
    )
    return (scale_of * share_of).reshape(loss.shape)


def check_result(result: Any) -> None:
    """Checks that the user's function returned a tensor or (sum, count). Raises `UsageError`."""
    if isinstance(result, torch.Tensor):
        return
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor):
        problem = _not_a_count(result[1])
        if problem is None:
            return
        raise UsageError(
            f"loss(model, batch) returned a pair, which means (sum, count), but its second is {problem}: return the loss alone. What else the loop wants of a "
            "forward pass (outputs, an accuracy) the function can keep detached, in a list of the loop's; job.evaluate and job.inference() are for evaluation"
        )
    has_loss = (
        "loss" in result if isinstance(result, Mapping) else isinstance(getattr(result, "loss", None), torch.Tensor)
    )
    hint = "return its loss alone (output.loss)" if has_loss else "return the loss alone"
    raise UsageError(
        f"loss(model, batch) must return a scalar tensor, or (sum, count), not {_described(result)}: {hint}"
    )


def _not_a_count(value: Any) -> str | None:
    """Describes a value that cannot be a count; None if it can."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return f"a tensor of shape {tuple(value.shape)}"
        return "a tensor that requires gradients" if value.requires_grad else None
    return None if isinstance(value, int | float) else f"a {type(value).__name__}"


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, float | int):
        return f"a Python {type(value).__name__} (.item() or float() cuts the graph)"
    return f"a {type(value).__name__}"


def check_loss(loss: torch.Tensor) -> None:
    """Checks that a loss is one number that can be differentiated. Raises `UsageError`."""
    if loss.numel() != 1:
        raise UsageError(
            f"the loss function must return a scalar, not a tensor of shape {tuple(loss.shape)}: take its mean() or sum()"
        )
    if not loss.requires_grad:
        if not torch.is_grad_enabled():
            raise UsageError(
                "gradients are off where job.step is called (torch.no_grad, torch.inference_mode): call it outside of that"
            )
        raise UsageError(
            "the loss does not depend on any parameter that trains: nothing would be updated. Compute it from the model's output "
            "without detach(), and unfreeze a parameter (requires_grad_())"
        )


# Losses that leave the accelerator: the processor's part of each microbatch's backward runs before
# the joint backward.
#
# In: a microbatch's loss. Out: the edges at which gradients enter the accelerator, and these
# gradients.
#
# [Note: one ready queue]
# That one backward visits blocks in the reverse order of the forward rests on autograd's choice of
# the latest-made ready node (`engine.run`, [Note: who drives whom]). It chooses within one queue.
# Nodes of the processor have a queue of their own in the caller's thread: there the roots of
# several losses on the CPU would be handed over one by one, while the device's thread already takes
# whatever is ready, an earlier microbatch's first block if need be. Gradients would reach blocks
# that have been left, and been updated. So all roots of a joint backward lie on the accelerator. A
# detour over the processor in the middle of the graph has the same effect, cannot be cut off, and
# is refused.


def differentiate_on_host(loss: torch.Tensor, factor: torch.Tensor | None) -> tuple[CutEdge, ...]:
    """Runs the part of the graph back that lies between the loss and the accelerator.

    Args:
        loss: 0-d, with a graph.
        factor: what the loss is multiplied with before it is differentiated (0-d), or None for 1.

    Returns:
        The edges into the accelerator that received a gradient; the loss itself, with its factor,
        where it lies there.

    Raises:
        UnsupportedError: Parameters on the processor take part.
    """
    assert loss.grad_fn is not None
    # Already in the accelerator's queue: it may be a root as it is.
    if not _is_on_host(loss.grad_fn):
        gradient = torch.ones_like(loss) if factor is None else factor
        return (CutEdge(edge=GradientEdge(loss.grad_fn, loss.output_nr), gradient=gradient),)
    edges: dict[tuple[Any, int], GradientEdge] = {}
    seen, pending = {loss.grad_fn}, [loss.grad_fn]
    while pending:
        for node, number in pending.pop().next_functions:
            if node is None:
                continue
            if not _is_on_host(node):
                # Each edge once: autograd sums what arrives at it, in the order of a plain
                # backward.
                edges[node, number] = GradientEdge(node, number)
            elif not node.next_functions:
                raise UnsupportedError(
                    "the loss reads a parameter on the CPU while the model lies on an accelerator: make it a part of the model there, or freeze it "
                    "(requires_grad_(False))"
                )
            elif node not in seen:
                seen.add(node)
                pending.append(node)
    if not edges:
        # Nothing of the accelerator takes part: its parameters get no gradient, as in plain
        # PyTorch.
        return ()
    outputs = None if factor is None else [factor.to(loss.device)]
    # Now, in the caller's thread: these nodes would run in an order of their own beside those of
    # the accelerator.
    gradients = torch.autograd.grad([loss], list(edges.values()), grad_outputs=outputs, allow_unused=True)
    return tuple(CutEdge(edge=e, gradient=g) for e, g in zip(edges.values(), gradients, strict=True) if g is not None)


def refuse_detours(roots: Iterable[Any]) -> None:
    """Walks a graph, some microseconds a node, and refuses nodes of the processor in it. See [Note:
    one ready queue].

    Args:
        roots: nodes on the accelerator.

    Raises:
        UnsupportedError: The graph leaves the accelerator and comes back.
    """
    seen = set(roots)
    pending = list(seen)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is None or node in seen:
                continue
            if _is_on_host(node):
                raise UnsupportedError(
                    f"the model computes on the CPU in the middle ({node.name()}): microbatches that take turns would run back in an order that is not "
                    "sure. Keep the model on its device, or train with one microbatch: Plan(microbatches=1), or order='microbatch-major'"
                )
            seen.add(node)
            pending.append(node)


def _is_on_host(node: Any) -> bool:
    """Tells whether autograd runs the node in the caller's thread."""
    metadata = getattr(node, "_input_metadata", None)
    return bool(metadata) and not any(devices.is_accelerator(one.device) for one in metadata)


_NO_BYTES = ("storage of size 0", "data is not allocated yet")
"""Part of torch's message when it reads a tensor whose storage was freed."""


class BackwardPasses:
    """Passes of one run. See `engine.tail`, [Note: tail at once].

    Args:
        parts: of the engine.
        schedule: of the run.
        is_new: no run of this step has come to its end yet.

    Attributes:
        tail: first call of the tail; None: there is none.
        aliases: of weights that the tail shares with calls before it.
    """

    def __init__(self, parts: EngineParts, schedule: Schedule, *, is_new: bool) -> None:
        self.tail = schedule.tail
        self.aliases = _aliases(parts, schedule)
        self._blocks = parts.blocks
        self._has_accelerator = parts.has_accelerator
        self._is_new = is_new
        self._cuts: list[CutEdge] = []
        self._hooks_before_tail: list[dict[int, Any]] = []
        self._tail_began: dict[int, int] = {}

    @property
    def has_cuts(self) -> bool:
        """True if a tail has left gradients for a joint backward."""
        return bool(self._cuts)

    def is_in_tail(self, call: int) -> bool:
        """Tells whether the call belongs to the tail."""
        return self.tail is not None and call >= self.tail

    def begin_tail(self, microbatch: int) -> None:
        """Marks the beginning of a microbatch's tail: nodes that are made later belong to it, also
        if its first call is left out.
        """
        self._tail_began.setdefault(microbatch, sequence_number())

    def watch_cut(self, outputs: Iterable[torch.Tensor]) -> None:
        """Withholds the hooks on outputs of a call before the tail until the joint backward."""
        # The dictionaries, not the tensors: holding an output would keep its graph past the joint
        # backward.
        self._hooks_before_tail += [hooks_of(t) for t in outputs if t.grad_fn is not None]

    def run_tail(self, microbatch: int, seeds: Seeds) -> None:
        """Runs the backward of a microbatch's tail to its cut."""
        began = self._tail_began.get(microbatch, sequence_number())
        # Withheld: the tail's backward asks for the gradients of these tensors, which would advance
        # the list to their calls' backward too early.
        with withheld(self._hooks_before_tail), self._absent_weights_told():
            self._cuts.extend(differentiate_tail(seeds.losses.pop(), seeds.factors[0], began, self.aliases))
        # The next microbatch's tail makes aliases of its own.
        self.aliases.forget()

    def run_joint(self) -> None:
        """Runs one backward from the cuts of all microbatches."""
        # Off this object before autograd runs: nothing of the graph may outlive its backward.
        cuts, self._cuts = self._cuts, []
        self._run_from(cuts)

    def run_whole(self, seeds: Seeds) -> None:
        """Runs one backward of the sum of these losses."""
        if len(seeds.losses) > 1 and self._has_accelerator:
            # All roots must lie in the accelerator's queue. See `engine.backward`, [Note: one
            # ready queue].
            pairs = zip(seeds.losses, seeds.factors, strict=True)
            starts = [start for loss, factor in pairs for start in differentiate_on_host(loss, factor)]
            # The starts hold what is still needed; a loss would hold its whole graph.
            seeds.losses.clear()
            self._run_from(starts)
        else:
            with self._absent_weights_told():
                torch.autograd.backward(seeds.losses, seeds.factors)
            seeds.losses.clear()

    def _run_from(self, starts: list[CutEdge]) -> None:
        """Runs backward from these starts, and empties the list, so that nothing of the graph
        outlives its backward.
        """
        if self._has_accelerator and self._is_new:
            refuse_detours(start.edge.node for start in starts)
        edges, gradients = [start.edge for start in starts], [start.gradient for start in starts]
        # The caller's list: it would keep nodes and gradients past their backward.
        starts.clear()
        with self._absent_weights_told():
            torch.autograd.backward(edges, gradients)

    @contextmanager
    def _absent_weights_told(self) -> Iterator[None]:
        """Context that translates torch's error about a storage without bytes. See
        `engine.sites`,
        [Note: side tensors].
        """
        try:
            yield
        except RuntimeError as error:
            away = [block.name for block in self._blocks if block.travels and not block.is_here]
            if not away or not any(words in str(error) for words in _NO_BYTES):
                raise
            names = ", ".join(repr(name) for name in away[:3]) + (", ..." if len(away) > 3 else "")
            raise UnsupportedError(
                f"backward reads weights that are away (of {names}): in this step a gradient reached a call by a tensor that it does not return and that "
                "the traced batch gave none (kept by a hook or in a closure, for instance). Plan weight_home='device' for these blocks, or give `fit` a "
                "sample batch that takes this way, so that it is planned for"
            ) from error

    def forget(self) -> None:
        """Drops all references to the graph."""
        self._cuts.clear()
        self._hooks_before_tail.clear()
        self.aliases.forget()


def _aliases(parts: EngineParts, schedule: Schedule) -> TailAliases:
    if schedule.tail is None:
        return TailAliases((), set())
    calls = schedule.calls
    before = {b for call in calls[: schedule.tail] for b in call.blocks}
    tail_names = {call.site for call in calls[schedule.tail :]}
    return TailAliases(
        [site.module for site in parts.sites if site.name in tail_names],
        {id(slot.parameter) for b in before for slot in parts.blocks[b].slots},
    )
