"""Errors, Ctrl-C and misuse in training loops under `job.lines()`: weights of before, nothing of torch changed, words that help."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import memfit
from equivalence.line_loops import BLOCKS, PLANS, Run, batch, check_equal, loss_of
from memfit.core.errors import AwayError, LimitBreachError, MemfitWarning, PlanError, UnsupportedError, UsageError
from memfit.core.plan import Plan
from memfit.core.storage_formats import ComputeDtype

HOMES = ["resident", "gradients on the device", "gradients on disk"]


@pytest.fixture(autouse=True)
def python_hears_ctrl_c() -> Iterator[None]:
    """As in a foreground process: a shell has what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fitted(run: Run, plan: str = "gradients on disk", **options: Any) -> memfit.Job:
    return memfit.fit(run.model, run.optimizer, loss_of, batch(0), plan=PLANS[plan], lines=True, **options)


def step(run: Run, index: int, fail: Callable[[str], None] = lambda _: None) -> None:
    """One step of two backwards, which fails where it is told to."""
    handles: list[Any] = [
        run.model.get_submodule(BLOCKS[1]).register_forward_pre_hook(lambda *_: fail("forward")),
        run.optimizer.register_step_pre_hook(lambda *_: fail("step")),
    ]
    try:
        for part in range(2):
            output = run.model(batch(2 * index + part))
            if part:
                fail("loss")
                output.register_hook(lambda _: fail("backward begins"))
            loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), batch(2 * index + part).flatten())
            if part:
                handles.append(
                    run.model.get_submodule(BLOCKS[0]).down.bias.register_hook(lambda _: fail("backward ends"))  # type: ignore[union-attr, operator]
                )
            (loss / 2).backward()
        fail("clip")
        run.log.append(float(clip_grad_norm_(run.model.parameters(), 0.5)))
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    finally:
        for handle in handles:
            handle.remove()


PLACES = ["forward", "loss", "backward begins", "backward ends", "clip", "step"]


class _Odd(Exception):
    """Of the user's."""


