"""Training loops that the user wrote, under `job.lines()`: the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import memfit
from equivalence.line_loops import (
    BLOCKS,
    PLANS,
    Loop,
    Run,
    Words,
    accumulating,
    away,
    batch,
    check_equal,
    loss_of,
    plain,
    under,
)
from memfit.core.errors import AwayError, UsageError
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


@pytest.mark.thinned
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


def _scaled(*, clips: bool) -> Loop:
    """As torch documents fp16: autocast and a scaler, whose first scales overflow."""

    def loop(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-8)
        for index in range(5):
            for part in range(2):
                with torch.autocast("cpu", torch.float16):
                    loss = loss_of(run.model, batch(2 * index + part)) / 2
                scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(run.optimizer)
                run.log.append(str(float(clip_grad_norm_(run.model.parameters(), 0.5))))  # NaN is not NaN
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            run.log.append(scaler.get_scale())
        assert scaler.get_scale() < 2.0**30  # at least one step was skipped

    return loop


OTHER_LOOPS: dict[str, Loop] = {
    "fp16 with a scaler": _scaled(clips=False),
    "fp16 with a scaler, clipped": _scaled(clips=True),
    "closure": _closure,
    "zero_grad between forward and backward": _zero_in_the_middle,
    "zeros instead of None": _zeros_kept,
    "a forward that is never run back": _forward_dropped,
    "an error that is caught": _error_caught,
    "parts clipped apart": _by_parts,
}


@pytest.mark.thinned
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


@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_that_takes_the_scale_itself_gets_it(*, clips: bool) -> None:
    """`fused=True`: the scaler calls its step always, and leaves it the scale and whether something overflowed."""

    def run_of() -> Run:
        run = Run.new()
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, fused=True)
        return run

    ours, theirs = run_of(), run_of()
    torch.manual_seed(5)
    _scaled(clips=clips)(theirs)
    with memfit.fit(ours.model, ours.optimizer, loss_of, batch(0), plan=PLANS["gradients on disk"], lines=True) as job:
        torch.manual_seed(5)
        with job.lines():
            _scaled(clips=clips)(ours)
    check_equal(ours, theirs)


def test_scaled_gradients_whose_squares_overflow_train_and_are_not_clipped_wrongly() -> None:
    def loop(run: Run, *, clips: bool = False) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**90)
        for index in range(2):
            scaler.scale(loss_of(run.model, batch(index))).backward()
            if clips:
                scaler.unscale_(run.optimizer)
                clip_grad_norm_(run.model.parameters(), 0.5)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()

    check_equal(under(loop, PLANS["gradients on disk"])[0], plain(loop))
    with pytest.raises(AwayError, match="smaller scale"):
        under(partial(loop, clips=True), PLANS["gradients on disk"])


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
        names = [name for name in job.block_names if name not in spanning]
    theirs = plain(loop, build)
    for gradients in (Tier.DISK, Tier.DEVICE):
        homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=gradients)
        plan = Plan(blocks=dict.fromkeys(names, homes), update=UpdateTime.AFTER_BACKWARD)
        ours, departures = under(loop, plan, build, lambda m, b: m(**b).loss, inputs(0))
        check_equal(ours, theirs)
        assert departures == (), gradients


@pytest.mark.parametrize("name", ["plain", "bf16", "scaled", "scaled and without states"])
@pytest.mark.parametrize("plan", ["gradients on the device", "gradients on disk"])
def test_accelerates_loop_runs_unchanged(plan: str, name: str) -> None:
    """Scaled: with the `GradScaler` of mixed_precision="fp16", for which Accelerate keeps the optimizer's step from before `fit`."""
    accelerate = pytest.importorskip("accelerate")

    def run_of() -> Run:
        run = Run.new()
        if "without states" in name:
            run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-2)
            run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
        for kind in ("pre", "post"):
            getattr(run.optimizer, f"register_step_{kind}_hook")(lambda *_, kind=kind: run.log.append(kind))
        return run

    def train(model: Any, optimizer: Any, scheduler: Any, accelerator: Any, log: list[Any]) -> None:
        for index in range(6):
            with accelerator.accumulate(model):
                # Dynamic padding: no two batches of a window are as long.
                loss = loss_of(model, batch(index, length=5 - index % 3))
                # One step whose gradients overflow, and which the scaler passes over.
                accelerator.backward(loss * float("inf") if "scaled" in name and index == 3 else loss)
                if accelerator.sync_gradients:
                    log.append(repr(accelerator.clip_grad_norm_(model.parameters(), 0.5).item()))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log.append((loss.item(), optimizer.step_was_skipped))

    def prepared(run: Run) -> Any:
        # The state of the process is Accelerate's own, and another test may have left one.
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        precision = "bf16" if name == "bf16" else "no"
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        if "scaled" in name:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        return accelerator, accelerator.prepare(run.model, run.optimizer, run.scheduler)

    theirs = run_of()
    accelerator, (model, optimizer, scheduler) = prepared(theirs)
    torch.manual_seed(5)
    train(model, optimizer, scheduler, accelerator, theirs.log)

    ours = run_of()
    accelerator, (model, optimizer, scheduler) = prepared(ours)
    with memfit.fit(model, ours.optimizer, loss_of, batch(0), plan=PLANS[plan], lines=True) as job:
        torch.manual_seed(5)
        with job.lines():
            train(model, optimizer, scheduler, accelerator, ours.log)
    check_equal(ours, theirs)


def _networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)

    def network(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(inner, 16), nn.LeakyReLU(), nn.Linear(16, 16), nn.LeakyReLU(), nn.Linear(16, outer)
        )

    return network(4, 8), network(8, 1)


def _judge(network: Any, values: Tensor, target: float) -> Tensor:
    found = network(values)
    return nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, target))


