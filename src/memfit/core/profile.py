"""Profile: the memory of a training step as data (blocks, calls, storages).

In: nothing (`trace` fills it). Out: frozen dataclasses that planning and scheduling
read without torch; prediction reads only the `Step` that is made of them.

[Note: segments of a trace]
A microbatch's forward is cut at the *entry* of each call. What runs from the beginning to the first
entry is segment -1 (the prologue); what runs from the entry of call c to the entry of call c + 1 is
segment c, so that code between calls (such as a residual sum or, after the last call, the loss)
belongs to the call before it. Backward is cut the same way: segment c of the backward begins when
the first gradient reaches an output of call c and ends when that of the next call in reverse order
begins. The engine switches microbatches, fetches and frees at exactly these points, so what is
profiled per segment is what a schedule's action costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from memfit.core.layout import flat_layout
from memfit.core.limits import KERNELS_KEPT, TILED_PRODUCT_KERNEL_BYTES, format_bytes
from memfit.core.operators import UntiledAttention
from memfit.core.saved_policies import Saved
from memfit.core.step_report import html_table
from memfit.core.work_kinds import Work

# Storages of a traced step: who makes, saves, receives and holds each.
#
# In: nothing (`trace` fills it). Out: a frozen dataclass, a part of
# `core.profile.TraceProfile`.


@dataclass(frozen=True, kw_only=True)
class StorageProfile:
    """A storage that the traced step allocated (weights and their gradients excluded).

    Attributes:
        index: position in `TraceProfile.storages`.
        nbytes: its bytes.
        segment: forward segment in which it was made (see [Note: segments of
            a trace] in `core.profile`).
        saved_inside: calls that saved it for backward between their entry and their return;
            recompute drops it, offload moves it.
        saved_outside: segments whose code between calls saved it; always kept.
        argument_of: calls that receive it as an argument; a recomputed call must hold it.
        given_apart: calls among these that receive a tensor which no call returned as it is (a
            view, or a result of code between calls): also a segment in which it is made and that
            recomputes must hold it.
        last_use: last forward segment in which an operation reads it or a call receives it (or the
            one that made it).
        uses: how often operations of the forward read it, by segment; views read nothing.
        backward_uses: how often those of the backward do, where nothing is made again.
        held_until: last forward segment at whose end the program still holds it without autograd's
            having saved it (such as logits in an output object); equal to `last_use` if not held
            longer.
        leaves: an offload moves it, of the call that saved it or got it as an argument; else it
            stays until backward (see `core.shape`).
        is_unseen: an autograd function holds it without the saved-tensor hooks, so that it stays
            until backward under every plan.
        is_input: it belongs to the batch or is a buffer, so that it exists before and after the
            step.
        is_buffer: it is a buffer of the model (then `is_input` too), which all microbatches share:
            it counts once.
        is_lasting: the program still holds it when the step is over (a module keeps it); from the
            second step on, one like it exists before the forward and all through the step.
    """

    index: int
    nbytes: int
    segment: int
    saved_inside: tuple[int, ...] = ()
    saved_outside: tuple[int, ...] = ()
    argument_of: tuple[int, ...] = ()
    given_apart: tuple[int, ...] = ()
    last_use: int = -1
    uses: tuple[tuple[int, int], ...] = ()
    backward_uses: int = 0
    held_until: int = -1
    leaves: bool = True
    is_unseen: bool = False
    is_input: bool = False
    is_buffer: bool = False
    is_lasting: bool = False


# Memory of the update of one parameter, as data.
#
# In: nothing (`planner.problem` fills it). Out: a frozen dataclass.


@dataclass(frozen=True, kw_only=True)
class UpdateProfile:
    """Memory of the update of one parameter, which is made in pieces.

    Attributes:
        piece_elements: elements in a piece; the last one may have fewer.
        first_piece_elements: the same in the parameter's first update, which makes its states; 0:
            equal.
        scratch_bytes: temporary memory of the optimizer for a piece.
        host_scratch_bytes: the same on the host, beside an accelerator. The optimizer may have
            another implementation there (one tensor at a time instead of several).
        state_bytes: bytes of all states of the parameter at home.
        encoded_elements: elements of encoded states, summed over states: twice the parameter's for
            two encoded moments.
        work_share: bytes that the optimizer's operations move for an element, as a multiple of what
            AdamW's move.
        needs_whole: the optimizer needs all of the parameter, so that one rank must hold it whole.
    """

    piece_elements: int
    first_piece_elements: int = 0
    scratch_bytes: int = 0
    host_scratch_bytes: int = 0
    state_bytes: int = 0
    encoded_elements: int = 0
    work_share: float = 1.0
    needs_whole: bool = False

    def scratch_of(self, elements: int) -> int:
        """Returns the temporary bytes of the optimizer for some elements at once."""
        return math.ceil(self.scratch_bytes * elements / max(self.piece_elements, 1))


_BLOCKS_SHOWN = 30


@dataclass(frozen=True, kw_only=True)
class TensorProfile:
    """A parameter: its dotted name (the first one if tied), shape, dtype as torch prints it without
    the prefix, bytes, and bytes of the master beside it (0: the weight is its own).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    master_nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """Block: parameters that are moved together.

    Attributes:
        name: dotted name of the module that owns them.
        kind: equal for blocks of the same structure (class and shapes), so that one price serves
            them all.
        parameters: in the order of `named_parameters`; each parameter of the model is in exactly
            one block.
        is_spanning: a weight is read by code between calls, so the block must stay on the device.
        encoded: names of frozen parameters that rest in few bits (`core.storage_formats`).
        encoded_bytes: bytes of the home of all of the block's weights then; 0: none is encoded.
    """

    name: str
    kind: str
    parameters: tuple[TensorProfile, ...]
    is_spanning: bool = False
    encoded: frozenset[str] = frozenset()
    encoded_bytes: int = 0

    @cached_property
    def trains(self) -> bool:
        """True if a parameter gets a gradient."""
        return any(p.requires_grad for p in self.parameters)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, without alignment."""
        return sum(p.nbytes for p in self.parameters)

    @cached_property
    def flat_bytes(self) -> tuple[int, ...]:
        """Bytes of flat buffers: weights, masters, gradients as made, gradients as summed."""
        every, trained = self.parameters, [p for p in self.parameters if p.requires_grad]
        sizes = [[p.nbytes for p in every], [p.master_nbytes for p in every], [p.nbytes for p in trained]]
        return tuple(flat_layout(s)[1] for s in (*sizes, [p.master_nbytes or p.nbytes for p in trained]))

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of the parameters that train."""
        return sum(p.nbytes for p in self.parameters if p.requires_grad)

    @cached_property
    def largest_gradient_bytes(self) -> int:
        """Bytes of the largest single gradient: adding another microbatch's holds it twice."""
        return max((p.nbytes for p in self.parameters if p.requires_grad), default=0)

    @cached_property
    def largest_gradient_elements(self) -> int:
        """Elements of the largest single gradient."""
        return max((math.prod(p.shape) for p in self.parameters if p.requires_grad), default=0)


