"""`infer`: forward passes and generation with a model that may be larger than memory.

In: a model, or a directory with one. Out: a context inside which the model's own `forward` and `generate` work, with weights that stream from disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from memfit.api.interrupts import Interrupts
from memfit.api.machine import Machine, device_of
from memfit.api.sources import bring_from, open_sources
from memfit.api.splitting import evaluating
from memfit.core.errors import DoesNotFitError, LimitBreachError
from memfit.core.limits import Limits
from memfit.core.plan import BlockPlan, Plan, Tier
from memfit.core.units import format_bytes
from memfit.profiling.blocks import BlockMap, find_blocks
from memfit.recipes.pretrained import pretrained_builder
from memfit.runtime.birth import build_empty
from memfit.runtime.guard import is_away
from memfit.runtime.housing import House
from memfit.runtime.sites import Site
from memfit.runtime.streaming import WeightStream
from memfit.runtime.weights import BlockWeights

_ON_DISK = BlockPlan(weight_home=Tier.DISK)


class Inference:
    """A model whose weights stream; see `infer`.

    Attributes:
        model: call it, or its `generate`.
        weight_bytes: the most that weights take on the device at any time: those of two successive calls, and those that stay.
    """

    def __init__(self, model: nn.Module, weight_bytes: int, machine: Machine, house: House) -> None:
        self.model = model
        self.weight_bytes = weight_bytes
        self._machine = machine
        self._house = house

    @property
    def measured_peak_bytes(self) -> int:
        """After the context: the peak inside it, and of loading before: of the process without a GPU, else of the device."""
        return self._machine.measured_peak_bytes()

    @property
    def read_bytes(self) -> int:
        """Read from disk so far."""
        return sum(self._house.bytes_moved[0].values())


@contextmanager
def infer(
    model: nn.Module | str | Path,
    *,
    limit: int | str | None = None,
    weights: str | Path | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    directory: str | Path | None = None,
    enforce: bool = True,
) -> Iterator[Inference]:
    """Gives a context for forward passes and generation in constant memory: weights come from disk, block by block, and two blocks are here at most.

        with memfit.infer("path/of/a/model", limit="1GiB") as session:
            tokens = session.model.generate(prompt, max_new_tokens=50)

    Inside, gradients are off and the model is in evaluation mode. What it computes is what it computes plainly, bit for bit. Weights travel once a forward pass, for
    all rows of a batch: a batch of requests costs the disk what one request costs. Activations and the cache of keys and values are the program's own and count.

    Memory: the weights of two successive blocks, and those that no module's call brackets; activations. The same at any depth.

    Args:
        model: a module, in memory or built by `memfit.empty`; or a directory as `save_pretrained` writes it, whose model is built without its weights.
        limit: as in `memfit.fit`. None: nothing is enforced, and weights stream all the same.
        weights: a directory of safetensors files to take the weights from; for a directory as `model`, that one.
        blocks: names or modules that are to be the blocks.
        directory: where homes on disk are made; temporary by default. They take the model's bytes once.
        enforce: as in `memfit.fit`.

    Yields:
        The session. At the end a model that was in memory is there again; the weights of one that was not are gone with their homes.

    Raises:
        DoesNotFitError: two blocks do not fit. LimitBreachError: activations passed the limit. UsageError: arguments; an unknown layout of files.
        AwayError: the model reads a weight outside of the call of its block: name the module that reads it in `blocks=`. StoreError: the disk.
    """
    was_whole = isinstance(model, nn.Module) and not any(is_away(p) for p in model.parameters())
    if not isinstance(model, nn.Module):
        weights = model if weights is None else weights
        model = build_empty(pretrained_builder(model), draws=False)
    machine = Machine(device_of(model), Limits.read(limit, None, None), is_emulated=False)
    block_map = find_blocks(model, blocks)
    parts = [BlockWeights(i, block.name, block.parameters) for i, block in enumerate(block_map.blocks)]
    weight_bytes = _most_weights(block_map, parts)
    _check_fits(machine, model, weight_bytes)
    plan = Plan(blocks={block.name: _ON_DISK for block in block_map.blocks if not block.is_spanning})
    interrupts = Interrupts()
    with ExitStack() as stack:
        stack.callback(machine.disarm)
        with machine.phases("load"), machine.guard("load", enforces=enforce), ExitStack() as loading:
            house = House(
                plan, parts, {}, device=machine.device, directory=directory, keeps_gradients=False, keeps_norms=False
            )
            stack.callback(house.close)
            if was_whole:
                stack.callback(house.give_back)
                stack.callback(machine.disarm)
            bring = bring_from(open_sources(model, weights, loading))
            house.move_in(bring)
            house.first_commit()
        machine.forget_peak()
        if enforce:
            machine.arm()
        sites = [Site(name=site.name, module=site.module, blocks=site.blocks) for site in block_map.sites]
        with stream(model, sites, parts, machine, interrupts):
            yield Inference(model, weight_bytes, machine, house)


@contextmanager
def stream(
    model: nn.Module,
    sites: Sequence[Site],
    blocks: Sequence[BlockWeights],
    machine: Machine,
    interrupts: Interrupts,
) -> Iterator[None]:
    """Forward passes of the user's own inside the limit: evaluation mode, no gradients, weights streamed, interrupts between two visits.

    Raises:
        LimitBreachError: the limit.
    """
    with (
        interrupts.held(),
        machine.phases("inference"),
        torch.no_grad(),
        evaluating(model),
        WeightStream(sites, blocks, observe=interrupts.check) as weights,
    ):
        try:
            yield
        except torch.OutOfMemoryError as error:
            limit = machine.limits.device_bytes
            raise LimitBreachError(
                f"the limit{'' if limit is None else ' of ' + format_bytes(limit)} was hit at {weights.at}: {str(error).splitlines()[0]} Weights take "
                "two blocks at most; the rest is activations and the cache of keys and values. Try fewer rows or tokens, or a larger limit",
                phase="inference",
                where=weights.at,
                torn=False,
            ) from error


def _most_weights(block_map: BlockMap, parts: Sequence[BlockWeights]) -> int:
    """Bytes of the blocks that stay, and of the two calls that need most together."""
    stays = {i for i, block in enumerate(block_map.blocks) if block.is_spanning}
    needs = {frozenset(site.blocks) - stays for site in block_map.sites}
    pairs = [a | b for a, b in combinations(needs, 2)] or list(needs)
    return sum(parts[i].nbytes for i in stays) + max((sum(parts[i].nbytes for i in pair) for pair in pairs), default=0)


def _check_fits(machine: Machine, model: nn.Module, weight_bytes: int) -> None:
    limit = machine.limits.device_bytes
    if limit is None:
        return
    budget = machine.budget(sum(p.nbytes for p in model.parameters() if not is_away(p)))
    needed = budget.base_bytes + budget.reserve_bytes + weight_bytes
    if needed > limit:
        raise DoesNotFitError(
            f"streaming needs {format_bytes(needed)} before any activation: {format_bytes(weight_bytes)} of weights, "
            f"{format_bytes(budget.base_bytes)} of the process, {format_bytes(budget.reserve_bytes)} for scratch of kernels; the limit is "
            f"{format_bytes(limit)}. Raise it, or name smaller modules in blocks=",
            smallest_limit_bytes=needed,
        )