def _play(networks: Any, optimizers: Any, log: list[float]) -> None:
    """Torch's DCGAN tutorial: the discriminator's gradients of the generator's loss are zeroed before its next turn."""
    (generator, discriminator), (its, others) = networks, optimizers
    drawn = torch.Generator().manual_seed(1)
    for _ in range(4):
        real, noise = torch.randn(3, 8, generator=drawn), torch.randn(3, 4, generator=drawn)
        others.zero_grad()
        _judge(discriminator, real, 1.0).backward()
        fake = generator(noise)
        _judge(discriminator, fake.detach(), 0.0).backward()
        log.append(float(clip_grad_norm_(discriminator.parameters(), 0.5)))
        others.step()
        its.zero_grad()
        loss = _judge(discriminator, fake, 1.0)
        loss.backward()
        log.append(loss.item())
        its.step()


@pytest.mark.parametrize("gradients", [Tier.DEVICE, Tier.DISK])
def test_two_networks_with_an_optimizer_each_play_against_each_other(gradients: Tier) -> None:
    def optimizers(networks: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(network.parameters(), lr=1e-3) for network in networks]

    theirs, plain_log = _networks(), []
    _play(theirs, optimizers(theirs), plain_log)
    ours, log = _networks(), []
    made = optimizers(ours)
    homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=gradients)
    plan = Plan(blocks=dict.fromkeys(("0", "2", "4"), homes), update=UpdateTime.AFTER_BACKWARD)
    with pytest.raises(UsageError, match="each network with its own optimizer"):
        memfit.fit(ours[0], made, _judge, torch.ones(3, 4), lines=True)  # type: ignore[arg-type]
    with (
        memfit.fit(ours[0], made[0], lambda g, z: g(z).sum(), torch.ones(3, 4), plan=plan, lines=True) as first,
        memfit.fit(ours[1], made[1], lambda d, x: _judge(d, x, 1.0), torch.ones(3, 8), plan=plan, lines=True) as second,
        first.lines(),
        second.lines(),
    ):
        _play(ours, made, log)
    assert log == plain_log
    for one, other in zip(nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True):
        assert torch.equal(one, other)


def _distilled(both: Any, words: Tensor) -> Tensor:
    student = both(words)
    with torch.no_grad():
        teacher = both.teacher(words)
    return nn.functional.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


@pytest.mark.parametrize("by_lines", [True, False])
def test_a_frozen_teacher_rests_beside_what_it_teaches(tmp_path: Any, *, by_lines: bool) -> None:
    def both() -> Any:
        torch.manual_seed(1)
        return memfit.WithFrozen(Words(), teacher=Words().requires_grad_(requires_grad=False).eval())

    def loop(model: Any, optimizer: torch.optim.Optimizer, log: list[float]) -> None:
        torch.manual_seed(5)
        for index in range(4):
            loss = _distilled(model.train(), batch(index))
            loss.backward()
            log.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    theirs, plain_log = both(), []
    loop(theirs, torch.optim.AdamW(theirs.trained.parameters(), lr=1e-2), plain_log)
    ours, log = both(), []
    optimizer = torch.optim.AdamW(ours.trained.parameters(), lr=1e-2)
    homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
    plan = Plan(
        blocks={f"{part}{name}": homes for part in ("", "teacher.") for name in BLOCKS},
        update=UpdateTime.AFTER_BACKWARD,
    )
    with memfit.fit(ours, optimizer, _distilled, batch(0), plan=plan, lines=by_lines) as job:
        assert "teacher.layers.1" in job.block_names
        if by_lines:
            with job.lines() as lines:
                loop(ours, optimizer, log)
            assert lines.departures == ()
        else:
            torch.manual_seed(5)
            log += [job.step(batch(index)).loss for index in range(4)]
        job.save(tmp_path)
    assert log == plain_log
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not ours.teacher.training
    saved = Words()
    memfit.fit(saved, torch.optim.AdamW(saved.parameters()), loss_of, batch(0), weights=tmp_path).close()
    assert all(map(torch.equal, saved.parameters(), theirs.trained.parameters()))


@pytest.mark.parametrize("from_files", [False, True])
def test_an_empty_student_and_an_empty_teacher_get_their_values(tmp_path: Any, *, from_files: bool) -> None:
    """Of their own initialisation; with `weights=`, which is of the student, the teacher does."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 160))  # large enough to have no bytes

    def distilled(both: Any, values: Tensor) -> Tensor:
        with torch.no_grad():
            taught = both.teacher(values)
        return (both(values) - taught).square().mean()

    def built(make: Callable[[Callable[[], nn.Module]], nn.Module]) -> Any:
        torch.manual_seed(1)
        student, teacher = make(build), make(build)
        return memfit.WithFrozen(student, teacher=teacher.requires_grad_(requires_grad=False))

    values, theirs, ours = torch.ones(2, 160), built(lambda b: b()), built(memfit.empty)
    if from_files:
        nn.init.eye_(theirs.trained[0].weight)
        safetensors.torch.save_file(theirs.trained.state_dict(), tmp_path / "model.safetensors")
    loss = distilled(theirs, values)
    optimizer = torch.optim.AdamW(ours.trained.parameters())
    with memfit.fit(ours, optimizer, distilled, values, weights=tmp_path if from_files else None) as job:
        assert job.step(values).loss == loss.item()


def test_a_frozen_model_that_would_train_is_refused() -> None:
    with pytest.raises(UsageError, match="teacher.embedding.weight would train"):
        memfit.WithFrozen(Words(), teacher=Words())
    with pytest.raises(UsageError, match="has a 'head' itself"):
        memfit.WithFrozen(Words(), head=nn.Identity())