@dataclass(frozen=True, kw_only=True)
class HeldResults:
    """Results that a recomputed call holds under a policy, beyond its arguments.

    Attributes:
        saved: the policy.
        nbytes: bytes of all of them.
        unneeded_bytes: the part that recomputing the call alone does not reach, and that is not
            held then.
        peak_bytes: as `CallProfile.inside_peak_bytes`, above what is held; None: not traced.
        forward_peak_bytes: as `CallProfile.unsaved_peak_bytes`, with what is held; None: untraced.
        spared_work: amounts of the forward that are not repeated, since their results are held.
    """

    saved: Saved
    nbytes: int
    unneeded_bytes: int = 0
    peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    spared_work: Work = ()


@dataclass(frozen=True, kw_only=True)
class CallProfile:
    """A call of a module, in forward order.

    Attributes:
        index: position in the forward order.
        site: dotted name of the module called.
        blocks: names of the blocks whose weights it reads, its own first.
        kind: equal for calls of equal cost.
        is_repeated: the module is one of a series of similar ones (a transformer layer), not a
            head, an embedding or a final norm.
        has_backward: gradients flow through it.
        uses_random: torch's operations in it draw random numbers (dropout).
        mutates_inputs: it changes an argument in place, so that recomputing it needs a copy.
        must_keep: an argument or a saved tensor is changed in place later (or the call changes the
            batch or a buffer itself), so that recomputing or offloading would use other values.
        changes_arguments: an argument (a key-value cache) holds other tensors after the call;
            recomputing would change it twice.
        is_substituted: other tensors replace its parameters (`torch.func.functional_call`), which
            recomputing would not use.
        changes_itself: it changes a tensor in place that its module holds beside buffers.
        forward_peak_bytes: peak of the bytes made inside the segment (saved tensors and outputs
            included), above those alive at its entry.
        unsaved_peak_bytes: the same if autograd gets none of what it saves; None: not traced.
        inside_peak_bytes: `forward_peak_bytes` until the call returns, which recomputing needs.
        output_bytes: bytes of distinct new storages that the call returns.
        passed_on_bytes: most bytes that its backward has made when it first asks for a saved
            tensor, above those alive at its entry; None: not traced, or it asks for none.
        held_results: results that are held under each policy that recomputes and keeps results of
            some operators. A policy that was not traced is priced as if it held all that the call
            saves.
        gradient_bytes: gradients of parameters made in its backward segment.
        backward_fresh_peak_bytes: as `backward_peak_bytes`, with gradients of parameters, each from
            its creation on; None: not traced.
        backward_adding_peak_bytes: the same, each until it has been added to the one that is there.
        gradient_sum_bytes: `gradient_bytes` in fp32 where they are narrower.
        backward_summed_peak_bytes: as `backward_fresh_peak_bytes`, with each gradient copied as it
            arrives into a sum that takes its place, in fp32 where it is narrower; None: not traced.
        backward_peak_bytes: peak of the bytes above those alive at the backward segment's entry,
            gradients of parameters excluded, if the call keeps all that it saves (what backward
            frees of that is subtracted).
        backward_leaves_bytes: bytes alive at the end of the backward segment above those at entry,
            without gradients of parameters; negative when more was freed (saved tensors) than made.
        between_peak_bytes, between_leaves_bytes: the same of its last part: code before the call.
        forward_flops, backward_flops: floating point operations (2 a multiply-add).
        forward_work, backward_work: amounts by class, those operations among them; empty: the flops
            are all that is known.
        unreached_work: of the forward's, behind the last tensor saved; no second run repeats it.
    """

    index: int
    site: str
    blocks: tuple[str, ...]
    kind: str
    is_repeated: bool
    has_backward: bool
    uses_random: bool = False
    mutates_inputs: bool = False
    must_keep: bool = False
    changes_arguments: bool = False
    is_substituted: bool = False
    changes_itself: bool = False
    forward_peak_bytes: int = 0
    unsaved_peak_bytes: int | None = None
    inside_peak_bytes: int = 0
    output_bytes: int = 0
    passed_on_bytes: int | None = None
    held_results: tuple[HeldResults, ...] = ()
    gradient_bytes: int = 0
    backward_fresh_peak_bytes: int | None = None
    backward_adding_peak_bytes: int | None = None
    gradient_sum_bytes: int = 0
    backward_summed_peak_bytes: int | None = None
    backward_peak_bytes: int = 0
    backward_leaves_bytes: int = 0
    between_peak_bytes: int = 0
    between_leaves_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    forward_work: Work = ()
    backward_work: Work = ()
    unreached_work: Work = ()

    def forward_peak(self, saved: Saved) -> int:
        """Returns the peak of the bytes made inside the segment under a policy, above those alive
        at its entry.
        """
        if not saved.policy.recomputes:
            return self.forward_peak_bytes
        held = self.held(saved) if saved.policy.kept_operators else None
        traced = self.unsaved_peak_bytes if not saved.policy.kept_operators else held and held.forward_peak_bytes
        return self.forward_peak_bytes if traced is None else traced

    def held(self, saved: Saved) -> HeldResults | None:
        """Returns the results that the call holds under a policy; None if that was not traced."""
        return next((held for held in self.held_results if held.saved is saved), None)

    @property
    def runs_once(self) -> bool:
        """True if running the call again would compute something else."""
        return self.changes_arguments or self.is_substituted or self.changes_itself


