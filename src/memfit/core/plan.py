"""Plan: the decisions for a run, as JSON that a person can read, compare, edit and pass to `fit`.

In: decisions of the planner or of a user. Out: `Plan`, checked against a model's blocks and calls
by `Plan.check`, and turned into a `Schedule` by `step`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from memfit.core.documents import list_in, object_in, parse_json
from memfit.core.errors import PlanError
from memfit.core.layout import Share
from memfit.core.process_state import hash_once, without_hash
from memfit.core.saved_policies import Saved
from memfit.core.step_report import html_table, in_runs, joined_names, named_values
from memfit.core.storage_formats import ComputeDtype, FrozenFormat, StateFormat
from memfit.core.tiers import TIERS, Tier, is_processor

# Aliases: the field's other words for memfit's choices, accepted wherever a choice is read. What
# memfit writes are its own words.
#
# In: a word as a person wrote it, and its purpose. Out: memfit's word, or the word unchanged if it
# is not known; the reader of the choice then refuses it. The glossary (docs/glossary.md) has them;
# a test compares.

_SAVED = {
    "keep": ("kept", "save"),
    "recompute": (
        "rematerialization", "rematerialize", "remat", "recomputation", "checkpoint", "checkpointing", "activation checkpointing",
        "gradient checkpointing",
    ),
    "select": ("selective", "selective checkpointing", "selective activation checkpointing", "selective recompute"),
    "offload": ("SwapOut", "SwapIn", "swap", "SwapOut / SwapIn", "activation offload", "offloading"),
}  # fmt: skip
_TIER = {
    "device": ("gpu", "cuda", "accelerator", "vram", "hbm"),
    "host": ("cpu", "ram", "dram", "pinned"),
    "disk": ("nvme", "ssd", "file", "files"),
}
_SYNONYMS: dict[str, dict[str, tuple[str, ...]]] = {
    "saved": _SAVED,
    "saved_home": _TIER,
    "boundary_home": _TIER,
    "weight_home": _TIER,
    "gradient_home": _TIER,
    "state_home": _TIER,
    "update_on": _TIER,
    "order": {
        "layer-major": ("breadth-first",),
        "microbatch-major": ("depth-first", "gradient accumulation", "plain accumulation"),
    },
    "compute_dtype": {"bfloat16": ("bf16",), "float16": ("fp16", "half")},
    "allow": {
        "bf16": ("bfloat16",),
        "fp16": ("float16", "half"),
        "int8-state": ("8-bit optimizer", "8bit optimizer", "int8 states"),
        "int4-state": ("4-bit optimizer", "4bit optimizer", "int4 states"),
        "fp8-state": ("fp8 optimizer", "fp8 states"),
        "bf16-state": ("bf16 optimizer", "bf16 states"),
        "nf4-frozen": ("QLoRA", "nf4 base", "4-bit base"),
        "int8-frozen": ("LLM.int8", "int8 base", "8-bit base"),
    },
}
_FIELDS = {
    "microbatches": ("micro_batches", "gradient_accumulation_steps", "accumulation_steps", "micro_steps"),
    "weight_home": ("weight_placement", "param_home", "parameter_home"),
    "gradient_home": ("gradient_placement", "grad_home"),
    "state_home": ("state_placement", "optimizer_home", "optimizer_state_home"),
    "update_on": ("update_device", "optimizer_device", "step_on"),
    "saved": ("activations", "checkpointing"),
}


def _plain(word: str) -> str:
    return re.sub(r"[\s_/-]+", "", word).lower()


def _turned(words: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {_plain(alias): own for own, aliases in words.items() for alias in (own, *aliases)}


_BY_PURPOSE = {purpose: _turned(words) for purpose, words in _SYNONYMS.items()}
_BY_FIELD = _turned(_FIELDS)


def own_word(purpose: str, word: str) -> str:
    """Returns memfit's word for a choice; an unknown word is returned unchanged.

    Args:
        purpose: the field of a plan that it is for, or "allow".
        word: as it was written; capitals, blanks, hyphens and underlines do not matter.
    """
    return _BY_PURPOSE.get(purpose, {}).get(_plain(word), word)


def own_field(name: str) -> str:
    """Returns memfit's name for a field of a plan's JSON; an unknown name is returned unchanged."""
    return _BY_FIELD.get(_plain(name), name)


def own_allowances(allow: Collection[str]) -> Collection[str]:
    """Returns the permissions given to `fit(allow=...)` in memfit's words. A string in place of a
    set is returned unchanged, to be refused later.
    """
    if isinstance(allow, str):
        return allow
    return frozenset(own_word("allow", name) if isinstance(name, str) else name for name in allow)  # pyright: ignore[reportUnnecessaryIsInstance], users pass anything


PLAN_FORMAT = 1
_LARGEST = 1 << 40
_SHOWN = 400


class Order(StrEnum):
    """Order in which microbatches pass calls.

    LAYER_MAJOR: all microbatches pass a call before the next call begins. MICROBATCH_MAJOR: a
    microbatch passes all calls before the next microbatch begins.
    """

    LAYER_MAJOR = "layer-major"
    MICROBATCH_MAJOR = "microbatch-major"


class UpdateTime(StrEnum):
    """Time at which blocks are updated.

    IN_BACKWARD: each as soon as its gradient is complete. AFTER_BACKWARD: all at the end.
    """

    IN_BACKWARD = "in-backward"
    AFTER_BACKWARD = "after-backward"


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Homes of one block's tensors, and the processor that updates them.

    Attributes:
        weight_home, gradient_home, state_home: tiers of weights, gradients and optimizer states.
            Masters rest with the states.
        update_on: tier whose processor runs the optimizer on the block. DEVICE: what rests
            elsewhere passes the link in pieces and goes back. HOST: the host's cores work on what
            rests there, beside the device's backward; only gradients go down and new weights up.
            Gradients and states must be at home on the host or on disk then. Without an accelerator
            both are the same processor.
        weights_over, gradients_over, states_over: whether each rank has the whole of them at home,
            or its share (`core.layout`). All whole: data parallel; states cut: ZeRO-1; gradients
            too: ZeRO-2; all cut: ZeRO-3, FSDP.

    Source: Ren et al. 2021, "ZeRO-Offload", section 4.
    """

    weight_home: Tier = Tier.DEVICE
    gradient_home: Tier = Tier.DEVICE
    state_home: Tier = Tier.DEVICE
    update_on: Tier = Tier.DEVICE
    weights_over: Share = Share.WHOLE
    gradients_over: Share = Share.WHOLE
    states_over: Share = Share.WHOLE

    def __post_init__(self) -> None:
        _take_words(self)
        if self.update_on not in (Tier.DEVICE, Tier.HOST):
            raise PlanError(
                f"update_on of BlockPlan is one of ['device', 'host'], not {str(self.update_on)!r}: nothing computes there"
            )

    def __hash__(self) -> int:
        return hash_once(self)

    def __getstate__(self) -> dict[str, object]:
        return without_hash(self)

    def __repr__(self) -> str:
        return named_values(self)

    @property
    def rests_whole_on_device(self) -> bool:
        """True if weights never visit: they are on the device already, all of them."""
        return self.weight_home is Tier.DEVICE and self.weights_over is Share.WHOLE

    @property
    def spreads(self) -> bool:
        """True if ranks have whole weights and update their shares, which go to the others then."""
        return self.weights_over is Share.WHOLE and self.states_over is not Share.WHOLE

    @property
    def rests_on_disk(self) -> bool:
        """True if weights and states (with the masters) are at home on disk."""
        return self.weight_home is Tier.DISK and self.state_home is Tier.DISK

    def updates_on_host(self, device: str) -> bool:
        """Tells whether the update runs on the host's processor beside an accelerator.

        Lowering (`step.lower`) and homes (`engine.housing`) both ask here.

        Args:
            device: as `is_processor` takes it.
        """
        return self.update_on is Tier.HOST and not is_processor(device)

    @property
    def has_versions(self) -> bool:
        """True if homes of weights and states keep the committed version beside the one being
        written.
        """
        return self.weight_home.traits.is_files and self.state_home.traits.is_files


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """Policy for the tensors that one call saves for backward.

    Attributes:
        saved: name of the policy, see `Saved`.
        saved_home: tier of offloaded tensors (only for policies that offload).
        boundary_home: tier of the arguments of a recomputed call (only for policies that
            recompute).
        joins_previous: the call belongs to the same segment as the call before it: both are
            recomputed together, and only the arguments of the segment's first call are held.
    """

    saved: Saved = Saved.KEEP
    saved_home: Tier = Tier.DISK
    boundary_home: Tier = Tier.DEVICE
    joins_previous: bool = False

    def __post_init__(self) -> None:
        _take_words(self)

    def __hash__(self) -> int:
        return hash_once(self)

    def __getstate__(self) -> dict[str, object]:
        return without_hash(self)

    def __repr__(self) -> str:
        return named_values(self)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions for a run.

    Attributes:
        microbatches: number of slices, of equal or nearly equal rows, that the batch is cut into.
        order: see `Order`; without effect for one microbatch.
        blocks: homes by block name; blocks not named have everything on the device.
        calls: policies by call index as traced; calls beyond the end of the tuple keep what they
            save.
        tail: index of the first call of the tail: from it on, each microbatch runs forward to its
            loss and back at once, so that logits of one microbatch only are alive; None: no tail is
            cut. `cut_tail` says whether a step has it.
        update: see `UpdateTime`.
        is_atomic: an interrupted step leaves the previous state; otherwise updates are in place,
            and an interruption leaves blocks of two steps.
        prefetch: number of blocks that may be fetched ahead of the running one (1: two buffers).
        update_backlog: compute actions beside which an update may run until its end is waited for;
            for so long its gradient, and weights that visit, stay. Without `prefetch` there are
            none.
        loss_chunk_tokens: tokens in a chunk of a known loss; None: the loss runs as the user wrote
            it.
        compute_dtype: see `ComputeDtype`; masters rest where the block's states do.
        splits_masters: masters share their upper bits with the weights that are rounded from them,
            so that exactly 17 bits an element are stored beside a weight instead of 32.
        drops_masters: there are no masters. Weights, in the compute dtype, are rounded
            stochastically when they are updated (`homes.masters`).
        state_format: number format of optimizer states at home; see `core.storage_formats`, [Note:
            state formats].
        frozen_format: number format of frozen linear weights at home; see `core.storage_formats`,
            [Note: frozen weights in few bits].
        ranks: number of processes that train the model together, each with rows of its own (data
            parallel).
    """

    microbatches: int = 1
    order: Order = Order.LAYER_MAJOR
    blocks: Mapping[str, BlockPlan] = field(default_factory=dict[str, BlockPlan])
    calls: tuple[CallPlan, ...] = ()
    tail: int | None = None
    update: UpdateTime = UpdateTime.IN_BACKWARD
    is_atomic: bool = False
    prefetch: int = 1
    update_backlog: int = 1
    loss_chunk_tokens: int | None = None
    compute_dtype: ComputeDtype = ComputeDtype.GIVEN
    splits_masters: bool = False
    drops_masters: bool = False
    state_format: StateFormat = StateFormat.GIVEN
    frozen_format: FrozenFormat = FrozenFormat.GIVEN
    ranks: int = 1

    def __post_init__(self) -> None:
        _take_words(self)
        counts = (
            self.microbatches,
            self.prefetch,
            self.update_backlog,
            self.tail or 0,
            self.loss_chunk_tokens or 0,
        )
        if any(abs(count) > _LARGEST for count in counts):
            raise PlanError(f"a plan counts microbatches, calls and tokens up to {_LARGEST}")
        if not 1 <= self.ranks <= _LARGEST:
            raise PlanError(f"a plan is for at least one rank, not {self.ranks}")
        if self.microbatches < 1:
            raise PlanError(f"a plan needs at least one microbatch, not {self.microbatches}")
        if self.prefetch < 0:
            raise PlanError(f"prefetch counts visits ahead and cannot be {self.prefetch}")
        if self.update_backlog < 0:
            raise PlanError(f"update_backlog counts compute actions and cannot be {self.update_backlog}")
        if self.splits_masters and self.compute_dtype is not ComputeDtype.BFLOAT16:
            raise PlanError("there are no masters to split: splits_masters needs compute_dtype='bfloat16'")
        if self.drops_masters and (self.compute_dtype is not ComputeDtype.BFLOAT16 or self.splits_masters):
            raise PlanError(
                "drops_masters needs compute_dtype='bfloat16' and splits_masters=false: there are no masters then"
            )
        if self.frozen_format is not FrozenFormat.GIVEN and (
            self.compute_dtype.has_masters or self.is_atomic or self.ranks > 1
        ):
            raise PlanError(
                f"frozen_format={str(self.frozen_format)!r} is for weights in the dtype they came in, of one process, without versions: say "
                "compute_dtype='given', is_atomic=false and ranks=1, or leave it out"
            )
        if self.loss_chunk_tokens is not None and self.loss_chunk_tokens < 1:
            raise PlanError(f"loss_chunk_tokens must be at least 1, not {self.loss_chunk_tokens}")
        if self.calls and self.calls[0].joins_previous:
            raise PlanError("the first call cannot join a call before it (calls[0].joins_previous)")

    def __repr__(self) -> str:
        return named_values(self)

    def _repr_html_(self) -> str:
        """Shows in a notebook the decisions that differ from the defaults, with equal blocks and
        calls grouped.
        """
        decided = [
            (each.name, str(getattr(self, each.name)))
            for each in fields(self)
            if each.name not in ("blocks", "calls") and getattr(self, each.name) != each.default
        ]
        homes: dict[str, list[str]] = {}
        for name, block in self.blocks.items():
            homes.setdefault(repr(block)[len("BlockPlan(") : -1] or "device", []).append(name or "(model)")
        decided += [
            (f"{len(names)} blocks: {names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}", how)
            for how, names in homes.items()
        ]
        policies = in_runs([repr(call)[len("CallPlan(") : -1] or "saved='keep'" for call in self.calls])
        decided += [(f"calls {indices}", policy) for indices, policy in policies]
        return html_table("Plan", decided or [("everything on the device, nothing recomputed, one microbatch", "")])

    @property
    def scales_losses(self) -> bool:
        """True if losses are scaled, so that no update begins before all gradients are known to be
        finite.
        """
        return self.compute_dtype.scales_losses

    @property
    def backlog(self) -> int:
        """Returns the compute actions beside which updates run until their ends are waited for. The
        only place where that is decided.
        """
        return self.update_backlog if self.prefetch else 0

    @property
    def cut_tail(self) -> int | None:
        """Returns the first call of the tail in a step of this plan; None if it has no tail. The
        only place where that is decided.

        Only several microbatches in layer-major order have a tail: in microbatch-major order each
        microbatch runs to its loss and back anyway.
        """
        return self.tail if self.microbatches > 1 and self.order is Order.LAYER_MAJOR else None

    def adds_apart(self, *, has_masters: bool, clips_norm: bool) -> bool:
        """Tells whether gradients of low-precision weights are added to sums in the masters' dtype
        as they come. The only place where that is decided.

        It holds for a whole job: a batch that is cut into fewer microbatches than the plan wants
        goes the same way.

        Args:
            has_masters: a weight of the model has a master.
            clips_norm: gradients are clipped by their global norm, which is taken of the sums.
        """
        return has_masters and (self.microbatches > 1 or clips_norm)

    def block(self, name: str) -> BlockPlan:
        """Returns the homes of a block; all on the device if the plan does not name it."""
        return self.blocks.get(name, _ON_DEVICE)

    def call(self, index: int) -> CallPlan:
        """Returns the policy for a call; `keep` if the plan does not reach it."""
        return self.calls[index] if index < len(self.calls) else _KEPT

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that this plan uses, each once."""
        homes = [h for b in self.blocks.values() for h in (b.weight_home, b.gradient_home, b.state_home)]
        homes += [c.boundary_home for c in self.calls]
        homes += [c.saved_home for c in self.calls if c.saved.policy.offloads]
        return tuple(dict.fromkeys(homes))

    def segments(self, number_of_calls: int) -> tuple[tuple[int, int], ...]:
        """Returns (first, last) call of each segment in forward order. Microbatches pause, and
        blocks are fetched, between segments.
        """
        bounds: list[tuple[int, int]] = []
        for index in range(number_of_calls):
            if index and self.call(index).joins_previous and index != self.cut_tail:
                bounds[-1] = (bounds[-1][0], index)
            else:
                bounds.append((index, index))
        return tuple(bounds)

    def check(self, block_names: Sequence[str], number_of_calls: int) -> None:
        """Checks the plan against a model. Raises `PlanError` if it names blocks or calls that the
        model does not have, or contradicts itself.
        """
        self.check_homes(block_names)
        self.check_calls(number_of_calls)

    def check_calls(self, number_of_calls: int) -> None:
        """Checks policies of calls and the tail alone. Raises `PlanError` as `check` does."""
        if len(self.calls) > number_of_calls:
            raise PlanError(
                f"the plan decides {len(self.calls)} calls, the model makes {number_of_calls}: give calls= one CallPlan for each call that memfit.profile "
                "shows, or leave it out"
            )
        if self.tail is not None and not 0 <= self.tail < number_of_calls:
            raise PlanError(f"tail={self.tail} is not one of the {number_of_calls} calls")
        for index, call in enumerate(self.calls):
            if call.joins_previous and not call.saved.policy.recomputes:
                raise PlanError(f"calls[{index}] joins the call before it but is not recomputed (saved={call.saved})")
            if call.joins_previous and self.call(index - 1).saved is not call.saved:
                raise PlanError(f"calls[{index}] joins a call with another policy ({self.call(index - 1).saved})")
            if call.saved.policy.offloads and call.saved_home.traits.is_device:
                raise PlanError(
                    f"calls[{index}] is offloaded to the device; use saved='keep', or another tier, such as host or disk"
                )

    def check_homes(self, block_names: Sequence[str]) -> None:
        """Checks the homes alone. Raises `PlanError` as `check` does."""
        unknown = sorted(set(self.blocks) - set(block_names))
        if unknown:
            raise PlanError(
                f"the plan names blocks that the model does not have: {str(unknown)[:_SHOWN]}; it has {str(list(block_names))[:_SHOWN]} (see memfit.profile)"
            )
        for name, block in self.blocks.items():
            self._check_shares(name, block)
            if block.update_on is Tier.HOST and not {block.gradient_home, block.state_home} <= {Tier.HOST, Tier.DISK}:
                raise PlanError(
                    f"block {name!r} is updated on the host (update_on='host'), so that its gradients and states must be at home there or on disk: say "
                    "gradient_home='host' and state_home='host', or update_on='device'"
                )
            if self.is_atomic and self.update is UpdateTime.IN_BACKWARD and not block.has_versions:
                raise PlanError(
                    f"block {name!r}: an atomic step that updates in backward needs homes with a spare slot (disk) for weights and states; "
                    "use update='after-backward', or is_atomic=False"
                )

    def _check_shares(self, name: str, block: BlockPlan) -> None:
        if self.ranks > 1 and (self.splits_masters or self.drops_masters):
            raise PlanError("masters that are split or dropped are of one process: a plan for ranks keeps them whole")
        cut = [share is Share.DATA for share in (block.weights_over, block.gradients_over, block.states_over)]
        if any(cut) and self.ranks == 1:
            raise PlanError(f"block {name!r} is cut over ranks, and the plan is for one: say ranks=, or leave it whole")
        if cut != sorted(cut):
            raise PlanError(
                f"block {name!r}: a rank updates its share of the states, so weights are cut only where gradients are, and gradients only where states are "
                f"(weights_over={str(block.weights_over)!r}, gradients_over={str(block.gradients_over)!r}, states_over={str(block.states_over)!r})"
            )

    def accumulates(self, name: str) -> bool:
        """Tells whether a block's gradient goes home by an `accumulate`: from the device to another
        tier, or to what all ranks have of it. Else it stays where backward leaves it.
        """
        return self.ranks > 1 or self.block(name).gradient_home is not Tier.DEVICE

    def to_json(self) -> str:
        """Returns indented JSON; `Plan.from_json` reads an equal plan from it."""
        return json.dumps({"format": PLAN_FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads a plan. At most 16 MiB beside the text.

        Raises:
            PlanError: the text is not JSON or of another format, a field is unknown, or a value is
                invalid.
        """
        try:
            read: object = parse_json(text)
        except ValueError as error:
            raise PlanError(
                f"the plan is not JSON ({error}): give what Plan.to_json() writes, a path to it, or the name of a technique"
            ) from error
        try:
            raw = object_in("the plan", read)
            _check_format(raw.pop("format", None))
            blocks = {
                name: BlockPlan(**_values(BlockPlan, object_in(f"blocks[{name!r:.80}]", block)))
                for name, block in object_in("blocks", raw.pop("blocks", {})).items()
            }
            calls = tuple(
                CallPlan(**_values(CallPlan, object_in(f"calls[{index}]", call)))
                for index, call in enumerate(list_in("calls", raw.pop("calls", [])))
            )
            decided = _values(cls, raw)
            decided.update(blocks=blocks, calls=calls)
            return cls(**decided)
        except PlanError:
            raise
        except (TypeError, ValueError) as error:
            raise PlanError(f"the plan cannot be read: {str(error)[:_SHOWN]}") from error


_WORDS: dict[str, type[StrEnum | Tier | Saved]] = {
    "weight_home": Tier, "gradient_home": Tier, "state_home": Tier, "update_on": Tier, "saved": Saved, "saved_home": Tier,
    "boundary_home": Tier, "order": Order, "update": UpdateTime,
    "compute_dtype": ComputeDtype, "state_format": StateFormat, "frozen_format": FrozenFormat,
    "weights_over": Share, "gradients_over": Share, "states_over": Share,
}  # fmt: skip


def _take_words(made: BlockPlan | CallPlan | Plan) -> None:
    """Replaces choices given as strings, as JSON has them, by what they name."""
    for name, value in vars(made).items():
        if type(value) is not str:
            continue
        if name not in _WORDS:
            raise PlanError(f"{name} of {type(made).__name__} is no word: {value!r:.80}")
        kind = _WORDS[name]
        try:
            object.__setattr__(made, name, kind(own_word(name, value)))
        except ValueError:
            words = [*TIERS, "the name of a tier of yours"] if issubclass(kind, Tier) else list(kind)
            raise PlanError(
                f"{name} of {type(made).__name__} is one of {[*map(str, words)]}, not {value!r:.80}"
            ) from None


_BOOLEANS = {"joins_previous", "is_atomic", "splits_masters", "drops_masters"}
_OPTIONAL = {"tail", "loss_chunk_tokens"}


def _check_format(found: object) -> None:
    if type(found) is not int or found != PLAN_FORMAT:
        raise ValueError(f'it must say "format": {PLAN_FORMAT}')


def _values(kind: type, raw: Mapping[str, object]) -> dict[str, Any]:
    """Reads and checks the fields of a dataclass; strings become enums."""
    known = {f.name for f in fields(kind)}
    own = {name if name in known else own_field(name): name for name in raw}
    if len(own) < len(raw):
        raise ValueError(f"a decision of {kind.__name__} is named twice, in other words: {sorted(raw)}"[:_SHOWN])
    raw = {name: raw[given] for name, given in own.items()}
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"unknown field {unknown[0]!r:.80} of {kind.__name__}; it has {sorted(known)}")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name in _WORDS:
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a word, not {value!r:.80}")
            values[name] = _WORDS[name](own_word(name, value))
        elif name in _BOOLEANS:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, not {value!r:.80}")
            values[name] = value
        elif (value is None and name in _OPTIONAL) or (isinstance(value, int) and not isinstance(value, bool)):
            values[name] = value
        else:
            raise ValueError(f"{name} must be an integer, not {value!r:.80}")
    return values


_ON_DEVICE = BlockPlan()
_KEPT = CallPlan()


# Differences between two plans, for people: which blocks and calls are decided otherwise.
#
# In: two `Plan`s. Out: `PlanDifference`s; none if the plans are equal.


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """One thing that two plans decide otherwise.

    Attributes:
        where: names of blocks, indices of calls, or the field's name.
        before, after: the decisions, as a plan's file has them.
    """

    where: str
    before: str
    after: str


def plan_differences(before: Plan, after: Plan) -> tuple[PlanDifference, ...]:
    """Returns what differs, fields of the step first; equal differences of several blocks or calls
    are one.
    """
    found = [
        PlanDifference(
            where=each.name, before=_word(getattr(before, each.name)), after=_word(getattr(after, each.name))
        )
        for each in fields(Plan)
        if each.name not in ("blocks", "calls") and getattr(before, each.name) != getattr(after, each.name)
    ]
    blocks: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*before.blocks, *after.blocks]):
        if before.block(name) != after.block(name):
            blocks.setdefault(_unlike(before.block(name), after.block(name)), []).append(name or "(model)")
    for (old, new), names in blocks.items():
        several = f"{len(names)} blocks: " if len(names) > 1 else "block "
        found.append(PlanDifference(where=f"{several}{joined_names(names)}", before=old, after=new))
    calls: dict[tuple[str, str], list[int]] = {}
    for index in range(max(len(before.calls), len(after.calls))):
        if before.call(index) != after.call(index):
            calls.setdefault(_unlike(before.call(index), after.call(index)), []).append(index)
    for (old, new), indices in calls.items():
        shown = joined_names(map(str, indices))
        several = f"{len(indices)} calls: " if len(indices) > 1 else "call "
        found.append(PlanDifference(where=f"{several}{shown}", before=old, after=new))
    return tuple(found)


def _unlike(before: BlockPlan | CallPlan, after: BlockPlan | CallPlan) -> tuple[str, str]:
    """Returns the decisions that differ, of both."""
    names = [each.name for each in fields(before) if getattr(before, each.name) != getattr(after, each.name)]
    old, new = (", ".join(f"{name}={_word(getattr(made, name))}" for name in names) for made in (before, after))
    return old, new


def _word(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
