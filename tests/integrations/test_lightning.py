"""Lightning's `Trainer` with `MemfitStrategy` beside itself: losses, hooks and weights, bit for bit. `make test-hosts` installs it."""

from __future__ import annotations

import errno
import inspect
import os
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.core.errors import AwayError, StoreError, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from unit import advice_of_hosts  # registers its cases
from unit.advice import CASES, Scene

L: Any = pytest.importorskip("lightning", reason="memfit[lightning] is not installed: make test-hosts installs it")

# Of the number of workers, of checkpoints that are there, of older interfaces of libraries.
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, ROWS = 16, 4
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
PLAN = Plan(blocks={f"model.{index}": DISK for index in range(3)}, update=UpdateTime.AFTER_BACKWARD)
ON_DEVICE = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
GRADIENTS_ON_DEVICE = Plan(blocks={f"model.{i}": ON_DEVICE for i in range(3)}, update=UpdateTime.AFTER_BACKWARD)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.dropout(self.down(torch.tanh(self.up(values))))


def module_of(*, automatic: bool = True, optimizers: int = 1) -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(Layer() for _ in range(3)))
            self.automatic_optimization = automatic
            self.seen: list[Any] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = (self.model(batch[0]) - batch[1]).square().mean()
            self.log("train_loss", loss)
            return {"loss": loss, "rows": len(batch[0])}

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", (self.model(batch[0]) - batch[1]).square().mean())

        def on_after_backward(self) -> None:
            self.seen.append("after backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(("before step", optimizer.param_groups[0]["lr"]))

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.seen.append((float(outputs["loss"]), self.trainer.global_step))

        def configure_optimizers(self) -> Any:
            made = [torch.optim.AdamW(self.parameters(), lr=1e-2) for _ in range(optimizers)]
            scheduler = torch.optim.lr_scheduler.LambdaLR(made[0], lambda step: min(1.0, (step + 1) / 4))
            return (
                made
                if optimizers > 1
                else {"optimizer": made[0], "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            )

    torch.manual_seed(0)
    return Module()


def loader(count: int, **options: Any) -> Any:
    drawn = torch.Generator().manual_seed(1)
    rows = [(torch.randn(WIDTH, generator=drawn), torch.randn(WIDTH, generator=drawn)) for _ in range(count)]
    return torch.utils.data.DataLoader(rows, batch_size=ROWS, **options)  # type: ignore[arg-type]


def fp16(scale: float = 2.0**16) -> dict[str, Any]:
    """The arguments of "16-mixed" on a processor, where Lightning takes "bf16-mixed" for the word itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-8)
    return {"plugins": [L.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


def train(
    directory: Path,
    *,
    ours: bool,
    module: Any = None,
    resume: Path | None = None,
    steps: int = 6,
    plan: Plan = PLAN,
    limit: str | None = None,
    emulate_device: bool = False,
    **given: Any,
) -> Any:
    if ours:
        from memfit.integrations.lightning import MemfitStrategy

        given["strategy"] = MemfitStrategy(plan=plan, limit=limit, emulate_device=emulate_device)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5} | given
    module = module_of() if module is None else module
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=2, save_top_k=-1, filename="{step}"
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, callbacks=[checkpoint], enable_progress_bar=False,
        enable_model_summary=False, val_check_interval=4, check_val_every_n_epoch=None, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    torch.manual_seed(5)
    data = loader(22, shuffle=True, generator=torch.Generator().manual_seed(3))
    # Since 2.6 torch's safe reading is the default, which refuses what callbacks keep.
    reading = {"weights_only": False} if resume and "weights_only" in inspect.signature(trainer.fit).parameters else {}
    trainer.fit(module, data, loader(8), ckpt_path=resume, **reading)
    return module, trainer


def check_equal(ours: Any, theirs: Any) -> None:
    (module, trainer), (plain, plain_trainer) = ours, theirs
    assert module.seen == plain.seen
    assert trainer.global_step == plain_trainer.global_step
    assert trainer.precision_plugin.state_dict() == plain_trainer.precision_plugin.state_dict()  # of a scaler
    assert float(trainer.callback_metrics["val_loss"]) == float(plain_trainer.callback_metrics["val_loss"])
    for (name, found), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    "given",
    [
        {}, {"accumulate_grad_batches": 1, "gradient_clip_val": None}, {"accumulate_grad_batches": 4}, {"precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=["two backwards, clipped", "one, not clipped", "four", "bf16-mixed", "64-true"],
)  # fmt: skip
def test_a_trainer_is_bitwise_itself_with_every_hook_in_its_place(given: dict[str, Any], tmp_path: Path) -> None:
    theirs = train(tmp_path / "plain", ours=False, **given)
    check_equal(train(tmp_path / "ours", ours=True, **given), theirs)
    check_equal(train(tmp_path / "device", ours=True, plan=GRADIENTS_ON_DEVICE, **given), theirs)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**30], ids=["no step is skipped", "the first steps are skipped"])
@pytest.mark.parametrize(
    "given", [{}, {"accumulate_grad_batches": 1, "gradient_clip_val": None}], ids=["two backwards, clipped", "one, not clipped"]
)  # fmt: skip
def test_scaled_losses_are_bitwise_those_of_lightning(given: dict[str, Any], scale: float, tmp_path: Path) -> None:
    theirs = train(tmp_path / "plain", ours=False, **fp16(scale), **given)
    assert (theirs[1].precision_plugin.scaler.get_scale() < scale) is (scale > 2.0**16)
    for plan in (PLAN, GRADIENTS_ON_DEVICE):
        check_equal(train(tmp_path / "ours", ours=True, plan=plan, emulate_device=True, **fp16(scale), **given), theirs)


@pytest.mark.parametrize("is_scaled", [False, True], ids=["fp32", "16-mixed"])
def test_a_checkpoint_is_gone_on_from(tmp_path: Path, *, is_scaled: bool) -> None:
    """Scaled: with a first step that was skipped before the checkpoint, whose scale is read."""

    def given(scale: float = 1.0) -> dict[str, Any]:
        return fp16(scale) if is_scaled else {}

    train(tmp_path / "first", ours=False, steps=4, **given(2.0**30))
    train(tmp_path / "ours", ours=True, steps=4, **given(2.0**30))
    theirs = train(tmp_path / "then", ours=False, resume=tmp_path / "first" / "step=2.ckpt", **given())
    # Each goes on from the other's.
    for name, ours, first in (("again", True, "ours"), ("other", True, "first"), ("back", False, "ours")):
        resume = tmp_path / first / "step=2.ckpt"
        check_equal(train(tmp_path / name, ours=ours, resume=resume, **given()), theirs)
    (tmp_path / "before.ckpt").mkdir()
    with pytest.raises(UsageError, match=r"is a directory.*memfit\.api\.load"):
        train(tmp_path / "refused", ours=True, resume=tmp_path / "before.ckpt")


def test_a_checkpoint_is_that_of_plain_lightning(tmp_path: Path) -> None:
    """Weights, states and what callbacks keep, in an archive whose sums are right; a module is loaded from it."""
    train(tmp_path / "plain", ours=False, steps=4)
    module, _ = train(tmp_path / "ours", ours=True, steps=4)
    files = [tmp_path / name / "step=4.ckpt" for name in ("ours", "plain")]
    with zipfile.ZipFile(files[0]) as archive:
        assert archive.testzip() is None
    found, expected = (torch.load(file, weights_only=False) for file in files)
    assert found.keys() == expected.keys()
    for name, value in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value), name
    states, plain_states = (each["optimizer_states"][0] for each in (found, expected))
    assert states["param_groups"] == plain_states["param_groups"]
    for index, state in plain_states["state"].items():
        assert all(torch.equal(states["state"][index][key], value) for key, value in state.items())
    loaded = type(module).load_from_checkpoint(files[0])
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected["state_dict"][name]), name


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer = train(tmp_path / "ours", ours=True, limit="8GiB")
    file = tmp_path / "last.ckpt"
    trainer.save_checkpoint(file)
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="last"):
        trainer.save_checkpoint(file)
    assert file.read_bytes() == before and [path.name for path in tmp_path.glob("last*")] == ["last.ckpt"]
    trainer.strategy.close()


def test_averages_of_lightning_are_in_the_best_checkpoint(tmp_path: Path) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "WeightAveraging"):
        pytest.skip("Lightning before 2.6")

    def run(*, ours: bool) -> list[Any]:
        from memfit.integrations.lightning import MemfitStrategy

        module, directory = module_of(), tmp_path / str(ours)
        best = callbacks.ModelCheckpoint(dirpath=directory, monitor="val_loss")
        how: dict[str, Any] = {"strategy": MemfitStrategy(limit="8GiB")} if ours else {}
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, callbacks=[best, callbacks.WeightAveraging()],
            enable_progress_bar=False, enable_model_summary=False, **how,
        )  # fmt: skip
        torch.manual_seed(5)
        trainer.fit(module, loader(16), loader(8))
        found = [float(trainer.callback_metrics["val_loss"]), validated(trainer, module, Path(best.best_model_path))]
        loaded = type(module).load_from_checkpoint(best.best_model_path)
        found += [float(p.detach().double().sum()) for p in loaded.parameters()]
        if ours:
            trainer.strategy.close()
        return found

    assert run(ours=True) == run(ours=False)


MANUAL: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}


@pytest.mark.parametrize(
    ("plan", "scale"), [(PLAN, None), (None, None), (PLAN, 2.0**30)], ids=["on disk", "offloaded", "fp16"]
)
def test_a_module_that_optimizes_manually_is_bitwise_itself(
    plan: Plan | None, scale: float | None, tmp_path: Path
) -> None:
    """Two backwards and a clipped step, then a step of its own, in every `training_step`."""

    def manual() -> Any:
        module = module_of(automatic=False)

        def training_step(batch: Any, batch_idx: int) -> Any:
            optimizer: Any = module.optimizers()
            optimizer.zero_grad()
            for part in (slice(0, 2), slice(2, None)):
                loss = (module.model(batch[0][part]) - batch[1][part]).square().sum() / len(batch[0])
                module.manual_backward(loss)
            module.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            again = module.model(batch[0]).square().mean()
            module.manual_backward(again)
            optimizer.step()
            module.log("train_loss", loss)
            return {"loss": again.detach()}

        module.training_step = training_step
        return module

    plugin = fp16()["plugins"][0]
    if scale and plugin.autocast_context_manager()._cache_enabled:
        pytest.skip(
            "Lightning 2.5.0: a second forward in one step computes with casts of weights from before the update"
        )
    offloaded = Plan(calls=(CallPlan(saved=Saved.OFFLOAD),) * 3, update=UpdateTime.AFTER_BACKWARD)
    given = [MANUAL | (fp16(scale) if scale else {}) for _ in range(2)]
    theirs = train(tmp_path / "plain", ours=False, module=manual(), steps=12, **given[0])
    ours = train(tmp_path / "ours", ours=True, module=manual(), steps=12, plan=plan or offloaded, **given[1])
    check_equal(ours, theirs)
    assert len(theirs[0].seen) > 6


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    from memfit.integrations.lightning import MemfitStrategy

    with pytest.raises(UsageError, match="max_grad_norm"):
        MemfitStrategy(max_grad_norm=1.0)
    module = module_of(optimizers=2)
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="a job for each network"):
        train(tmp_path, ours=True, module=module, **MANUAL)
    with pytest.raises(UsageError, match="without self.manual_backward"):
        train(tmp_path, ours=True, module=module_of(automatic=False), **MANUAL)
    with pytest.raises(UnsupportedError, match=r"precision='16-true'.*'bf16-mixed', '16-mixed'"):
        train(tmp_path, ours=True, precision="16-true")
    engine = L.pytorch.plugins.Precision()  # what Lightning makes of the word needs a library and a GPU
    engine.precision = "transformer-engine"
    with pytest.raises(UnsupportedError, match="precision='transformer-engine'"):
        train(tmp_path, ours=True, plugins=[engine])
    with pytest.raises(AwayError, match="gradient_home='device'"):
        train(tmp_path, ours=True, gradient_clip_algorithm="value")


def test_an_error_in_the_module_gives_the_model_back(tmp_path: Path) -> None:
    module = module_of()
    plain_step = module.training_step
    calls: list[int] = []

    def training_step(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if len(calls) > 5:
            raise ArithmeticError("of the user's")
        return plain_step(batch, batch_idx)

    module.training_step = training_step
    with pytest.raises(ArithmeticError):
        train(tmp_path, ours=True, module=module)
    assert all(p.numel() == p.detach().clone().numel() for p in module.parameters())


def test_the_methods_that_are_relied_upon_have_their_signatures() -> None:
    """A release of Lightning that changes one of these needs a look at `memfit.integrations.lightning`."""
    found = {
        name: list(inspect.signature(getattr(L.pytorch.strategies.SingleDeviceStrategy, name)).parameters)[1:]
        for name in (
            "batch_to_device", "training_step", "backward", "optimizer_step", "teardown", "on_exception", "on_validation_start", "on_validation_end",
            "lightning_module_state_dict", "optimizer_state", "save_checkpoint", "load_checkpoint", "load_model_state_dict",
            "load_optimizer_state_dict",
        )
    }  # fmt: skip
    if found["load_checkpoint"] == ["checkpoint_path"]:
        found["load_checkpoint"].append("weights_only")  # before 2.6
    assert found == {
        "backward": ["closure_loss", "optimizer", "args", "kwargs"],
        "optimizer_step": ["optimizer", "closure", "model", "kwargs"],
        "batch_to_device": ["batch", "device", "dataloader_idx"],
        "training_step": ["args", "kwargs"],
        "teardown": [],
        "on_exception": ["exception"],
        "on_validation_start": [],
        "on_validation_end": [],
        "lightning_module_state_dict": [],
        "optimizer_state": ["optimizer"],
        "save_checkpoint": ["checkpoint", "filepath", "storage_options"],
        "load_checkpoint": ["checkpoint_path", "weights_only"],
        "load_model_state_dict": ["checkpoint", "strict"],
        "load_optimizer_state_dict": ["checkpoint"],
    }


def test_behind_fit_a_model_under_a_limit_stays_at_home(tmp_path: Path) -> None:
    """A save, validation, a test of a checkpoint behind `fit` stream; `close` gives the model back."""
    from memfit.integrations.lightning import MemfitStrategy

    theirs, plain_trainer = train(tmp_path / "plain", ours=False)
    ours, trainer = train(tmp_path / "ours", ours=True, limit="8GiB")
    with pytest.raises(AwayError):
        next(ours.model.parameters()).sum()
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    plain_trainer.save_checkpoint(tmp_path / "plain.ckpt")
    for checkpoint in (None, "step=2.ckpt", "step=4.ckpt"):
        found, expected = (
            validated(one, module, checkpoint and tmp_path / name / checkpoint)
            for one, module, name in ((trainer, ours, "ours"), (plain_trainer, theirs, "plain"))
        )
        assert found == expected
    expected = validated(plain_trainer, theirs, tmp_path / "plain.ckpt")
    assert validated(trainer, ours, tmp_path / "plain.ckpt") == expected
    assert isinstance(trainer.strategy, MemfitStrategy)
    trainer.strategy.close()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(found, expected)
    then = train(tmp_path / "then", ours=True, resume=tmp_path / "last.ckpt", steps=8)
    check_equal(then, train(tmp_path / "again", ours=False, resume=tmp_path / "plain.ckpt", steps=8))


def test_validation_alone_reads_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    module, trainer = train(tmp_path, ours=True)
    expected = validated(trainer, module, None)
    last = tmp_path / "step=6.ckpt"
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert validated(trainer, module, last) == expected


def validated(trainer: Any, module: Any, checkpoint: Path | None) -> Any:
    method = trainer.validate
    reading = {"weights_only": False} if checkpoint and "weights_only" in inspect.signature(method).parameters else {}
    return method(module, loader(8), ckpt_path=checkpoint, verbose=False, **reading)


HERE = [key for key in CASES if key[0] == "integrations/lightning.py"]


@pytest.mark.parametrize("key", HERE, ids=lambda key: CASES[key].__name__)
def test_the_cure_that_a_refusal_names_works(key: tuple[str, str], tmp_path: Path) -> None:
    """The cases of `unit/test_advice.py` that are skipped where Lightning is not installed."""
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        CASES[key](scene)
    assert key[1] in scene.words


def test_all_cures_of_this_host_are_followed() -> None:
    assert advice_of_hosts.lightning() and len(HERE) == 5
