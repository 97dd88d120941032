"""`infer`: forward passes and generation with a model that may be larger than memory.

In: a model, or a directory with one. Out: a context in which the model's own `forward` and
`generate` work, with weights streamed from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from memfit import devices
from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.limits import Limits, format_bytes, parse_bytes
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import shortfall_bytes
from memfit.devices.kernel import limit_breaches, refusal_words
from memfit.engine.caches import OffloadedCaches
from memfit.engine.housing import House
from memfit.engine.modules import ModuleNotes
from memfit.engine.sites import Site
from memfit.engine.streaming import WeightStream
from memfit.files.origin import build_empty
from memfit.files.pretrained import pretrained_builder
from memfit.files.weight_sources import WeightSources, open_sources
from memfit.homes.factories import own_factories
from memfit.homes.offloaded import HomePool, HostPool, ScratchPool
from memfit.homes.weights import BlockWeights
from memfit.job.interrupts import Interrupts
from memfit.machine.hard_limit import Session, refuse_held
from memfit.machine.limits_of_process import check_limit
from memfit.machine.machine import Machine, device_of, guard, open_machine
from memfit.machine.probing import disk_directory
from memfit.store import DiskIO, ScratchFile
from memfit.tensors.guard import is_away
from memfit.tensors.one_call import OneCall
from memfit.trace.blocks import find_blocks
from memfit.trace.splitting import evaluating

_ON_DISK = BlockPlan(weight_home=Tier.DISK)


class Inference:
    """Session of inference with streamed weights; see `infer`.

    Attributes:
        model: call it, or its `generate`.
        weight_bytes: peak bytes of weights on the device: those of two successive calls, and those
            that stay.
        cache_limit_bytes: bytes that KV caches may take on the device before their layers are
            offloaded; None: no limit.
    """

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an inference session cannot be pickled or copied: its files, threads and hooks are of this process; call memfit.infer where it is wanted"
        )

    def __init__(
        self,
        model: nn.Module,
        weight_bytes: int,
        machine: Machine,
        house: House,
        weights: WeightStream,
        caches: OffloadedCaches | None,
    ) -> None:
        self.model = model
        self.weight_bytes = weight_bytes
        self.cache_limit_bytes = None if caches is None else caches.limit_bytes
        self._machine = machine
        self._house = house
        self._weights = weights
        self._caches = caches
        self._groups = OneCall()

    def together(self, requests: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs several requests concurrently, so that weights are read once for all of them: all
        pass a block before any enters the next.

            generate = session.model.generate
            answers = session.together([lambda p=p: generate(p) for p in prompts])

        Each request computes the same as alone, bit for bit, whatever the shapes of the others (no
        padding). If several requests draw random numbers, the m-th uses stream m of
        `memfit.microbatch_streams(len(requests))`, or the seed that it sets itself.

        Memory: the weights of two successive blocks; the activations of one request inside a block,
        and of all at its entry; the caches of all.

        Args:
            requests: functions without arguments that call the model.

        Returns:
            Their results, in order.

        Raises:
            Any error of a request, which ends the others too.
        """
        types = ("cpu", self._machine.device.type) if devices.is_accelerator(self._machine.device) else ("cpu",)
        with self._groups.enter("session.together"):
            return self._weights.together(list(requests), device_types=types, modules=ModuleNotes(self.model))

    @property
    def cache_bytes_per_token(self) -> int | None:
        """Bytes of keys and values of one token of one row in all layers, from the configuration of
        a transformers model; None if that does not say.

        An encoder's tokens take as much as the decoder's in the layers that look at them. Models
        that keep less for some layers (sliding windows) take less.
        """
        return _cache_bytes_per_token(self.model)

    @property
    def cache_moved_bytes(self) -> tuple[int, int]:
        """(read, written) bytes of caches that were offloaded and reloaded."""
        return (0, 0) if self._caches is None else (self._caches.moved_bytes[0], self._caches.moved_bytes[1])

    @property
    def measured_peak_bytes(self) -> int:
        """After the context: the peak inside it, and of loading before: of the process without a
        GPU, else of the device.
        """
        return self._machine.measured_peak_bytes()

    @property
    def read_bytes(self) -> int:
        """Bytes read from disk so far."""
        return sum(self._house.bytes_moved[0].values())


