"""Objects of the user's whose state belongs to each commit, and positions in data and random
numbers.

In: schedulers, averages, loaders, generators. Out: their states, each taken at its moment; and
back, where a run goes on.

[Note: when a step is committed]
A training loop draws a batch, calls `job.step`, and then does what belongs to the step: a
scheduler, an average, an evaluation, a log. A commit must resume at the top of that loop, and
memfit sees only its own calls. So there are two moments. *Positions* (random numbers, loaders,
samplers) are noted whenever a method of the job returns: what is drawn after that is drawn again by
the loop that resumes. *Everything else* (schedulers, param groups, averages) is taken when the next
`step` begins: at that point the loop body has finished, so the step is committed. `close` commits
what is left, unless an error is passing through, in which case nobody knows what was done; `commit`
commits at once, for a program that knows. `evaluate` and `save` commit nothing: they may stand
between the step and its scheduler.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.checkpoints import run_state
from memfit.checkpoints.run_state import Registered, part, registered, taken
from memfit.checkpoints.run_store import RunStore
from memfit.core.errors import StoreError, UsageError
from memfit.store.state import encode_state


class Registry:
    """Registered objects of a run, and where its data and random numbers stood.

    Args:
        run: whose last commit may have states that wait for their objects.
        optimizer: the user's; it belongs to every commit without being registered.
    """

    def __init__(self, run: RunStore, optimizer: torch.optim.Optimizer) -> None:
        self._run = run
        self._optimizer = optimizer
        self._registered: dict[str, Registered] = {}
        self._positions: dict[str, Any] = {}
        self._waiting: dict[str, Any] = dict(part(run.state, "registered", dict)) if run.is_resumed else {}
        self._random: dict[str, Any] | None = None

    def carry_on(self, before: Registry) -> None:
        """Takes over what was registered with the plan before.

        It has not changed since the commit that the run goes back to.
        """
        self._registered = dict(before._registered)
        self._positions = dict(before._positions)
        self._random = before._random
        self._waiting = {}

    def register(self, name: str, thing: Any, *, is_new: bool, step: int) -> None:
        """Adds an object, and gives it the state that the run has of it; see `Job.register`."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"register: a name is a text, not {name!r:.80}")
        if name in self._registered:
            raise UsageError(f"register: {name!r} is registered already; give each object a name of its own")
        if thing is self._optimizer:
            raise UsageError(f"register({name!r}, optimizer): the job's own optimizer belongs to every commit already")
        is_waiting = name in self._waiting
        if thing is None:
            if not is_waiting:
                raise UsageError(f"register({name!r}, None) gives up a state that the run does not have")
            del self._waiting[name]
            return
        kept = registered(name, thing)
        if is_waiting and not is_new:
            state = self._give(name, kept)
        elif self._run.is_resumed and step > 0 and not is_new:
            raise UsageError(
                f"the run in {self._run.directory}, at step {step}, has no state of {name!r} (it has "
                f"{sorted(self._waiting) or 'none'}): register it under the name that it had, or say "
                "register(..., is_new=True) if it joins the run now"
            )
        else:
            state = taken(kept)
        encode_state({name: state})  # an unsupported state is refused now, not at the first commit
        self._waiting.pop(name, None)
        self._registered[name] = kept
        if kept.is_position:
            self._positions[name] = state
        if is_waiting and not is_new:
            # Building it, giving it its state and asking for it may draw: a loader makes its
            # iterator then, which the run has behind it.
            run_state.give_random(part(self._run.state, "random", dict))

    def _give(self, name: str, kept: Registered) -> Any:
        """Gives an object the state that the run has. Returns the state that it has then."""
        try:
            kept.give(self._waiting[name])
            state = taken(kept)  # a loader looks at what it was given when it is asked for it
        except Exception as error:  # whatever somebody's object makes of what somebody's file says
            raise StoreError(
                f"the state of {name!r} in {self._run.directory} does not fit the object that is registered "
                f"({type(error).__name__}: {str(error)[:400]}): build it as it was"
            ) from error
        # Schedulers set rates while they are built; the run's own come back.
        settings = run_state.settings_of(part(self._run.state, "optimizer", dict))
        run_state.give_settings(settings, self._optimizer)
        return state

    def check_complete(self) -> None:
        """Refuses to go on while states of the run have no object. Raises `UsageError`."""
        if self._waiting:
            missing = ", ".join(map(repr, sorted(self._waiting)[:5]))
            raise UsageError(
                f"the run in {self._run.directory} also has the state of {missing}: register each with "
                "job.register(name, object) before the first step, or give it up with job.register(name, None)"
            )

    def note_positions(self) -> None:
        """Notes positions, as a method of the job returns. See [Note: when a step is committed]."""
        # if asking a loader fails, the step has no positions and is not committed with old ones
        self._random = None
        random = run_state.take_random()
        self._positions = {name: taken(kept) for name, kept in self._registered.items() if kept.is_position}
        self._random = random

    @property
    def has_positions(self) -> bool:
        """True if the last `note_positions` succeeded."""
        return self._random is not None

    def state(self) -> dict[str, Any]:
        """Takes the states that belong to a commit: of registered objects, and random numbers."""
        now = {name: taken(kept) for name, kept in self._registered.items() if not kept.is_position}
        # States that wait for their objects must outlive a commit that comes before these are
        # registered.
        return {"registered": {**self._waiting, **now, **self._positions}, "random": self._random}
