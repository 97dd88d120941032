"""`OptimizerDriver`: the engine's one door to the user's optimizer.

In: the live optimizer and the model's named parameters. Out: exact updates of pieces, layouts of
states, hooks once a step, and the states' way out of the user's object and back.

The life of a parameter's states: in `optimizer.state` (the user's) -> `adopt()` hands them out one
parameter at a time -> memfit's homes; each step a piece of them is lent to `update()` -> at the end
`restore()` puts them back and `release()` gives the object back.

Exactness: the bits are those of the user's class, with its flags, *on the device of the piece*. A
model on a GPU whose update a plan runs on the host gets the CPU's bits; whether that is allowed is
the plan's question.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.core.errors import UsageError
from memfit.optimizers import standing as structure
from memfit.optimizers.detect import HostUpdates, detect
from memfit.optimizers.interception import AdoptedStep, Interception, OwnerCallbacks, run_post_hooks, run_pre_hooks
from memfit.optimizers.shadow import Part, Shadow, State
from memfit.optimizers.standing import StandingSteps, UpdateCost, update_cost
from memfit.optimizers.state_tensors import StateTensor, learn_layout
from memfit.optimizers.validation import Entry, UpdateKind, Verdict, known_verdict, narrowed, validated_entries


class OptimizerDriver(StandingSteps):
    """Runs one optimizer on pieces.

    Memory: layouts and names only; `update` needs what the class itself needs for tensors of the
    piece's size (Adam: one temporary of the piece for the denominator).
    Threads: `begin_step`, `end_step` and everything about the user's object on the main thread;
    `update` on one thread at a time (a lock sees to it), which may be another one, while the main
    thread runs autograd.

    Attributes:
        together: where ("cpu", "accelerator") the class's own step takes the tensors of a group
            together, as torch's do on an accelerator unless they are told not to.
        takes_one_by_one: a step on a processor has temporary memory of one parameter at a time,
            however many there are: torch's own loops.
        on_host: tells whether updates of parameters on an accelerator can run on the host.
        users_step: stands in for the user's `optimizer.step` while adopted.
    """

    def __init__(self, optimizer: Optimizer, named_parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Checks the optimizer and finds out how far its step may be cut.

        Args:
            optimizer: the user's; neither stepped nor changed. An unknown class is tried out on
                small tensors.
            named_parameters: the model's parameters; their bytes are not read.

        Raises:
            UsageError: not an optimizer, parameters that are foreign or doubled.
            UnsupportedError: a closure, sparse updates, `differentiable`, `capturable` on the CPU,
                wrappers: see `validation.py`.
        """
        self._optimizer = optimizer
        self._entries = validated_entries(optimizer, named_parameters)
        first_name = {id(entry.parameter): name for name, entry in self._entries.items()}
        self._alias = {name: first_name[id(p)] for name, p in named_parameters.items() if id(p) in first_name}
        known = {i: known_verdict(type(optimizer), group) for i, group in enumerate(optimizer.param_groups)}
        decided = {i: verdict for i, verdict in known.items() if verdict is not None}
        self._verdicts: dict[int, Verdict] = decided or detect(optimizer, list(self._entries.values()))
        self.on_host = HostUpdates(optimizer, list(self._entries.values()), self._verdicts)
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self.together = _together(optimizer)
        self.takes_one_by_one = is_torchs and "cpu" not in self.together
        self._master_dtype: torch.dtype | None = None
        self._layouts: dict[tuple[str, torch.dtype], tuple[StateTensor, ...]] = {}
        self._costs: dict[tuple[Any, ...], UpdateCost] = {}
        self._adopted_shapes: dict[str, State] = {}
        self._structure = structure.group_structure(optimizer)
        self._interception: Interception | None = None
        self.users_step = AdoptedStep()
        self._shadow: Shadow | None = None
        self._open: dict[str, State] = {}
        self._done: set[str] = set()
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that the optimizer updates, in the order of its groups."""
        return tuple(self._entries)

    def use_masters(self, dtype: torch.dtype) -> None:
        """From now on, what is not said of another dtype is about masters of this one: verdicts,
        layouts, states that are loaded or restored.

        Before `adopt`; until `release`.
        """
        self._master_dtype = dtype

    def verdict(self, name: str, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Verdict:
        """How far the update of this parameter may be cut, and why.

        Args:
            name: of the parameter.
            dtype: of the weight that will be updated, where it is not the parameter's own (a
                float32 master).
            device: where it will be updated, if not on the parameter's own device (a host home).
        """
        entry = self._entry(name)
        chosen = device or entry.parameter.device
        return narrowed(
            self._verdicts[entry.group], dtype or (self._master_dtype or entry.parameter.dtype), chosen.type
        )

    def state_layout(self, name: str, dtype: torch.dtype | None = None) -> tuple[StateTensor, ...]:
        """The states that this parameter has after its first steps, without allocating anything of
        its size.

        Args:
            name: of the parameter.
            dtype: of the weight that will be updated, where it is not the parameter's own (a
                float32 master).

        Raises:
            UnsupportedError: the states cannot be foretold, or are not tensors and numbers.
        """
        entry = self._entry(name)
        chosen = dtype or (self._master_dtype or entry.parameter.dtype)
        key = (entry.name, chosen)
        if key not in self._layouts:
            if self._interception is None:
                live: State = dict(self._optimizer.state.get(entry.parameter, {}))
            else:
                live = self._adopted_shapes[entry.name]
            kind = self._verdicts[entry.group].kind
            self._layouts[key] = learn_layout(self._optimizer, entry, kind, chosen, live)
        return self._layouts[key]

    def update_cost(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> UpdateCost:
        """Returns what the class takes for each element of this parameter that it updates at once.

        Args:
            name: of the parameter.
            dtype: of the weight that will be updated, where it is not the parameter's own (a
                float32 master).
            device: where it will be updated, if not on the parameter's own device.

        Raises:
            UnsupportedError: as `state_layout`.
        """
        entry = self._entry(name)
        chosen, where = dtype or (self._master_dtype or entry.parameter.dtype), device or entry.parameter.device
        kind = self.verdict(name, chosen).kind
        # Equal for parameters that look alike to the class.
        looks = (kind is UpdateKind.ELEMENTWISE) or tuple(entry.parameter.shape)
        key = (entry.group, kind, chosen, looks, where)
        if key not in self._costs:
            layout = self.state_layout(name, chosen)
            self._costs[key] = update_cost(self._optimizer, entry, kind, chosen, layout, where)
        return self._costs[key]

    # The step.

    def begin_step(self) -> None:
        """Runs the step's pre-hooks, then takes the hyperparameters as they stand.

        Raises:
            UsageError: a step is under way, or groups were changed by hand so that homes no longer
                match.
            UnsupportedError: a hook asks for a closure.
        """
        if self._shadow is not None:
            raise UsageError("begin_step: the step before was neither ended (end_step) nor given up (abandon_step).")
        run_pre_hooks(self._optimizer)
        structure.check_groups(self._optimizer, self._entries.values(), self._structure)
        self._open.clear()
        self._done.clear()
        self._shadow = Shadow(self._optimizer)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group that the step under way uses, without parameters."""
        assert self._shadow is not None, "settings are of a step that is under way"
        return [dict(group) for group in self._shadow.groups]

    def begin_again(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """As `begin_step`, for updates that are made from a journal: with these hyperparameters,
        and without hooks.

        End it by `abandon_step`.

        Args:
            settings: what `settings` was then.

        Raises:
            UsageError: a step is under way, or the groups are others.
        """
        if self._shadow is not None:
            raise UsageError("begin_again: the step before was neither ended (end_step) nor given up (abandon_step).")
        structure.check_groups(self._optimizer, self._entries.values(), self._structure)
        if len(settings) != len(self._optimizer.param_groups):
            raise UsageError(
                f"begin_again: settings of {len(settings)} groups, not {len(self._optimizer.param_groups)}."
            )
        self._open.clear()
        self._done.clear()
        self._shadow = Shadow(self._optimizer, groups=[dict(group) for group in settings])

    def end_step(self) -> None:
        """Tells LR schedulers that a step was made and runs the post-hooks.

        Raises:
            UsageError: no step is under way, or a parameter was updated in part only.
        """
        if self._shadow is None:
            raise UsageError("end_step without begin_step.")
        if self._open:
            raise UsageError(f"end_step: the last piece of {min(self._open)!r} was never updated; the step is torn.")
        self._shadow = None
        run_post_hooks(self._optimizer)

    def abandon_step(self) -> None:
        """Forgets a step that failed between `begin_step` and `end_step`.

        No hooks run; updated pieces stay updated.
        """
        self._shadow = None
        self._open.clear()
        self._done.clear()

    def update(
        self,
        name: str,
        weight_piece: torch.Tensor,
        gradient_piece: torch.Tensor,
        state_piece: Mapping[str, Any],
        *,
        first: bool,
        last: bool,
    ) -> State:
        """One step of the user's class on one piece, in place.

        What `optimizer.step()` would do to these elements.

        Args:
            name: of the parameter.
            weight_piece: elementwise: any contiguous part, of a multiple of
                `verdict(name).piece_multiple` elements unless `last`. Per parameter: the whole
                weight in its own shape.
            gradient_piece: same shape, dtype and device. May be overwritten.
            state_piece: `like` states cut as the weight is, updated in place; scalars as they were
                *before* this step, for every piece (they are not changed); `{}` at a parameter's
                first step.
            first: whether this is the first piece of the parameter in this step.
            last: whether it is the last one.

        Returns:
            The new state: the tensors that were lent, states that came into being (of the piece's
            size, to be copied home), and new scalars. Scalars are the same for every piece; store
            them once, with the last.

        Raises:
            UsageError: twice in a step, pieces out of order or not aligned, or scalars that changed
                between pieces.
        """
        with self._lock:
            part = self._opened(name, weight_piece, gradient_piece, state_piece, first=first, last=last)
            assert self._shadow is not None
            return self._closed([part], [weight_piece.shape], self._shadow.run([part]), last=last)[0]

    def update_together(self, lent: Sequence[tuple[str, torch.Tensor, torch.Tensor, Mapping[str, Any]]]) -> list[State]:
        """One step of the user's class on several whole parameters, each elementwise; as `update`
        for each of them.

        Args:
            lent: name, weight, gradient and state of each.
        """
        with self._lock:
            parts = [self._opened(*each, first=True, last=True) for each in lent]
            assert self._shadow is not None
            return self._closed(parts, [weight.shape for _, weight, _, _ in lent], self._shadow.run(parts), last=True)

    def _opened(
        self,
        name: str,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, Any],
        *,
        first: bool,
        last: bool,
    ) -> Part:
        """Returns the part to run of a piece that may come now."""
        entry = self._entry(name)
        verdict = self.verdict(name, weight.dtype, weight.device)
        assert self._shadow is not None, "a piece is updated inside of a step"
        if entry.name in self._done:
            raise UsageError(f"{entry.name!r} was already updated in this step.")
        assert verdict.kind is not UpdateKind.JOINT, f"{entry.name!r} cannot be updated alone: {verdict.reason}"
        if first == (entry.name in self._open):
            told = "a second first piece" if first else "a piece before the first one"
            raise UsageError(f"update of {entry.name!r}: {told} in one step.")
        structure.check_piece(entry, verdict, weight, whole=first and last)
        structure.check_alignment(entry, verdict, weight, last=last)
        part, scalars = _lend(entry, self.state_layout(entry.name, weight.dtype), weight, gradient, state)
        if first:
            self._open[entry.name] = scalars
        elif not structure.same_scalars(self._open[entry.name], scalars):
            raise UsageError(
                f"The scalar states of {entry.name!r} changed between two pieces of one step. Every piece needs "
                "them as they were before the step; store the new ones with the last piece."
            )
        return part

    def _closed(
        self, parts: Sequence[Part], shapes: Sequence[torch.Size], states: Sequence[State], *, last: bool
    ) -> list[State]:
        """Returns new states, of the shapes in which their pieces came."""
        given: list[State] = []
        for part, shape, state in zip(parts, shapes, states, strict=True):
            layout = self.state_layout(part.name, part.weight.dtype)
            structure.check_keys(type(self._optimizer).__name__, part.name, layout, state)
            if last:
                del self._open[part.name]
                self._done.add(part.name)
            # a 0-d weight: states go back as the piece came
            like = {t.key for t in layout if t.shape_kind == "like"} if shape != part.weight.shape else ()
            given.append({key: value.view(shape) if key in like else value for key, value in state.items()})
        return given

    # The user's object.

    def adopt(self, callbacks: OwnerCallbacks, order: Iterable[str] = ()) -> Iterator[tuple[str, State]]:
        """Takes the states over: the object is intercepted at once, its states come out one
        parameter at a time.

        Each parameter's entry leaves `optimizer.state` as it is yielded, so its memory is free as
        soon as the caller drops it. Parameters without states yield `{}`. Until the iteration has
        ended nothing else may use the object.

        Args:
            callbacks: of who has the states from now on.
            order: names of parameters whose states come first; the others follow.

        Raises:
            UsageError: already adopted.
        """
        if self._interception is not None:
            raise UsageError("The optimizer's states are already adopted; release() them first.")
        for name, entry in self._entries.items():
            live = self._optimizer.state.get(entry.parameter, {})
            # Layouts asked for later need to know which states there were, not their bytes.
            shapes = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in live.items()}
            self._adopted_shapes[name] = shapes
        self.users_step = AdoptedStep()
        interception = Interception(
            self._optimizer,
            self._entries,
            callbacks,
            self._check_loaded,
            step=self.users_step,
            master_dtype=self._master_dtype,
        )
        interception.install()
        self._interception = interception
        kept = interception.kept_state
        names = dict.fromkeys([*order, *self._entries])
        return ((name, kept.pop(self._entries[name].parameter, {})) for name in names)

    def restore(self, name: str, state: State) -> None:
        """Puts a parameter's whole state back where torch keeps it.

        Args:
            name: of the parameter.
            state: its tensors are taken over, not copied; `{}` leaves no entry, as before a first
                step.

        Raises:
            UsageError: not adopted, or a state that does not fit its layout.
        """
        entry = self._entry(name)
        if self._interception is None:
            raise UsageError("restore: the optimizer's states are not adopted.")
        structure.check_whole_state("restore", entry.name, self.state_layout(name), state)
        if state:
            self._interception.kept_state[entry.parameter] = state

    def release(self) -> None:
        """Makes the object an ordinary optimizer again, with the states that `restore` gave back.

        May be repeated.
        """
        if self._interception is not None:
            self._interception.remove()
            self._interception = None
            self._master_dtype = None
            self._layouts.clear()
            self._adopted_shapes.clear()

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(self._alias.get(name, name))
        if entry is None:
            raise UsageError(f"The optimizer updates no parameter called {name!r}.")
        return entry

    def _check_loaded(self, loaded: Mapping[Any, State]) -> None:
        structure.check_groups(self._optimizer, self._entries.values(), self._structure)
        for name, entry in self._entries.items():
            state = loaded.get(entry.parameter, {})
            structure.check_whole_state("load_state_dict", name, self.state_layout(name), state)