@contextmanager
def infer(
    model: nn.Module | str | Path,
    *,
    limit: int | str | None = None,
    weights: str | Path | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    cache_limit: int | str | None = None,
    directory: str | Path | None = None,
    enforce: bool = True,
) -> Iterator[Inference]:
    """Context for forward passes and generation in constant memory: weights are read from disk
    block by block, and at most two blocks are on the device.

        with memfit.infer("path/of/a/model", limit="1GiB") as session:
            tokens = session.model.generate(prompt, max_new_tokens=50)

    Inside, gradients are off and the model is in evaluation mode. Results equal plain PyTorch's bit
    for bit. Weights are read once for each forward pass, for all rows of a batch and all requests
    of `session.together`. Activations are the program's own and count against the limit. KV caches
    (transformers' dynamic ones) are on the device up to `cache_limit`; beyond it their layers are
    offloaded, to disk or to host memory beside a GPU, and reloaded when they are used.

    Memory: the weights of two successive blocks, and those that are read outside of all calls;
    activations; caches up to their limit, at least those of two layers. Independent of the model's
    depth.

    Args:
        model: a module, in memory or built by `memfit.empty`; or a directory written by
            `save_pretrained`, whose model is built without its weights.
        limit: as in `memfit.fit`. None: nothing is enforced; weights are streamed nevertheless.
        weights: files to read the weights from, as in `memfit.fit`; by default the directory given
            as `model`.
        blocks: names or modules that are to be the blocks.
        cache_limit: bytes of keys and values on the device. None: half of what the limit leaves
            beside weights, process and reserve (the other half is for activations); without a
            limit, no bound. `session.cache_bytes_per_token` tells the bytes of a token.
        directory: where homes on disk are made; temporary by default. They take the model's bytes
            once.
        enforce: True arms the limit in the allocator, so that passing it is an error at the
            allocation. False: it is only reported.

    Yields:
        The session. At its end a model that was in memory is restored; the weights of one that was
        not are deleted with their homes.

    Raises:
        DoesNotFitError: two blocks, or `cache_limit` beside them, do not fit.
        LimitBreachError: activations passed the limit.
        UsageError: an argument is invalid, or the layout of the files is unknown.
        AwayError: the model reads a weight outside of the call of its block; name the module that
            reads it in `blocks=`.
        StoreError: the disk failed.
    """
    was_whole = isinstance(model, nn.Module) and not any(is_away(p) for p in model.parameters())
    if not isinstance(model, nn.Module):
        weights = model if weights is None else weights
        model = build_empty(pretrained_builder(model), draws=False)
    refuse_held(model)
    device, limits = device_of(model), Limits.read(limit, None, None)
    check_limit(limits, device, is_emulated=False)
    machine = open_machine(device, limits)
    block_map = find_blocks(model, blocks)
    parts = [BlockWeights(i, block.name, block.parameters) for i, block in enumerate(block_map.blocks)]
    sites = [Site(name=site.name, module=site.module, blocks=site.blocks) for site in block_map.sites]
    weight_bytes = most_weights(sites, parts, {i for i, block in enumerate(block_map.blocks) if block.is_spanning})
    _check_fits(machine, model, weight_bytes)
    plan = Plan(blocks={block.name: _ON_DISK for block in block_map.blocks if not block.is_spanning})
    interrupts = Interrupts()
    with ExitStack() as stack:
        stack.callback(machine.hard_limit.disarm)
        stack.callback(Session(model).end)
        with machine.phases("load"), guard(machine, "load", enforces=enforce), ExitStack() as loading:
            house = House(
                plan, parts, {}, own_factories(machine.device, directory), keeps_gradients=False, keeps_norms=False
            )
            stack.callback(house.close)
            if was_whole:
                # The stack calls in reverse: the limit goes before all weights come back at once.
                stack.callback(house.give_back)
                stack.callback(machine.hard_limit.disarm)
            house.move_in(WeightSources(open_sources(model, weights, loading)).bring)
            house.first_commit()
        machine.forget_peak()
        if enforce:
            machine.hard_limit.arm()
        allowed = None if cache_limit is None else parse_bytes(cache_limit)
        with stream(
            model, sites, parts, machine, house, interrupts, weight_bytes, cache_limit=allowed, directory=directory
        ) as session:
            yield session