def _raise() -> None:
    raise _Odd


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("how", "kind"), [(_raise, _Odd), (_interrupt, KeyboardInterrupt)], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("plan", HOMES)
def test_an_error_leaves_the_weights_of_before_and_no_patch(
    plan: str, how: Callable[[], None], kind: type[BaseException], place: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Two steps, the third fails, then the loop goes on in another context, and at last without a job."""
    own = torch.Tensor.backward, torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    theirs, ours = Run.new(), Run.new()

    def fail(here: str) -> None:
        if here == place:
            how()

    job = fitted(ours, plan)
    hooks = len(ours.model._forward_pre_hooks), len(ours.model._forward_hooks)
    for run, context in ((theirs, None), (ours, job)):
        torch.manual_seed(5)
        for index in range(2):
            with memfit_lines(context):
                step(run, index)
        with pytest.raises(kind), memfit_lines(context):
            step(run, 2, fail)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if context is not None:
            assert (torch.Tensor.backward, torch.autograd.backward, torch.nn.utils.clip_grad_norm_) == own
            assert (len(run.model._forward_pre_hooks), len(run.model._forward_hooks)) == hooks
            with pytest.raises(UsageError, match="job.lines"):
                run.optimizer.step()
        run.optimizer.zero_grad()
        torch.manual_seed(6)
        with memfit_lines(context):
            step(run, 3)
    job.close()
    check_equal(ours, theirs)
    for run in (theirs, ours):
        torch.manual_seed(7)
        step(run, 4)
    check_equal(ours, theirs)


def memfit_lines(job: memfit.Job | None) -> Any:
    return contextlib.nullcontext() if job is None else job.lines()


@pytest.mark.parametrize("place", PLACES[:4])
@pytest.mark.parametrize("plan", ["resident", "gradients on disk"])
def test_an_error_that_is_caught_and_zeroed_is_forgotten(
    plan: str, place: str, recwarn: pytest.WarningsRecorder
) -> None:
    theirs, ours = Run.new(), Run.new()

    def fail(here: str) -> None:
        if here == place:
            raise _Odd

    job = fitted(ours, plan)
    for run, context in ((theirs, None), (ours, job)):
        torch.manual_seed(5)
        with memfit_lines(context):
            step(run, 0)
            try:
                step(run, 1, fail)
            except _Odd:
                run.optimizer.zero_grad()
            torch.manual_seed(6)
            step(run, 2)
    job.close()
    check_equal(ours, theirs)


# --- what is refused --------------------------------------------------------------------------------


def _values(run: Run) -> Tensor | None:
    return run.model.get_submodule(BLOCKS[0]).up.weight.grad  # type: ignore[union-attr, return-value]


def _step_twice(run: Run) -> None:
    loss_of(run.model, batch(0)).backward()
    run.optimizer.step()
    run.optimizer.step()


def _not_zeroed(run: Run) -> None:
    for index in range(2):
        loss_of(run.model, batch(index)).backward()
        run.optimizer.step()


def _twice_on_one_graph(run: Run) -> None:
    loss = loss_of(run.model, batch(0))
    loss.backward(retain_graph=True)
    loss.backward()


def _two_forwards(run: Run) -> None:
    losses = [loss_of(run.model, batch(index)) for index in range(2)]
    losses[0].backward()


def _double_backward(run: Run) -> None:
    loss = loss_of(run.model, batch(0))
    (gradient,) = torch.autograd.grad(loss, [run.model.get_submodule(BLOCKS[0]).up.bias], create_graph=True)  # type: ignore[union-attr, list-item]
    (loss + gradient.square().sum()).backward()


def _other_norm(run: Run) -> None:
    loss_of(run.model, batch(0)).backward()
    clip_grad_norm_(run.model.parameters(), 0.5, norm_type=float("inf"))


def _read(run: Run) -> None:
    loss_of(run.model, batch(0)).backward()
    gradient = _values(run)
    assert gradient is not None
    print(gradient.abs().mean())


def _read_after_step(run: Run) -> None:
    loss_of(run.model, batch(0)).backward()
    run.optimizer.step()
    gradient = _values(run)
    assert gradient is not None
    print(gradient.norm())


def _clip_twice(run: Run) -> None:
    loss_of(run.model, batch(0)).backward()
    for _ in range(2):
        clip_grad_norm_(run.model.parameters(), 1e-3)


def _clip_between(run: Run) -> None:
    loss_of(run.model, batch(0)).backward()
    clip_grad_norm_(run.model.parameters(), 0.5)
    loss_of(run.model, batch(1)).backward()


def _part(run: Run) -> None:
    run.model.get_submodule(BLOCKS[0])(torch.randn(2, 5, 16)).sum().backward()


def _failed_then_step(run: Run) -> None:
    output = run.model(batch(0))
    handle = run.model.get_submodule(BLOCKS[0]).down.bias.register_hook(lambda _: _raise())  # type: ignore[union-attr, operator]
    try:
        output.sum().backward()
    except _Odd:
        handle.remove()
    run.optimizer.step()


REFUSED: dict[str, tuple[Callable[[Run], None], type[Exception], str]] = {
    "a second step": (_step_twice, UsageError, "without a backward since optimizer.step"),
    "no zero_grad": (_not_zeroed, UsageError, "without zero_grad"),
    "two backwards on one graph": (_twice_on_one_graph, UnsupportedError, "Run each loss back once"),
    "the first of two forwards": (_two_forwards, UnsupportedError, "another forward began"),
    "a gradient of a gradient": (_double_backward, UnsupportedError, "create_graph=True"),
    "another norm": (_other_norm, AwayError, "clip_grad_norm_ with its 2-norm"),
    "values of a gradient": (_read, AwayError, "gradient_home='device'"),
    "values after the step": (_read_after_step, AwayError, "before the step"),
    "clipping twice": (_clip_twice, AwayError, "take the norm that clip_grad_norm_ returns"),
    "clipping between backwards": (_clip_between, UsageError, "clip once, after the last backward"),
    "a part of the model": (_part, UnsupportedError, "Call the model itself"),
    "a step after a failed backward": (_failed_then_step, UsageError, "without a backward since a backward ended"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lines_cannot_do_is_told_in_words(name: str, recwarn: pytest.WarningsRecorder) -> None:
    lines, kind, words = REFUSED[name]
    run = Run.new()
    with fitted(run) as job:
        with pytest.raises(kind, match=words) as found, job.lines():
            lines(run)
        assert len(str(found.value)) < 480
        run.optimizer.zero_grad()
        with job.lines():
            step(run, 0)


def test_a_part_of_the_model_is_called_inside_of_a_forward_that_says_so(recwarn: pytest.WarningsRecorder) -> None:
    """As `training_step` of Lightning's modules does; one of them fails, and is tried again."""
    theirs, ours = Run.new(), Run.new()

    def parts(run: Run, index: int) -> None:
        words = batch(index)
        hidden: Any = run.model.get_submodule("embedding")(words)
        for name in BLOCKS:
            hidden = run.model.get_submodule(name)(hidden)
            if index == 1 and name == BLOCKS[1]:
                raise _Odd
        logits = run.model.get_submodule("head")(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
        run.log.append(loss.item())
        run.losses = [loss]  # type: ignore[attr-defined]

    def loop(run: Run, forward: Callable[[], Any]) -> None:
        torch.manual_seed(5)
        for index in range(4):
            try:
                with forward():
                    parts(run, index)
            except _Odd:
                continue
            run.losses.pop().backward()  # type: ignore[attr-defined]
            run.optimizer.step()
            run.optimizer.zero_grad()

    loop(theirs, contextlib.nullcontext)
    with fitted(ours) as job, job.lines() as lines:
        loop(ours, lines.forward)
    check_equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_grad_norm": 1.0}, "clip in your lines"),
        ({"weight": len}, "your lines scale each loss"),
        ({"split": lambda b, k: b.chunk(k)}, "your lines cut the batch"),
        ({"plan": Plan(microbatches=2)}, "microbatches=1"),
        ({"plan": Plan(loss_chunk_tokens=64)}, "loss_chunk_tokens=null"),
        ({"plan": Plan(compute_dtype=ComputeDtype.FLOAT16)}, "GradScaler"),
    ],
)
def test_what_fit_cannot_do_for_lines_is_told_in_words(options: dict[str, Any], words: str) -> None:
    run = Run.new()
    with pytest.raises((UsageError, PlanError), match=words):
        memfit.fit(run.model, run.optimizer, loss_of, batch(0), lines=True, **options)


