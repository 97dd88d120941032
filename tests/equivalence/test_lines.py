"""Training loops that the user wrote, under `job.lines()`: the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import memfit
from equivalence.line_loops import (
    BLOCKS,
    PLANS,
    Loop,
    Run,
    accumulating,
    away,
    batch,
    check_equal,
    loss_of,
    plain,
    under,
)
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier

LOOPS: dict[str, Loop] = {
    "one backward": accumulating(1),
    "clipped": accumulating(1, clip=0.5),
    "clipped beyond reach": accumulating(1, clip=1e9),
    "four backwards, clipped": accumulating(4, clip=0.5, steps=3),
    "steps skipped by zero_grad": accumulating(2, clip=0.5, skips=3),
    "zeroed by the model": accumulating(2, zero="model"),
    "under autocast": accumulating(2, clip=0.5, autocast=True),
}


@pytest.fixture(autouse=True)
def quietly(recwarn: pytest.WarningsRecorder) -> None:
    """Warnings of evaluation in other modes are not the subject."""


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_of_ones_own_gives_the_bits_of_plain_pytorch(plan: str, name: str) -> None:
    theirs = plain(LOOPS[name])
    ours, departures = under(LOOPS[name], PLANS[plan])
    check_equal(ours, theirs)
    assert departures == ()


def _closure(run: Run) -> None:
    for index in range(3):

        def closure(index: int = index) -> Tensor:
            run.optimizer.zero_grad()
            loss = loss_of(run.model, batch(index))
            loss.backward()
            return loss

        found: Any = run.optimizer.step(closure)  # pyright: ignore[reportCallIssue, reportArgumentType], torch's stub wants a float
        run.log.append(found.item())


def _zero_in_the_middle(run: Run) -> None:
    """The order of Lightning's closure: forward, zero_grad, backward."""
    for index in range(3):
        loss = loss_of(run.model, batch(index))
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()


def _zeros_kept(run: Run) -> None:
    for index in range(3):
        loss_of(run.model, batch(index)).backward()
        run.log.append(float(clip_grad_norm_(run.model.parameters(), 0.5, foreach=index == 1)))
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


def _forward_dropped(run: Run) -> None:
    """A loss that is no number is skipped, and a forward by mistake has its graph."""
    for index in range(4):
        loss = loss_of(run.model, batch(index))
        if index == 1:
            continue
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    loss_of(run.model, batch(9))


class _Odd(Exception):
    """Raised by a batch."""


def _error_caught(run: Run) -> None:
    """A batch fails in the third layer, in the middle of an accumulation."""

    def fail(_module: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].shape[0] == 4:
            raise _Odd

    handle = run.model.get_submodule(BLOCKS[2]).register_forward_pre_hook(fail)
    for index in range(6):
        try:
            loss_of(run.model, batch(index, rows=4 if index in (1, 4) else 2)).backward()
        except _Odd:
            continue
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
    handle.remove()
    run.optimizer.step()
    run.optimizer.zero_grad()


def _by_parts(run: Run) -> None:
    """Two groups are clipped apart, one twice; one parameter's gradient is forgotten, another's is the user's own."""
    for index in range(3):
        for part in range(2):
            loss_of(run.model, batch(2 * index + part)).backward()
        layers = [list(run.model.get_submodule(name).parameters()) for name in BLOCKS]
        run.log.append(float(clip_grad_norm_(layers[0] + layers[1], 0.3)))
        run.log.append(float(clip_grad_norm_(layers[2], 0.1)))
        layers[1][0].grad = None
        layers[2][1].grad = torch.full(layers[2][1].shape, 0.25)
        run.optimizer.step()
        run.optimizer.zero_grad()


OTHER_LOOPS: dict[str, Loop] = {
    "closure": _closure,
    "zero_grad between forward and backward": _zero_in_the_middle,
    "zeros instead of None": _zeros_kept,
    "a forward that is never run back": _forward_dropped,
    "an error that is caught": _error_caught,
    "parts clipped apart": _by_parts,
}


@pytest.mark.parametrize("name", OTHER_LOOPS)
@pytest.mark.parametrize("plan", ["resident", "gradients on disk"])
def test_what_loops_do_besides_is_as_in_plain_pytorch(plan: str, name: str) -> None:
    theirs = plain(OTHER_LOOPS[name])
    ours, departures = under(OTHER_LOOPS[name], PLANS[plan])
    check_equal(ours, theirs)
    # A gradient that the lines put there themselves goes home when the update asks for it.
    assert all("'layers.2' came" in departure for departure in departures)