@contextmanager
def stream(
    model: nn.Module,
    sites: Sequence[Site],
    blocks: Sequence[BlockWeights],
    machine: Machine,
    house: House,
    interrupts: Interrupts,
    weight_bytes: int,
    *,
    cache_limit: int | None,
    directory: str | Path | None,
) -> Iterator[Inference]:
    """Context for forward passes of the user's own inside the limit: evaluation mode, no gradients,
    streamed weights, interrupts between two visits.

    Raises:
        LimitBreachError: the limit was hit.
        DoesNotFitError: `cache_limit` is more than the weights leave of it.
    """
    travelling = sum(block.nbytes for block in blocks if block.travels)
    resident = sum(block.nbytes for block in blocks) - travelling
    if machine.hard_limit.armed_bytes is not None:
        coming = max(0, weight_bytes - resident)
        left = max(0, machine.hard_limit.armed_bytes - machine.meter.live_bytes() - coming)
        cache_limit = left // 2 if cache_limit is None else cache_limit
        _check_caches_fit(machine, cache_limit, left)
    with ExitStack() as stack:
        stack.enter_context(interrupts.held())
        stack.enter_context(machine.phase("inference"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        caches = None
        if cache_limit is not None:
            caches = OffloadedCaches(_cache_rests(machine, directory, stack), cache_limit)
        weights = WeightStream(sites, blocks, calls=interrupts.calls, caches=caches, observe=interrupts.check)
        breaches = limit_breaches(
            "inference",
            lambda error: _breach_text(error, machine, weights.at, weight_bytes, caches),
            lambda: weights.at,
        )
        with breaches, weights:
            yield Inference(model, weight_bytes, machine, house, weights, caches)


def _cache_rests(machine: Machine, directory: str | Path | None, stack: ExitStack) -> HomePool:
    """Makes homes for offloaded caches: in host memory beside a device, else in a scratch file."""
    if machine.has_host:
        side = devices.of(machine.device).new_stream(machine.device) if devices.is_accelerator(machine.device) else None
        host = HostPool(machine.device, stream=side, ledger=machine.host_ledger)
        stack.callback(host.close)
        return host
    io = DiskIO()
    stack.callback(io.close)
    return ScratchPool(stack.enter_context(ScratchFile(disk_directory(directory), io, tag="cache")))


def _check_caches_fit(machine: Machine, cache_limit: int, left: int) -> None:
    limit = machine.limits.device_bytes
    if limit is None or cache_limit <= left:
        return
    needed = limit + cache_limit - left
    raise DoesNotFitError(
        f"cache_limit={format_bytes(cache_limit)} does not fit: beside weights, process and reserve {format_bytes(left)} are left of the limit of "
        f"{format_bytes(limit)}, for caches and activations. Give less ({format_bytes(left // 2)} is what is taken where nothing is given), or a limit of "
        f"at least {format_bytes(needed)} and what activations take",
        smallest_limit_bytes=needed,
    )


def _breach_text(
    error: BaseException, machine: Machine, at: str, weight_bytes: int, caches: OffloadedCaches | None
) -> str:
    limit = machine.limits.device_bytes
    held = f"weights {format_bytes(weight_bytes)} at most"
    if caches is not None:
        held += f", caches of keys and values {format_bytes(caches.here_bytes)}"
    return (
        f"the limit{'' if limit is None else ' of ' + format_bytes(limit)} was hit at {at}: {refusal_words(error)} Weights take two blocks at most "
        f"({held}); the rest is activations. {_way_out(shortfall_bytes(error), limit, caches)}"
    )


def _way_out(missing: int | None, limit: int | None, caches: OffloadedCaches | None) -> str:
    """Says what would have let the refused allocation pass, in figures if they are known."""
    ways = ["Try fewer rows or tokens at a time"]
    can_shrink = caches is not None and caches.here_bytes > caches.least_bytes
    if missing is None or limit is None:
        ways += ["a smaller cache_limit"] if can_shrink else []
        return ", or ".join([*ways, "a larger limit"])
    if caches is not None and caches.here_bytes - missing >= caches.least_bytes:
        ways.append(f"a cache_limit of at most {format_bytes(caches.here_bytes - missing)}")
    return ", or ".join([*ways, f"a limit of at least {format_bytes(limit + missing)}"])


def _cache_bytes_per_token(model: Any) -> int | None:
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "get_text_config", None)):
        return None
    text: Any = config.get_text_config(decoder=True)
    layers = getattr(text, "num_decoder_layers", None) or getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)):
        return None
    size = getattr(text, "head_dim", None) or getattr(text, "d_kv", None) or width // heads
    kept = getattr(text, "num_key_value_heads", None) or heads
    return 2 * layers * kept * size * next(p for p in model.parameters() if p.is_floating_point()).dtype.itemsize


def most_weights(sites: Sequence[Site], parts: Sequence[BlockWeights], stays: Collection[int]) -> int:
    """Returns the bytes of the blocks that stay and of the two successive calls that need most.

    Args:
        sites: the call sites.
        parts: by the sites' block indices.
        stays: indices of blocks that live on the device.
    """
    needs = {frozenset(site.blocks) - frozenset(stays) for site in sites}
    pairs = [a | b for a, b in combinations(needs, 2)] or list(needs)
    return sum(parts[i].nbytes for i in stays) + max((sum(parts[i].nbytes for i in pair) for pair in pairs), default=0)


def _check_fits(machine: Machine, model: nn.Module, weight_bytes: int) -> None:
    limit = machine.limits.device_bytes
    if limit is None:
        return
    budget = machine.budget((p for p in model.parameters() if not is_away(p)), model.buffers())
    needed = budget.base_bytes + budget.reserve_bytes + weight_bytes
    if needed > limit:
        held = "of the process" if machine.counts_process else "of other tensors"
        raise DoesNotFitError(
            f"streaming needs {format_bytes(needed)} before any activation: {format_bytes(weight_bytes)} of weights, "
            f"{format_bytes(budget.base_bytes)} {held}, {format_bytes(budget.reserve_bytes)} for scratch of kernels; the limit is "
            f"{format_bytes(limit)}. Raise it, or name smaller modules in blocks=",
            smallest_limit_bytes=needed,
        )