def test_a_job_is_for_lines_or_for_steps(recwarn: pytest.WarningsRecorder) -> None:
    run = Run.new()
    with (
        memfit.fit(run.model, run.optimizer, loss_of, batch(0)) as job,
        pytest.raises(UsageError, match="lines=True"),
        job.lines(),
    ):
        pass
    with fitted(run) as job:
        with job.lines():
            for call in (lambda: job.step(batch(0)), job.close):
                with pytest.raises(UsageError, match="job.lines"):
                    call()
            with pytest.raises(UsageError, match="open already"), job.lines():
                pass
            loss = loss_of(run.model, batch(0))
            with pytest.raises(UsageError, match="middle of a step"):
                job.evaluate(batch(1))
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert job.step(batch(1)).departures == ()
        assert job.steps == 2
    with pytest.raises(UsageError, match="closed"), job.lines():
        pass


def test_gradients_that_no_step_used_are_told(recwarn: pytest.WarningsRecorder) -> None:
    run = Run.new()
    with fitted(run) as job:
        lines = job.lines()
        lines.__enter__()
        loss_of(run.model, batch(0)).backward()
        with pytest.warns(MemfitWarning, match=r"gradients of 1 backward that no optimizer.step"):
            lines.__exit__(None, None, None)
        assert all(p.grad is None for p in run.model.parameters())


def _too_much(run: Run) -> None:
    step(run, 0)
    raise torch.OutOfMemoryError("DefaultCPUAllocator: the limit would be passed")


def test_memory_that_is_refused_is_a_breach_and_the_job_goes_on(recwarn: pytest.WarningsRecorder) -> None:
    run, theirs = Run.new(), Run.new()
    with fitted(run) as job:
        torch.manual_seed(5)
        with pytest.raises(LimitBreachError, match="lines of yours"), job.lines():
            _too_much(run)
        with job.lines():
            step(run, 1)
    torch.manual_seed(5)
    for index in range(2):
        step(theirs, index)
    check_equal(run, theirs)
