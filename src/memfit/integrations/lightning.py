"""Lightning's `Trainer` inside a memory limit.

In: a `LightningModule` with one optimizer, optimized automatically or manually, and what
`memfit.fit` shall do. Out: the same training, bit for bit, every hook in its place.

[Note: where a batch is first seen]
`training_step` is no `forward`, and what it calls are parts of the module. So the strategy says
where a forward begins and ends (`Lines.forward`), and the model moves home when the first training
batch reaches the device, before Lightning's closure begins. Checkpoints are files of Lightning's,
which plain Lightning and `load_from_checkpoint` read: weights and states are read from their homes
one at a time while the file is written. Optimizer states of a checkpoint come when the model has
moved home.

[Note: behind fit]
Where a limit was named, the model stays at home when `fit` ends, until `close`:
`trainer.save_checkpoint`, `validate`, `test` and `predict` stream weights as inside of `fit`, and
the limit holds for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy  # pyright: ignore[reportMissingImports]
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # pyright: ignore[reportMissingImports]

from memfit.core.errors import UnsupportedError, UsageError
from memfit.integrations import DECIDED_BY_HOSTS
from memfit.job.fit import fit
from memfit.job.job import Job
from memfit.job.lines import Lines
from memfit.planner.first_batch import generators_kept, sample_of
from memfit.tensors.guard import is_away

_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")


class _AtHome(SingleDeviceStrategy):
    """Serves a model that may rest at home where nothing trains: streams it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)
        self.job: Job | None = None
        self._module: Any = None
        self._forward_only = ExitStack()

    def _is_home(self) -> bool:
        return self.job is not None and self.lightning_module is self._module

    def model_to_device(self) -> None:
        """Moves nothing of a model that rests at home."""
        if not self._is_home():
            super().model_to_device()

    def _stream(self) -> None:
        if self.job is not None and self._is_home():
            self._forward_only.enter_context(self.job.inference())

    def on_validation_start(self) -> None:
        """See `Strategy`: weights are streamed from here on."""
        self._stream()

    def on_validation_end(self) -> None:
        """See `Strategy`."""
        self._forward_only.close()

    def on_test_start(self) -> None:
        """See `Strategy`: weights are streamed from here on."""
        self._stream()

    def on_test_end(self) -> None:
        """See `Strategy`."""
        self._forward_only.close()

    def on_predict_start(self) -> None:
        """See `Strategy`: weights are streamed from here on."""
        self._stream()

    def on_predict_end(self) -> None:
        """See `Strategy`."""
        self._forward_only.close()