def _together(optimizer: Optimizer) -> frozenset[str]:
    groups = [group for group in optimizer.param_groups if "foreach" in group]
    where = {"cpu", "accelerator"} if any(group["foreach"] for group in groups) else set[str]()
    if any(group["foreach"] is None and not group.get("fused") for group in groups):
        where.add("accelerator")
    return frozenset(where)


def _lend(
    entry: Entry,
    layout: Sequence[StateTensor],
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, Any],
) -> tuple[Part, State]:
    """The part to run, with copies of the scalars: the class counts in place, the next piece needs
    the old ones.
    """
    scalar_keys = {t.key for t in layout if t.shape_kind == "scalar"}
    scalars = {key: value for key, value in state.items() if key in scalar_keys}
    lent = dict(state)
    lent.update({key: value.clone() for key, value in scalars.items() if isinstance(value, torch.Tensor)})
    if not entry.parameter.shape:
        # A 0-d weight lies in its home as one element; the class knows it without dimensions.
        weight, gradient = weight.view(()), gradient.view(())
        lent = {key: value if key in scalars or value is None else value.view(()) for key, value in lent.items()}
    part = Part(
        group=entry.group, name=entry.name, parameter=entry.parameter, weight=weight, gradient=gradient, state=lent
    )
    return part, {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in scalars.items()}