@dataclass(frozen=True, kw_only=True)
class TraceProfile:
    """One microbatch of `rows` rows, traced forward and backward.

    Attributes:
        rows: size of the batch dimension.
        calls: in forward order.
        storages: memory made in forward that is alive at the end of a segment, saved for backward,
            or an argument of a call.
        loose_reads: (block, number of calls before) of reads of trainable weights by code between
            calls.
        uses_random: its forward draws random numbers from torch's, Python's or NumPy's generators.
        prologue_peak_bytes: peak bytes in segment -1.
        seed_peak_bytes: peak bytes above those at the forward's end in the backward of the loss,
            until the first gradient reaches a call.
        seed_leaves_bytes: bytes alive at the end of that stretch above those at its start.
        whole_peak_bytes: peak of the plain step (forward and backward, this microbatch),
            activations only.
        plain_peak_bytes: the same with the gradients of parameters, each from its creation on, as a
            meter from outside shows.
        largest_saved: (operation and shape, bytes) of the largest saved tensors, largest first:
            those of at most 20 kinds, where names that differ in a number are of one kind.
        made_at: lines of the program that made these, by their operation and shape: each one's, of
            several the first that made one.
        untiled_attention: attention that bypasses tiled kernels, in forward order.
        prologue_work, seed_work: amounts by class in segment -1, and in the backward of the loss.
        kernel_bytes: taken outside of tensors, for kernels that it runs and inside of products.
        libraries: names of those libraries that take memory when they first compute, a key of
            `core.limits.LIBRARY_BYTES` each.
    """

    rows: int
    calls: tuple[CallProfile, ...]
    storages: tuple[StorageProfile, ...]
    loose_reads: tuple[tuple[str, int], ...] = ()
    uses_random: bool = False
    prologue_peak_bytes: int = 0
    seed_peak_bytes: int = 0
    seed_leaves_bytes: int = 0
    whole_peak_bytes: int = 0
    plain_peak_bytes: int = 0
    largest_saved: tuple[tuple[str, int], ...] = ()
    made_at: Mapping[str, str] = field(default_factory=dict[str, str])
    untiled_attention: tuple[UntiledAttention, ...] = ()
    prologue_work: Work = ()
    seed_work: Work = ()
    kernel_bytes: int = 0
    libraries: tuple[str, ...] = ()

    def __repr__(self) -> str:
        saved = format_bytes(sum(self.saved_bytes(call.index) for call in self.calls))
        return f"<TraceProfile of {self.rows} rows: {len(self.calls)} calls, {saved} saved inside of them>"

    def shared_with_tail(self, tail: int) -> str | None:
        """Returns a block that is read before call `tail` and, outside of calls, after it, so that
        the backward of the calls from there on cannot run by itself; None if there is none.
        """
        after = {block for block, calls in self.loose_reads if calls > tail}
        before = {block for block, calls in self.loose_reads if calls <= tail}
        before.update(*(call.blocks for call in self.calls[:tail]))
        return min(after & before, default=None)

    def saved_bytes(self, call: int) -> int:
        """Returns the bytes that the call saves beyond its arguments, which recompute drops."""
        return sum(
            s.nbytes for s in self.storages if call in s.saved_inside and call not in s.argument_of and not s.is_input
        )

    def boundary_bytes(self, call: int) -> int:
        """Returns the bytes of the arguments that a recomputed call must hold (batch and buffers
        excluded).
        """
        return sum(s.nbytes for s in self.storages if call in s.argument_of and not s.is_input)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Memory of a training step of a model with an optimizer and a batch.

    Attributes:
        batch_rows: rows of the whole batch of a step.
        blocks: partition of the parameters, in the order of their first call.
        traces: by number of rows of a microbatch, at least one. All have the same calls.
        state_bytes: bytes of optimizer states by block name, as they are moved.
        state_home_bytes: the same at home, each state on pages of its own; a block that is not
            named has its state_bytes.
        encoded_elements: elements of states that an update decodes and encodes, by block name.
        updates: memory of updates, by parameter name.
        updates_together: the optimizer's own step takes all parameters at once (`foreach`), and not
            one after the other.
        reads_batch_statistics: a module computes statistics over the batch (batch norm in training
            mode): the batch must not be split.
        unsplittable_buffers: names of buffers whose change by the forward depends on how the batch
            is cut (running ranges of activations, power iterations): the batch must not be split.
        written_weights: names of the parameters that the forward itself changes
            (`nn.Embedding(max_norm=)`, averages of weights): they must stay where they are, nothing
            may run twice, and microbatches run one after the other.
        shared_weights: names of the parameters whose gradient is a sum of several uses in one
            microbatch (tied, or called twice).
        carried: names of the submodules, and of the numbers, flags, words and tensors on modules or
            kept by the loss, that a forward changes for the one after it (an exchanged attention, a
            counter): microbatches run one after the other.
        viewed_gradients: names of the parameters whose gradient comes as a view (of a transposed
            product): autograd adds two of them into a third.
        read_gradients: names of the parameters whose `.grad` hooks of others read in backward: all
            gradients stay on the device, and updates wait for the end of backward.
        counts_losses: the loss returns (sum, count).
        host_update_obstacle: reason why updates cannot run on the host beside an accelerator; empty
            if they can.
        agrees_on_host: in a trial of the optimizer, updates on the host gave the same bits as on
            the device.
        buffer_bytes: buffers of the model (always resident).
        is_accumulated: the batch is two micro-batches of the user's own loop, one after the other.
        own_parts: parts in which the batch comes, with sums of the user's own; 0: it comes whole.
        rows_are_alike: it is cut between rows of equal shapes, so that a microbatch of a row less
            takes less.
        compiled: names of the sites whose calls torch.compile compiles (`core.compiled_calls`).
        source: "fake" (traced without data) or "real" (a real step was run on real tensors).
        source_reason: why a fake trace was not possible; empty if it was or was not tried.
    """

    batch_rows: int
    blocks: tuple[BlockProfile, ...]
    traces: Mapping[int, TraceProfile]
    state_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    state_home_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    encoded_elements: Mapping[str, int] = field(default_factory=dict[str, int])
    updates: Mapping[str, UpdateProfile] = field(default_factory=dict[str, UpdateProfile])
    updates_together: bool = False
    reads_batch_statistics: bool = False
    unsplittable_buffers: tuple[str, ...] = ()
    written_weights: tuple[str, ...] = ()
    shared_weights: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    viewed_gradients: tuple[str, ...] = ()
    read_gradients: tuple[str, ...] = ()
    counts_losses: bool = False
    host_update_obstacle: str = ""
    agrees_on_host: bool = False
    buffer_bytes: int = 0
    is_accumulated: bool = False
    own_parts: int = 0
    rows_are_alike: bool = False
    compiled: tuple[str, ...] = ()
    source: str = "fake"
    source_reason: str = ""

    def __repr__(self) -> str:
        facts = ", ".join(f"{what} {size}" for what, size in self._totals())
        return f"<Profile of {self.batch_rows} rows, {len(self.blocks)} blocks, all predicted: {facts}>"

    def _repr_html_(self) -> str:
        """Shows in a notebook the totals and the blocks (the first ones of a large model)."""
        rows = [
            (
                block.name or "(model)",
                format_bytes(block.weight_bytes),
                format_bytes(block.gradient_bytes),
                format_bytes(self.state_bytes.get(block.name, 0)),
            )
            for block in self.blocks
        ]
        if len(rows) > _BLOCKS_SHOWN:
            rows = [*rows[: _BLOCKS_SHOWN - 1], (f"... and {len(rows) - _BLOCKS_SHOWN + 1} more", "", "", "")]
        totals = html_table(f"Profile of a plain step of {self.batch_rows} rows, predicted", self._totals())
        return totals + html_table("By block", rows, ("block", "weights", "gradients", "optimizer states"))

    def _totals(self) -> list[tuple[str, str]]:
        trace = self.traces.get(self.batch_rows) or next(iter(self.traces.values()))
        sizes = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer states": sum(self.state_bytes.values()),
            f"activations at their peak ({trace.rows} rows)": trace.whole_peak_bytes,
            "peak of tensors": self.plain_step_bytes(trace),
        }
        return [(what, format_bytes(nbytes)) for what, nbytes in sizes.items()]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(block.gradient_bytes for block in self.blocks)

    @property
    def plain_update_bytes(self) -> int:
        """Most that the optimizer's own step has alive beside weights, gradients and states."""
        elements = {p.name: math.prod(p.shape) for block in self.blocks for p in block.parameters}
        each = [update.scratch_of(elements[name]) for name, update in self.updates.items()]
        return sum(each) if self.updates_together else max(each, default=0)

    def plain_step_bytes(self, trace: TraceProfile) -> int:
        """Returns the peak of tensors in a plain step of a traced batch, without the batch: in
        forward and backward, or in `optimizer.step()`.
        """
        resting = self.weight_bytes + sum(self.state_bytes.values()) + self.buffer_bytes
        return resting + max(trace.plain_peak_bytes, self.gradient_bytes + self.plain_update_bytes)

    def block(self, name: str) -> BlockProfile:
        """Returns the block of that name. Raises `KeyError` if there is none."""
        for block in self.blocks:
            if block.name == name:
                return block
        raise KeyError(name)

    def resting_state_bytes(self, name: str) -> int:
        """Returns the bytes that the optimizer states of a block take at home."""
        return self.state_home_bytes.get(name, self.state_bytes.get(name, 0))

    @property
    def remark(self) -> str:
        """A sentence for what no trace without data gave; else empty."""
        if self.source != "real":
            return f"Traced, and {self.source_reason}." if self.source_reason else ""
        return f"Measured in real steps of {[*self.traces]} rows, since none without data goes: {self.source_reason}."

    @property
    def kernel_bytes(self) -> int:
        """Most bytes that libraries take for the kernels of a microbatch."""
        return max((trace.kernel_bytes for trace in self.traces.values()), default=0)

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the libraries that a step computes with."""
        return tuple(sorted({name for trace in self.traces.values() for name in trace.libraries}))

    def kernel_bytes_of(self, microbatches: int) -> int:
        """Returns the bytes of a step's kernels; microbatches of two sizes have kernels each."""
        rows, more = divmod(self.batch_rows, microbatches)
        largest = self.traces.get(rows + bool(more))
        if largest is None or not (more and self.rows_are_alike):
            return self.kernel_bytes if largest is None else largest.kernel_bytes
        both = largest.kernel_bytes + self.traces.get(rows, largest).kernel_bytes
        return min(both, max(largest.kernel_bytes, KERNELS_KEPT * TILED_PRODUCT_KERNEL_BYTES))

    @property
    def has_masters(self) -> bool:
        """True if a weight has a master beside it."""
        return any(p.master_nbytes for b in self.blocks for p in b.parameters)

    @property
    def may_split(self) -> bool:
        """True if the trace shows no effect of cutting the batch. The loss must add up besides."""
        return not (self.reads_batch_statistics or self.unsplittable_buffers)

    @property
    def written_blocks(self) -> frozenset[str]:
        """Names of the blocks with a parameter that the forward changes."""
        written = set(self.written_weights)
        return frozenset(b.name for b in self.blocks if any(p.name in written for p in b.parameters))

    @property
    def keeps_order(self) -> bool:
        """True if microbatches must run forward one after the other as in a plain loop, because one
        changes what the next one computes with.
        """
        swaps = any(
            call.is_substituted or call.changes_itself for trace in self.traces.values() for call in trace.calls
        )
        changes = self.carried or self.written_weights or self.read_gradients or swaps
        return bool(self.is_accumulated or changes or (self.own_parts and self.turns_show))

    @property
    def turns_show(self) -> bool:
        """True if parts that take turns give other numbers than one after the other."""
        return bool(self.shared_weights) or not self.may_split or any(t.uses_random for t in self.traces.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(b.weight_bytes for b in self.blocks)


# Profile of a step that accumulates: what the user's own loop may do, as planning sees it.
#
# In: the profile of one batch. Out: that of two such batches, one after the other.


def accumulated(profile: Profile) -> Profile:
    """Returns the profile of a step of the user's own loop, which runs two batches like this one
    back before it updates: the second meets the gradients of the first, as any later one does.
    """
    # Nobody cuts anything: what forbids to cut a batch has no say.
    return replace(
        profile,
        batch_rows=2 * profile.batch_rows,
        reads_batch_statistics=False,
        unsplittable_buffers=(),
        is_accumulated=True,
    )
