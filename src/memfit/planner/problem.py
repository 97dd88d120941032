"""Problem: model, loss, optimizer and batch, as `fit`, `profile` and `advise` are asked it.

In: the user's model, optimizer, loss and batch, checked. Out: `Problem`, which gives profiles of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from torch import nn

from memfit import devices
from memfit.core.documents import PLAN_LIMIT_BYTES, read_document
from memfit.core.errors import AwayError, PlanError, TierUnavailableError, UnsupportedError, UsageError, shown
from memfit.core.hardware import Hardware
from memfit.core.layout import FIRST_PIECE_ELEMENTS, PIECE_ELEMENTS
from memfit.core.numerics import Wish, check_wish
from memfit.core.plan import Plan
from memfit.core.profile import BlockProfile, Profile, UpdateProfile
from memfit.core.storage_formats import (
    FP16_WEIGHTS,
    WITHOUT_MASTERS,
    ComputeDtype,
    FrozenFormat,
    StateFormat,
    encoded_sizes,
)
from memfit.core.tiers import is_processor
from memfit.devices.binding import Allocator, install
from memfit.engine.backward import check_result
from memfit.engine.caches import CacheChoice, CacheUse, HandedBackError, Noted, asks_for_caches, caches_in_training
from memfit.engine.causal_loss import chunked_head
from memfit.engine.loss_scaling import in_half
from memfit.engine.modules import cast_dtype, casting_inputs
from memfit.engine.vision import vision_way
from memfit.files.weight_sources import WeightsAside
from memfit.homes.encoded_weights import ENCODING_BYTES
from memfit.homes.optimizer_states import StoredStates, embedding_names, stored_states
from memfit.machine.machine import Machine, device_of
from memfit.optimizers import AwayStates, OptimizerDriver, UpdateKind
from memfit.planner.compiled_blocks import CompiledBlocks, with_compiled
from memfit.tensors.trees import tensors_in
from memfit.trace.batch import ByParts, RowPlaces, UncuttableError
from memfit.trace.blocks import BlockMap
from memfit.trace.cutting import MOST_MICROBATCHES, ByRows, ByUser, Cut, UserSplit, Whole, smaller_part, ways_of
from memfit.trace.measuring import Workspaces
from memfit.trace.program_state import has_gradient_hooks
from memfit.trace.python_calls import with_python_of
from memfit.trace.trace import profile_step
from memfit.trace.workspaces import PROCESSOR_TABLE, accelerator_table

# The setting in which a model is traced, checked, stepped and evaluated: the same in all four.
#
# In: the model, the plan's chunk of the loss, what its key-value caches are. Out: a context, after
# which the model is as it was.


@contextmanager
def training_setting(model: nn.Module, chunk_tokens: int | None, caches: CacheUse) -> Iterator[None]:
    """Context in which known losses run in chunks of `chunk_tokens`, and transformers' caches hold
    nothing.

    See [Note: caches in training] in `engine.caches`.
    """
    with caches_in_training(model, caches), chunked_head(model, chunk_tokens):
        yield


# Where operations are tried to find out what they take inside (see `trace.measuring`).
#
# In: a machine, if there is one. Out: `Workspaces`.


def workspaces_for(device: torch.device, hardware: Hardware | None = None) -> Workspaces:
    """Returns what tells the scratch of a device's kernels, or of a described machine's in its
    place.

    Without a compiler no operation is tried, and the tables alone are asked.
    """
    architecture = devices.architecture(device) if hardware is None else hardware.architecture
    is_here = hardware is None or is_processor(hardware.device)
    table = PROCESSOR_TABLE if is_here and not architecture else accelerator_table(architecture)
    try:
        return Workspaces(install().hidden_bytes, table=table)
    except TierUnavailableError:
        return Workspaces(table=table)


def workspaces_of(machine: Machine | None = None) -> Workspaces:
    """Returns what tries operations by memfit's allocator; without a compiler it asks its table
    alone.

    On an emulated device trials are host memory: its limit may leave no room beside the model as it
    was built, and what a convolution is taken to hold inside must not depend on that.

    Args:
        machine: of the job; None: a process, whose limit is not looked at.
    """
    if machine is not None and machine.is_emulated and isinstance(machine.allocator, Allocator):
        return Workspaces(partial(machine.allocator.hidden_bytes, ledger="host"), machine.host_ledger)
    return workspaces_for(torch.device("cpu") if machine is None else machine.device)


# Profiles of `memfit.Parts`, whose sums are the user's own.
#
# In: a profile of the largest part, or what its trace failed with. Out: the profile with what parts
# ask of a plan; the error in words.


def with_own_parts(profile: Profile, model: nn.Module, cut: Cut) -> Profile:
    """Returns the profile as one of parts, where batches come in parts.

    A hook on a gradient meets what it meets in the user's loop only where parts go one after the
    other and sums lie in `.grad`: gradients with hooks count as gradients that are read.
    """
    if not isinstance(cut, ByParts):
        return profile
    hooked = [name for name, parameter in model.named_parameters() if has_gradient_hooks(parameter)]
    reads = tuple(dict.fromkeys([*profile.read_gradients, *hooked]))
    return replace(profile, own_parts=profile.batch_rows, read_gradients=reads)


@contextmanager
def failures_of_parts(cut: Cut) -> Iterator[None]:
    """Context in which a loss that does not run on a part raises `UsageError`: nobody cut it but
    the user.
    """
    try:
        yield
    except UncuttableError as error:
        if not isinstance(cut, ByParts):
            raise
        cause = error.__cause__ or error
        told = str(cause).strip() or type(cause).__name__
        raise UsageError(
            f"loss(model, batch) fails on the largest of the parts: {told:.200}. Nothing was changed; see that it runs on it in plain PyTorch"
        ) from error


# Choice of the frozen weights that rest in few bits, and of what must be allowed for it.
#
# In: a model, a profile, a format. Out: the profile with what rests in it. See
# `core.storage_formats`, [Note: frozen weights in few bits].

STATE_FORMATS = tuple(one for one in StateFormat if one is not StateFormat.GIVEN)


def computes_in_bf16(allow: Collection[str]) -> bool:
    """Tells whether weights may compute in bf16."""
    return "bf16" in allow or WITHOUT_MASTERS in allow


def encodes_states(allow: Collection[str]) -> bool:
    """Tells whether optimizer states may rest in fewer bits."""
    return any(one.allowance in allow for one in STATE_FORMATS)


def encoding_bytes(model: nn.Module, allow: Collection[str]) -> int:
    """Returns what encoding a frozen weight on its way home takes at most, in a format that is
    allowed: pieces, and what was encoded in parts and whole.
    """
    formats = [one for one in FrozenFormat if one is not FrozenFormat.GIVEN and one.allowance in allow]
    found = 0
    for p in model.parameters() if formats else ():
        shape, dtype = tuple(p.shape), str(p.dtype).removeprefix("torch.")
        for one in formats if not p.requires_grad else ():
            if one.can_hold(shape, dtype):
                found = max(found, min(ENCODING_BYTES, 20 * p.numel()) + 2 * sum(one.parts(shape)))
    return found


def with_frozen(model: nn.Module, profile: Profile, chosen: FrozenFormat) -> Profile:
    """Returns the profile with frozen weights of the model that rest in a format."""
    if chosen is FrozenFormat.GIVEN:
        return profile
    names = linear_names(model)
    return replace(profile, blocks=tuple(_in_few_bits(block, chosen, names) for block in profile.blocks))


def _in_few_bits(block: BlockProfile, chosen: FrozenFormat, names: Collection[str]) -> BlockProfile:
    encoded = frozenset(
        p.name
        for p in block.parameters
        if p.name in names and not p.requires_grad and not block.is_spanning and chosen.can_hold(p.shape, p.dtype)
    )
    if not encoded:
        return block
    parts = [chosen.parts(p.shape) if p.name in encoded else p.nbytes for p in block.parameters]
    return replace(block, encoded=encoded, encoded_bytes=encoded_sizes(parts)[1])


def linear_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of weights that linear layers use, and nothing else does; without the head
    that gives logits, which formats of few bits leave as it is by custom.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    kinds: dict[int, bool] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            is_linear = isinstance(module, nn.Linear) and key == "weight" and module is not head
            kinds[id(parameter)] = kinds.get(id(parameter), True) and is_linear
    return frozenset(name for name, p in model.named_parameters() if kinds[id(p)])


def check_frozen(plan: Plan, allow: Collection[str]) -> None:
    """Raises `UsageError` where a plan keeps frozen weights in a format that is not allowed."""
    if plan.frozen_format is not FrozenFormat.GIVEN and plan.frozen_format.allowance not in allow:
        raise UsageError(
            f"the plan keeps frozen weights in {plan.frozen_format}, which rounds them once: "
            f'fit(..., allow={{"{plan.frozen_format.allowance}"}}) permits it'
        )


_HOST = torch.device("cpu")
# The user's model is of the user's class, which their function may name.
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Model, loss and optimizer to be trained, as profiles see it.

    Attributes:
        model, loss: the user's.
        driver: of the user's optimizer.
        block_map: blocks and call sites.
        aside: weights that lie in a file while `fit` plans; None: there is room for them.
        caches: what transformers' key-value caches do while the model trains.
        numerics: see `core.numerics.Wish`.
        workspaces: memory that operations take inside, from a table or measured.
        cut: the way in which batches are cut.
        compiled: blocks that torch.compile compiles; None: nobody asked.
        left_bytes: tells what a limit leaves to a real step that a trace makes; None: there is
            none.
    """

    model: nn.Module
    loss: Loss
    driver: OptimizerDriver
    block_map: BlockMap
    aside: WeightsAside | None = None
    caches: CacheChoice = field(default_factory=CacheChoice)
    numerics: Wish = "auto"
    workspaces: Workspaces = field(default_factory=workspaces_of)
    cut: Cut = field(default_factory=lambda: ByRows(lambda _: RowPlaces()))
    compiled: CompiledBlocks | None = None
    left_bytes: Callable[[], int | None] = lambda: None
    is_for_accelerator: bool | None = None
    """Plans are for a described machine whose device is an accelerator, or is not; None: for the
    machine that the model lies on.
    """

    def counts(self, batch: Any) -> tuple[int, ...]:
        """Numbers of microbatches that plans are looked for with: as many as the batch comes in, or
        1, 2, 4, ... `MOST_MICROBATCHES` and its rows at most; 1 where sums may not be regrouped.
        """
        if isinstance(self.cut, ByParts):
            return (self.cut.rows(batch),)
        rows, counts = 1 if self.numerics == "exact" else self.cut.rows(batch), [1]
        while 2 * counts[-1] <= min(rows, MOST_MICROBATCHES):
            counts.append(2 * counts[-1])
        return tuple(counts)

    def ways(self, sample: Any, split: UserSplit | None) -> list[Cut]:
        """Returns the ways to cut a sample's batches, likelier ones first; the last is not to cut
        them.
        """
        if split is not None:
            return [ByUser(split), Whole("its parts, as fit(split=...) makes them, cannot be trained one by one")]
        try:
            vision = vision_way(self.model, sample)
        except UncuttableError as error:
            return [Whole(str(error))]
        if vision is not None:
            return [vision, Whole("what belongs to its rows was not found")]
        ways = list(ways_of(sample))
        why = None if ways else ByRows(lambda _: RowPlaces()).why_whole(sample)
        return [*ways, Whole(why or "what counts its rows was not found")]

    @property
    def casts(self) -> list[nn.Module]:
        """Modules whose floating arguments are cast where weights compute in another dtype: the
        model and its layers.
        """
        layers = [site.module for site in self.block_map.sites if site.is_repeated and site.module is not self.model]
        return [self.model, *layers]

    def check_rows(self, sample: Any) -> None:
        """Refuses a cut into single rows that cuts something else as well, of two entries by
        accident: a weight for each of two classes.

        Of one entry it would be broadcast, and nothing would fail. The model is traced on three
        rows, where it was traced on two.

        Raises:
            UnsupportedError: it does not run on them.
        """
        grown = self.cut.grown(sample) if isinstance(self.cut, ByRows) and self.cut.rows(sample) == 2 else None
        if grown is None:
            return
        with training_setting(self.model, None, self.caches.use):
            try:
                profile_step(
                    self.model,
                    FirstOf(self.loss),
                    grown,
                    self.block_map,
                    parts={3: grown},
                    whole_rows=3,
                    trace="fake",
                    program=self.loss,
                )
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"the loss takes 2 rows, but not 3 ({error}): something in the batch has as many entries as it has rows. Give fit(split=...), which cuts it"
                ) from error

    def profile_for(
        self, plan: Plan, batch: Any, *, checks_repeat: bool = True, like: Profile | None = None
    ) -> Profile:
        """The profile of a batch under a plan.

        Args:
            plan: decided.
            batch: whole.
            checks_repeat: see `profile_step`.
            like: profile of an earlier batch, whose calls tell what Python these take.
        """
        counts, compute = (plan.microbatches,), plan.compute_dtype
        how: dict[str, Any] = {"checks_repeat": checks_repeat, "like": like}
        traced = self.profile(batch, counts, chunk_tokens=plan.loss_chunk_tokens, compute=compute, **how)
        return with_frozen(self.model, self.with_states(traced, compute, plan.state_format), plan.frozen_format)

    def profile(
        self,
        batch: Any,
        counts: Sequence[int],
        *,
        chunk_tokens: int | None,
        compute: ComputeDtype = ComputeDtype.GIVEN,
        checks_repeat: bool = True,
        like: Profile | None = None,
        suffices: Callable[[Profile], bool] | None = None,
    ) -> Profile:
        """The profile of a batch, with a trace for each of the given numbers of microbatches; with
        that of the whole batch alone where it is said to suffice (see `profile_step`).

        The first one finds out what the model's key-value caches may be. What an earlier one has
        shown is not looked at again where that is given (`like`): that the program repeats itself,
        and what Python it calls.
        """
        how: dict[str, Any] = {"checks_repeat": checks_repeat, "like": like, "suffices": suffices}
        traced = partial(self._profile, batch, counts, chunk_tokens=chunk_tokens, compute=compute, **how)
        if self.caches.is_decided or not asks_for_caches(self.model):
            return traced(self.loss)
        noted = Noted()
        try:
            found = traced(noted.watching(self.loss))
            keeps = any(call.changes_arguments for trace in found.traces.values() for call in trace.calls)
            # What it makes, or keeps in its modules, is of another kind.
            is_other = keeps or noted.keeps_elsewhere or not noted.made
            use = CacheUse.OFF if is_other else CacheUse.NO_OP
        except HandedBackError:
            found, use = None, CacheUse.REAL
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            # Either it does more with caches than to update them, or this has nothing to do with
            # them and comes again.
            found, use = None, CacheUse.OFF
        if found is None or use is not self.caches.use:
            self.caches.use = use
            found = traced(self.loss)
        self.caches.is_decided = True
        return found

    def _profile(
        self,
        batch: Any,
        counts: Sequence[int],
        loss: Loss,
        *,
        chunk_tokens: int | None,
        compute: ComputeDtype,
        checks_repeat: bool,
        like: Profile | None,
        suffices: Callable[[Profile], bool] | None,
    ) -> Profile:
        rows = max(self.cut.rows(batch), *counts) if isinstance(self.cut, ByUser) else self.cut.rows(batch)
        parts = {-(-rows // k): _largest(self.cut.parts(batch, k)) for k in counts}
        smaller = smaller_part(self.cut, batch, counts[0]) if len(counts) == 1 and checks_repeat else {}
        sizes_of_states = self._state_sizes(compute, StateFormat.GIVEN)
        updates = self._updates(compute, sizes_of_states)
        if compute is ComputeDtype.FLOAT16:
            loss = in_half(loss, device_of(self.model).type)
        first = FirstOf(loss)
        arguments = (self.model, first, batch, self.block_map)
        options: dict[str, Any] = {
            "parts": parts, "whole_rows": rows, "compute_dtype": compute, "workspaces": self.workspaces,
            "checks_repeat": checks_repeat and like is None, "counts_python": like is None,
            "state_bytes": {name: one.nbytes for name, one in sizes_of_states.items()}, "program": self.loss, "suffices": None, "smaller": smaller,
            "left_bytes": self.left_bytes,
        }  # fmt: skip

        def completed(found: Profile) -> Profile:
            return self._completed(found, sizes_of_states, updates, compute, counts_losses=first.is_counted)

        if suffices is not None:
            options["suffices"] = lambda found: suffices(completed(found))
        with (
            training_setting(self.model, chunk_tokens, self.caches.use),
            casting_inputs(self.casts, cast_dtype(compute)),
            failures_of_parts(self.cut),
        ):
            try:
                found = profile_step(*arguments, **options)
            except AwayError:
                if self.aside is None:
                    raise
                self.aside.bring(self.model.parameters())  # the trace must run on real tensors
                found = profile_step(*arguments, **options)
        # What an earlier profile tells is priced by shares of compiled blocks already.
        return completed(found) if like is None else with_python_of(completed(found), like)

    def _completed(
        self,
        found: Profile,
        sizes_of_states: Mapping[str, StoredStates],
        updates: Mapping[str, UpdateProfile],
        compute: ComputeDtype,
        *,
        counts_losses: bool,
    ) -> Profile:
        """The profile with what is known of the optimizer and of the loss's result."""
        at_home = {b.name: _sum_of(b, sizes_of_states, lambda one: one.home_bytes) for b in found.blocks}
        together = ("accelerator" if self._has_host else "cpu") in self.driver.together
        known: dict[str, Any] = {"updates": updates, "state_home_bytes": at_home, "rows_are_alike": self.cut.is_even}
        found = replace(found, **known, updates_together=together, counts_losses=counts_losses)
        found = with_compiled(with_own_parts(found, self.model, self.cut), self.block_map, self.compiled)
        if not self._has_host:
            return replace(found, agrees_on_host=True)  # the same processor
        master = _master_dtype(compute)
        stays = self.driver.on_host.obstacle(master)
        # On an accelerator that is not here nothing can be tried.
        is_here = devices.is_accelerator(device_of(self.model))
        agrees = is_here and not stays and self.driver.on_host.agrees(master)
        return replace(found, host_update_obstacle=stays, agrees_on_host=agrees)

    @property
    def _has_host(self) -> bool:
        """The device that plans are for has a host beside it whose cores may update."""
        if self.is_for_accelerator is not None:
            return self.is_for_accelerator
        return devices.is_accelerator(device_of(self.model))

    def with_states(self, profile: Profile, compute: ComputeDtype, chosen: StateFormat) -> Profile:
        """The same profile, with states that rest in a format."""
        if chosen is StateFormat.GIVEN:
            return profile
        sizes = self._state_sizes(compute, chosen)
        return replace(
            profile,
            state_bytes={b.name: _sum_of(b, sizes, lambda one: one.nbytes) for b in profile.blocks},
            state_home_bytes={b.name: _sum_of(b, sizes, lambda one: one.home_bytes) for b in profile.blocks},
            encoded_elements={b.name: _sum_of(b, sizes, lambda one: one.encoded) for b in profile.blocks},
            updates=self._updates(compute, sizes),
        )

    def encodes(self, chosen: StateFormat) -> bool:
        """Tells whether a state of the optimizer would rest in this format."""
        return any(one.encoded for one in self._state_sizes(ComputeDtype.GIVEN, chosen).values())

    def _state_sizes(self, compute: ComputeDtype, chosen: StateFormat) -> dict[str, StoredStates]:
        """By parameter, how its states rest."""
        master = _master_dtype(compute)
        kept = embedding_names(self.model)
        driver = self.driver
        return {name: stored_states(chosen, kept, name, driver.state_layout(name, master)) for name in driver.names}

    def _updates(self, compute: ComputeDtype, sizes: Mapping[str, StoredStates]) -> dict[str, UpdateProfile]:
        """By parameter, what its update works on at once.

        Args:
            compute: of the plan.
            sizes: as `_state_sizes` gives them.
        """
        driver, master = self.driver, _master_dtype(compute)
        numels = {name: p.numel() for name, p in self.model.named_parameters(remove_duplicate=False)}
        # Elsewhere nobody asks for it, and what cannot be updated there need not be tried.
        is_beside = self._has_host and not driver.on_host.obstacle(master)
        found: dict[str, UpdateProfile] = {}
        for name, states in sizes.items():
            is_cut = driver.verdict(name, master).kind is UpdateKind.ELEMENTWISE
            elements = min(PIECE_ELEMENTS, numels[name]) if is_cut else numels[name]
            found[name] = UpdateProfile(
                piece_elements=elements,
                first_piece_elements=min(FIRST_PIECE_ELEMENTS, elements) if is_cut else elements,
                scratch_bytes=driver.update_cost(name, master).scratch_of(elements),
                host_scratch_bytes=driver.update_cost(name, master, _HOST).scratch_of(elements) if is_beside else 0,
                state_bytes=states.nbytes,
                encoded_elements=states.encoded,
                work_share=driver.update_cost(name, master).work_share,
                needs_whole=not is_cut,
            )
        return found


def _sum_of(block: BlockProfile, sizes: Mapping[str, StoredStates], figure: Callable[[StoredStates], int]) -> int:
    """A figure of the states of a block's parameters."""
    return sum(figure(sizes[p.name]) for p in block.parameters if p.name in sizes)


def _largest(parts: Sequence[Any]) -> Any:
    """The part with most bytes, the first of several: what it takes, the others take at most."""
    return max(parts, key=lambda part: sum(t.numel() * t.element_size() for t in tensors_in(part)))


def _master_dtype(compute: ComputeDtype) -> torch.dtype | None:
    """Dtype of what is updated, where it is not the weight itself."""
    return torch.float32 if compute.has_masters else None


class FirstOf:
    """A loss that returns (sum, count), as its sum: what is differentiated, up to a factor.

    Attributes:
        is_counted: it has returned such a pair.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.is_counted = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """The loss, or its sum."""
        result = self._loss(model, batch)
        check_result(result)
        if not isinstance(result, tuple):
            return result
        self.is_counted = True
        return result[0]


def check_arguments(
    model: Any, loss: Any, allow: Collection[str], max_grad_norm: Any, numerics: str = "auto", split: Any = None
) -> None:
    """Raises `UsageError` for arguments that cannot be."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss):
        raise UsageError(f"loss must be a function loss(model, batch) -> scalar tensor, not {type(loss).__name__}")
    if isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss":
        name = type(loss).__name__
        raise UsageError(
            f"loss is called as loss(model, batch), which {name} is not: give lambda model, batch: criterion(model(batch[0]), batch[1]), with it as criterion"
        )
    if isinstance(allow, str):
        raise UsageError(f'allow takes a set of names, such as allow={{"{allow}"}}')
    check_wish(numerics, allow)
    if split is not None and not callable(split):
        raise UsageError(f"split must be a function split(batch, count) -> batches, not {split!r:.80}")
    if max_grad_norm is not None and not _is_positive(max_grad_norm):
        raise UsageError(
            f"max_grad_norm must be a number above 0, not {shown(max_grad_norm)}: give the norm to clip to, or None to clip nothing"
        )


def _is_positive(number: object) -> bool:
    try:
        return isinstance(number, SupportsFloat) and float(number) > 0
    except (OverflowError, RuntimeError, TypeError, ValueError):  # too large; several numbers
        return False


def driver_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerDriver:
    """The driver of an optimizer. Raises `UnsupportedError` if its step needs all parameters at
    once, and `UsageError` if a live job has it.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer.state, AwayStates):
        raise UsageError(
            "a live job has this optimizer, and its model, in hand: close that job first (job.close()); then they are ordinary ones again, and can be fitted anew"
        )
    driver = OptimizerDriver(optimizer, dict(model.named_parameters()))
    for name in driver.names:
        verdict = driver.verdict(name)
        if verdict.kind is UpdateKind.JOINT:
            raise UnsupportedError(
                f"{type(optimizer).__name__} must see all parameters at once ({verdict.reason}), but memfit updates block by block: use an optimizer "
                "that treats each parameter on its own"
            )
    return driver


def beside(model: nn.Module, optimizer: torch.optim.Optimizer, sample: Any) -> Iterator[torch.Tensor]:
    """Tensors beside weights that predictions include: batch, buffers, gradients, states."""
    yield from tensors_in(sample)
    yield from model.buffers()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from tensors_in(dict(optimizer.state))


def read_plan(plan: Plan | str | Path) -> Plan:
    """A plan, from its JSON text or file unless it is one already.

    Raises:
        PlanError: not a plan, or a file that cannot be read. UsageError: something else.
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str) and plan.lstrip().startswith("{"):
        return Plan.from_json(plan)
    if not isinstance(plan, str | Path):
        raise UsageError(f"plan must be a Plan, its JSON text or a path to it, not {type(plan).__name__}")
    try:
        return Plan.from_json(read_document(Path(plan), limit_bytes=PLAN_LIMIT_BYTES))
    except (OSError, ValueError) as error:
        raise PlanError(f"the plan {str(plan)[:200]!r} cannot be read: {error}") from error


def check_precision(plan: Plan, model: nn.Module, allow: Collection[str]) -> None:
    """Raises `UsageError` or `UnsupportedError` where a plan computes or keeps states in a format
    that is not allowed, or that the model cannot have.
    """
    if plan.state_format is not StateFormat.GIVEN and plan.state_format.allowance not in allow:
        raise UsageError(
            f"the plan keeps optimizer states in {plan.state_format}, which changes the arithmetic: "
            f'fit(..., allow={{"{plan.state_format.allowance}"}}) permits it'
        )
    check_frozen(plan, allow)
    if plan.compute_dtype is ComputeDtype.GIVEN:
        return
    needed, how = {
        ComputeDtype.FLOAT16: ("fp16", "fp16"),
        ComputeDtype.FLOAT16_WEIGHTS: (FP16_WEIGHTS, "fp16 weights"),
    }.get(plan.compute_dtype, (WITHOUT_MASTERS, "bf16 without masters") if plan.drops_masters else ("bf16", "bf16"))
    if needed not in allow:
        raise UsageError(
            f'the plan computes in {how}, which changes the arithmetic: fit(..., allow={{"{needed}"}}) permits it'
        )
    problem = unfit_for(plan.compute_dtype, model)
    if problem is not None:
        raise UnsupportedError(problem)


def unfit_for(compute: ComputeDtype, model: nn.Module) -> str | None:
    """Returns why the model cannot compute in this dtype; None if it can."""
    if compute.has_masters:
        return _unfit_for_masters(model, compute)
    return _unfit_for_autocast(model) if compute is ComputeDtype.FLOAT16 else None


def _unfit_for_autocast(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            return f"the parameter {name!r} is fp16: loss scaling needs fp32 weights, whose gradients are fp32 (model.float() first)"
    return None


def _unfit_for_masters(model: nn.Module, compute: ComputeDtype) -> str | None:
    is_bf16 = compute is ComputeDtype.BFLOAT16
    short = "bf16" if is_bf16 else "fp16"
    taken = (torch.float32, torch.bfloat16) if is_bf16 else (torch.float32, torch.float16)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in taken:
            return f"the parameter {name!r} is {parameter.dtype}: {short} training takes models in fp32 or {short}, whose masters are fp32"
        if parameter.grad is not None:
            return f"the parameter {name!r} has a gradient, whose dtype would not be that of {short} weights: model.zero_grad() first"
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return f"the embedding {name!r} bounds its rows in the forward (max_norm), of which fp32 masters would not hear: set max_norm=None"
    return None