class MemfitStrategy(_AtHome):
    """Strategy of a `Trainer` inside a memory limit.

        trainer = L.Trainer(strategy=MemfitStrategy(limit="8GiB"), ...)

    Losses, hooks and weights are those of Lightning, bit for bit.

    Args:
        device: of the model.
        options: keyword arguments of `memfit.fit`. `sample` may be the largest batch that will
            come; by default it is the first.

    Attributes:
        job: from the first training batch to the end of `fit`, or, where a limit was named, to
            `close`; None else.
    """

    strategy_name = "memfit"

    def __init__(self, device: str | torch.device = "cpu", **options: Any) -> None:
        super().__init__(torch.device(device))
        refused = [name for name in options if name in DECIDED_BY_HOSTS]
        if refused:
            raise UsageError(
                f"MemfitStrategy({refused[0]}=...): the trainer decides that (gradient_clip_val, callbacks, ckpt_path); leave it out"
            )
        self._options = options
        self._lines: Lines | None = None
        self._training = ExitStack()
        self._forward = ExitStack()
        self._given: tuple[Any, Any] | None = None
        self._weights: Mapping[str, Any] | None = None
        self._states: dict[str, Any] | None = None

    # --- training --------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """See `Strategy`. A job of an earlier `fit` ends: the next has an optimizer of its own."""
        if trainer.training:
            self.close()
        super().setup(trainer)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """See `Strategy`. With the first training batch the model moves home."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        module: Any = self.lightning_module
        if self.job is None and module.trainer.training:
            self._begin(module, batch)
        if self._lines is not None and module.trainer.training:
            self._lines.expect(batch)
        return batch

    def _batch_of(self, module: Any, batch: Any) -> Any:
        """Returns a batch of a loader as the trainer would give it to `training_step`."""
        batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(batch))  # noqa: SLF001, the trainer's words
        return super().batch_to_device(batch)

    def _begin(self, module: Any, batch: Any) -> None:
        if len(self.optimizers) != 1:
            raise UnsupportedError(
                f"MemfitStrategy serves one optimizer, and configure_optimizers gives {len(self.optimizers)}: write the loop yourself, with a job for each "
                "network and its optimizer (docs/lines.md, several optimizers)"
            )
        if module.trainer.precision not in _PRECISIONS:
            raise UnsupportedError(f"precision={module.trainer.precision!r} is not served: use one of {_PRECISIONS}")
        options = dict(self._options)
        with generators_kept():
            sample = self._batch_of(module, sample_of(options.pop("sample"))) if "sample" in options else batch
            loss = self._loss if module.automatic_optimization else self._first_loss
            self._module = module
            self.job = fit(module, self.optimizers[0], loss, sample, lines=True, **options)
        if self._weights is not None:
            self.job.give_weights(self._weights)
        if self._states is not None:
            self.optimizers[0].load_state_dict(self._states)
        self._weights = self._states = None
        self._lines = self._training.enter_context(self.job.lines())

    def _loss(self, module: Any, batch: Any) -> torch.Tensor:
        """Returns the loss of a batch, for planning: of the strategy's own step, inside of all that
        the precision puts around it.
        """
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        with _without_logs(module):
            found: Any = super().training_step(batch, *([0] if takes_index else []))
        return found["loss"] if isinstance(found, Mapping) else found

    def _first_loss(self, module: Any, batch: Any) -> torch.Tensor:
        """Returns what a module that optimizes manually runs back first; what it does then is not
        done.
        """
        found: list[torch.Tensor] = []

        def note(loss: torch.Tensor, *_: object, **__: object) -> None:
            found.append(loss)
            raise _BackwardBeginsError

        module.manual_backward = note
        try:
            self._loss(module, batch)
        except _BackwardBeginsError:
            return found[0]
        finally:
            del module.manual_backward
        raise UsageError(
            "training_step came to its end without self.manual_backward(loss): call it for the batch of MemfitStrategy(sample=...), or for the first one"
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `Strategy`: a forward of the user's own lines."""
        if self._lines is None:
            return super().training_step(*args, **kwargs)
        module: Any = self.lightning_module
        if module.automatic_optimization:
            with self._lines.forward(args, kwargs):
                return super().training_step(*args, **kwargs)
        try:
            with self._forward:
                self._given = args, kwargs
                self._begin_forward()
                return super().training_step(*args, **kwargs)
        finally:
            self._given = None

    def _begin_forward(self) -> None:
        if self._lines is not None and self._given is not None:
            self._forward.enter_context(self._lines.forward(*self._given))

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Strategy`. In manual optimization a forward ends here, and what follows in the same
        `training_step` is another one.
        """
        self._forward.close()
        found = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._begin_forward()
        return found

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """See `Strategy`. In manual optimization it stands between two forwards."""
        self._forward.close()
        found = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._begin_forward()
        return found

    def teardown(self) -> None:
        """See `Strategy` and [Note: behind fit]."""
        self._end_lines()
        if self.job is not None and self.job.proof().limit_bytes is None:
            self.close()
        if self.job is None:
            super().teardown()
            return
        # What `Strategy.teardown` moves to the processor besides rests at home.
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def on_exception(self, exception: BaseException) -> None:
        """See `Strategy`."""
        self._end_lines(exception)
        super().on_exception(exception)

    def close(self) -> None:
        """Makes model and optimizer ordinary and complete again, past the limit if need be; see
        `Job.close`.
        """
        self._end_lines()
        if self.job is not None:
            self.job.close()
            self.job = self._module = None

    def _end_lines(self, error: BaseException | None = None) -> None:
        self._forward_only.close()
        self._lines = None
        self._training.__exit__(None if error is None else type(error), error, None)

    # --- checkpoints -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See `Strategy`. Weights at home are read when the checkpoint is written."""
        return self.job.model_state() if self.job and self._is_home() else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `Strategy`. States at home are read when the checkpoint is written."""
        return self.job.optimizer_state() if self.job and self._is_home() else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a file of Lightning's. See [Note: where a batch is first seen]."""
        if self.job is None or not self._is_home():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.job.write_torch(filepath, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Reads a file of Lightning's; its tensors are mapped, and read where they are used."""
        path = Path(checkpoint_path)
        if path.is_dir():
            raise UsageError(
                f"the checkpoint {path} is a directory, as memfit wrote them before: memfit.api.load(directory, module) reads its weights; fit without "
                "ckpt_path then"
            )
        if not path.is_file():
            # Lightning 2.5 has one argument.
            return super().load_checkpoint(checkpoint_path, *([] if weights_only is None else [weights_only]))
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002, Lightning's signature
        """Loads weights; into a model without bytes when it moves home."""
        if self.job is not None and self._is_home():
            self.job.give_weights(checkpoint["state_dict"])
        elif any(is_away(p) for p in self.lightning_module.parameters()):  # type: ignore[union-attr]
            self._weights = checkpoint["state_dict"]
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keeps states for when the model moves home."""
        self._states = next(iter(checkpoint["optimizer_states"]), None)


class _BackwardBeginsError(Exception):
    """Raised where a `training_step` under manual optimization asks for its first backward."""


@contextmanager
def _without_logs(module: Any) -> Iterator[None]:
    """Context in which the module logs nothing: planning runs its `training_step`."""

    def nothing(*_: object, **__: object) -> None:
        return

    module.log = module.log_dict = nothing
    try:
        yield
    finally:
        del module.log, module.log_dict