def test_gradients_on_the_device_are_ordinary_tensors() -> None:
    def loop(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for index in range(3):
            scaler.scale(loss_of(run.model, batch(index))).backward()
            scaler.unscale_(run.optimizer)
            clip_grad_value_(run.model.parameters(), 0.01)
            run.log += [float(p.grad.sum()) for p in run.model.parameters() if p.grad is not None]
            for p in run.model.parameters():
                assert p.grad is not None
                p.grad.add_(torch.full_like(p.grad, 1e-3))
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()

    check_equal(under(loop, PLANS["gradients on the device"])[0], plain(loop))


def test_gradients_in_several_tiers_are_clipped_together() -> None:
    disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
    plan = Plan(blocks={BLOCKS[0]: disk, BLOCKS[2]: disk}, update=UpdateTime.AFTER_BACKWARD)
    loop = accumulating(2, clip=0.5)
    check_equal(under(loop, plan)[0], plain(loop))


def test_a_loss_of_two_forwards_is_one_run() -> None:
    def pair(model: Any, both: Tensor) -> Tensor:
        return loss_of(model, both[:2]) - 0.5 * loss_of(model, both[2:])

    def loop(run: Run) -> None:
        for index in range(4):
            loss = pair(run.model, batch(index, rows=4))
            loss.backward()
            run.log.append(loss.item())
            run.optimizer.step()
            run.optimizer.zero_grad()

    ours, departures = under(loop, PLANS["gradients on disk"] and _twice(), loss=pair, sample=batch(0, rows=4))
    check_equal(ours, plain(loop))
    assert departures == ()


def _twice() -> Plan:
    """The plan without its policies for calls, of which there are twice as many."""
    found = away(Tier.DISK)
    return Plan(blocks=found.blocks, update=found.update)


def test_a_generator_that_is_closed_early_leaves_the_updates_it_made() -> None:
    def stepping(run: Run) -> Any:
        for index in range(5):
            loss_of(run.model, batch(index)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            yield index

    def loop(run: Run) -> None:
        steps = stepping(run)
        assert [next(steps) for _ in range(2)] == [0, 1]
        steps.close()

    check_equal(under(loop, PLANS["gradients on disk"])[0], plain(loop))


def test_saves_between_steps_are_those_of_the_loop(tmp_path: Any) -> None:
    loop = accumulating(2, clip=0.5)
    theirs = plain(loop)
    run = Run.new()
    with memfit.fit(run.model, run.optimizer, loss_of, batch(0), plan=PLANS["gradients on disk"], lines=True) as job:
        torch.manual_seed(5)
        with job.lines():
            loop(run)
            job.save(tmp_path)
            assert job.evaluate(batch(1)).loss > 0.0
    again = Run.new()
    with memfit.fit(
        again.model, again.optimizer, loss_of, batch(0), plan=PLANS["gradients on disk"], lines=True, resume=tmp_path
    ) as job:
        assert job.steps == 5
        rng = torch.get_rng_state()
        with job.lines():
            loss_of(again.model, batch(7)).backward()
            again.optimizer.step()
    torch.set_rng_state(rng)
    for group in theirs.optimizer.param_groups:
        group["lr"] = again.optimizer.param_groups[0]["lr"]
    loss_of(theirs.model, batch(7)).backward()
    theirs.optimizer.step()
    again.log = theirs.log
    check_equal(again, theirs)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.1
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)).train()


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    beginning: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **beginning)
    return T5ForConditionalGeneration(config).train()


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
    )  # fmt: skip
    return BertForSequenceClassification(config).train()


@pytest.mark.parametrize("build", [_llama, _gpt2, _t5, _bert])
def test_published_models_train_alike_from_disk(build: Callable[[], Any]) -> None:
    pytest.importorskip("transformers")

    def inputs(index: int, rows: int = 2) -> dict[str, Tensor]:
        words = torch.randint(3, 32, (rows, 6), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words[:, 0] % 2 if build is _bert else words}

    def loop(run: Run) -> None:
        for index in range(6):
            run.model(**inputs(index))  # by mistake
            loss = run.model(**inputs(index, 3 if index == 3 else 2)).loss / 2
            loss.backward()
            run.log.append(loss.item())
            if index % 2:
                run.log.append(float(clip_grad_norm_(run.model.parameters(), 0.5)))
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()

    probe = Run.new(build)
    with memfit.fit(probe.model, probe.optimizer, lambda m, b: m(**b).loss, inputs(0), lines=True) as job:
        spanning = {block.name for block in job.profile.blocks if block.is_spanning}
        homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
        plan = Plan(
            blocks={name: homes for name in job.block_names if name not in spanning}, update=UpdateTime.AFTER_BACKWARD
        )
    ours, departures = under(loop, plan, build, lambda m, b: m(**b).loss, inputs(0))
    check_equal(ours, plain(loop, build))
    assert departures == ()


def test_accelerates_loop_runs_unchanged() -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(model: Any, optimizer: Any, scheduler: Any, accelerator: Any, log: list[Any]) -> None:
        for index in range(6):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch(index))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    log.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log.append(loss.item())

    def prepared(run: Run) -> Any:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        return accelerator, accelerator.prepare(run.model, run.optimizer, run.scheduler)

    theirs = Run.new()
    accelerator, (model, optimizer, scheduler) = prepared(theirs)
    torch.manual_seed(5)
    train(model, optimizer, scheduler, accelerator, theirs.log)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    ours = Run.new()
    accelerator, (model, optimizer, scheduler) = prepared(ours)
    with memfit.fit(model, ours.optimizer, loss_of, batch(0), plan=PLANS["gradients on disk"], lines=True) as job:
        torch.manual_seed(5)
        with job.lines():
            train(model, optimizer, scheduler, accelerator, ours.log)
    check_equal(ours, theirs)
