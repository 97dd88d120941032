"""Cures of the refusals of `integrations`: arguments and checkpoints of transformers' `Trainer` and of Lightning's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import memfit
from integrations import test_transformers as hf
from memfit.integrations.transformers import MemfitTrainer
from memfit.job.loading import load
from unit.advice import BATCH, Scene, follows, loss, three_layers

PLAN = hf.homes(hf.LAYERS)


def quiet(case: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """Lets libraries warn as they do, of workers and of what is older."""

    @wraps(case)
    def run(s: Scene) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case(s)

    return run


def trainer(s: Scene, where: str, kind: Any = MemfitTrainer, **options: Any) -> Any:
    """Trains two steps in a directory, with a checkpoint behind each."""
    if kind is MemfitTrainer:
        options = {"plan": PLAN} | options
    return hf.train(kind, s.directory / where, **{"max_steps": 2, "save_steps": 1, "eval_strategy": "no"} | options)


@follows("integrations/transformers.py", "it was not written to its end, or with save_only_model=True")
@quiet
def another_checkpoint(s: Scene) -> None:
    theirs = trainer(s, "plain", Trainer)
    trainer(s, "run", save_only_model=False).close()
    last = s.directory / "run" / "checkpoint-2"
    (last / "trainer_state.json").unlink()
    s.refused(lambda: trainer(s, "run", resume=str(last)))
    hf.check_equal(trainer(s, "run", resume=str(s.directory / "run" / "checkpoint-1")), theirs)
    trainer(s, "anew", build=lambda: LlamaForCausalLM.from_pretrained(last)).close()


@follows("integrations/transformers.py", "Name one by its path, or leave it out to begin anew")
@quiet
def a_checkpoint_by_its_path_or_none(s: Scene) -> None:
    theirs = trainer(s, "plain", Trainer)
    s.refused(lambda: trainer(s, "run", resume=True))
    hf.check_equal(trainer(s, "run"), theirs)
    hf.check_equal(trainer(s, "other", resume=str(s.directory / "run" / "checkpoint-1")), theirs)


@follows("integrations/transformers.py", "the trainer decides that by arguments of its own")
@quiet
def a_norm_of_the_trainers(s: Scene) -> None:
    arguments = hf.arguments(s.directory / "refused")
    s.refused(lambda: MemfitTrainer(hf.llama(), arguments, memfit={"max_grad_norm": 0.25}))
    theirs, ours = (trainer(s, kind.__name__, kind, max_grad_norm=0.25) for kind in (Trainer, MemfitTrainer))
    hf.check_equal(ours, theirs)


@follows("integrations/transformers.py", "it is of another adapter")
@quiet
def an_adapter_that_is_loaded_beside_the_trainer(s: Scene) -> None:
    def adapted(rank: int = 2) -> Any:
        return peft.get_peft_model(hf.llama(), peft.LoraConfig(r=rank, target_modules=["q_proj"]))

    class Meddles(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            adapted(4).save_pretrained(state.best_model_checkpoint)

    given: dict[str, Any] = {"load_best_model_at_end": True, "max_steps": 2}
    ours = MemfitTrainer(
        adapted(), hf.arguments(s.directory, **given), train_dataset=hf.Rows(), eval_dataset=hf.Rows(4), callbacks=[Meddles()],
        memfit={"plan": hf.homes([f"base_model.model.{name}" for name in hf.LAYERS])},
    )  # fmt: skip
    s.refused(ours.train)
    ours.close()
    ours.model.load_adapter(ours.state.best_model_checkpoint, "other")
    ours.model.set_adapter("other")
    assert ours.model(**{name: value[None] for name, value in hf.Rows()[0].items()}).loss.isfinite()


@follows("integrations/transformers.py", "leave 'mode' out, or the callback")
@quiet
def a_callback_or_collected_windows(s: Scene) -> None:
    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    s.refused(lambda: trainer(s, "refused", callbacks=[Looks()], mode="collected"))
    hf.check_equal(trainer(s, "lines", callbacks=[Looks()]), trainer(s, "plain", Trainer))
    ours = trainer(s, "collected", build=hf.undropped, mode="collected", plan=None)
    hf.check_equal(ours, trainer(s, "undropped", Trainer, build=hf.undropped))


# --- Lightning, where it is installed ------------------------------------------------------------


def lightning() -> Any:
    pytest.importorskip("lightning", reason="memfit[lightning] is not installed: make test-hosts installs it")
    from integrations import test_lightning

    return test_lightning


@follows("integrations/lightning.py", "the trainer decides that (gradient_clip_val, callbacks, ckpt_path)")
@quiet
def a_norm_of_lightnings(s: Scene) -> None:
    hosts = lightning()
    from memfit.integrations.lightning import MemfitStrategy

    s.refused(lambda: MemfitStrategy(max_grad_norm=0.25))
    ours, theirs = (hosts.train(s.directory / str(own), ours=own, gradient_clip_val=0.25) for own in (True, False))
    hosts.check_equal(ours, theirs)


@follows("integrations/lightning.py", "without self.manual_backward(loss)")
@quiet
def a_sample_that_is_run_back(s: Scene) -> None:
    hosts = lightning()
    from memfit.integrations.lightning import MemfitStrategy

    class Manual(hosts.L.LightningModule):  # type: ignore[name-defined, misc]
        """Trains on batches of more than a row."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = three_layers(), False

        def training_step(self, batch: Any, index: int) -> None:
            if len(batch) > 1:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss(self.model, batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def trained(sizes: list[int], strategy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        module, rows = Manual(), [list(range(size)) for size in sizes]
        batches = torch.utils.data.DataLoader(BATCH, batch_sampler=rows)  # type: ignore[arg-type]
        host = hosts.L.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, strategy=strategy,
        )  # fmt: skip
        host.fit(module, batches)
        return [p.detach() for p in module.parameters()]

    s.refused(lambda: trained([1, 4], MemfitStrategy()))
    expected = trained([1, 4], "auto")
    for found in (trained([1, 4], MemfitStrategy(sample=BATCH)), trained([4, 1], MemfitStrategy())):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@follows("integrations/lightning.py", "write the loop yourself, with a job for each network and its optimizer")
@quiet
def a_job_for_each_optimizer(s: Scene) -> None:
    hosts = lightning()
    module = hosts.module_of(optimizers=2)
    module.automatic_optimization = False
    s.refused(lambda: hosts.train(s.directory, ours=True, module=module, **hosts.MANUAL))

    def networks() -> list[nn.Module]:
        torch.manual_seed(0)
        return [three_layers(), three_layers()]

    def step(both: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        loss(both[1], both[0](BATCH)).backward()
        for optimizer in optimizers:
            optimizer.step()

    def optimizers_of(both: list[nn.Module]) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in both]

    ours, theirs = networks(), networks()
    step(theirs, optimizers_of(theirs))
    optimizers = optimizers_of(ours)
    jobs = [memfit.fit(one, own, loss, BATCH, lines=True) for one, own in zip(ours, optimizers, strict=True)]
    with jobs[0].lines(), jobs[1].lines():
        step(ours, optimizers)
    for job in jobs:
        job.close()
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@follows("integrations/lightning.py", "is not served: use one of")
@quiet
def a_precision_that_is_served(s: Scene) -> None:
    hosts = lightning()
    s.refused(lambda: hosts.train(s.directory / "refused", ours=True, precision="16-true"))
    for precision in ("32-true", "64-true", "bf16-true", "bf16-mixed"):
        where = s.directory / precision
        ours, theirs = (hosts.train(where / str(own), ours=own, precision=precision, steps=2) for own in (True, False))
        hosts.check_equal(ours, theirs)


@follows("integrations/lightning.py", "reads its weights; fit without ckpt_path then")
@quiet
def weights_of_a_directory(s: Scene) -> None:
    hosts = lightning()
    module = hosts.module_of()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with memfit.fit(module, optimizer, lambda m, b: loss(m.model, b), torch.ones(4, hosts.WIDTH)) as job:
        job.step(torch.ones(4, hosts.WIDTH))
        job.save(s.directory / "old")
    s.refused(lambda: hosts.train(s.directory / "run", ours=True, resume=s.directory / "old"))
    ours, theirs = hosts.module_of(), hosts.module_of()
    load(s.directory / "old", ours)
    theirs.load_state_dict(module.state_dict())
    found = [hosts.train(s.directory / str(own), ours=own, module=one) for own, one in ((True, ours), (False, theirs))]
    hosts.check_equal(*found)
