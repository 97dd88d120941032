"""Lightning's `Trainer` inside a memory limit.

In: a `LightningModule` with one optimizer, optimized automatically or manually, and what
`memfit.fit` shall do. Out: the same training, bit for bit, every hook in its place.

[Note: where a batch is first seen]
`training_step` is no `forward`, and what it calls are parts of the module. So the strategy says
where a forward begins and ends (`Lines.forward`), and the model moves home when the first training
batch reaches the device, before Lightning's closure begins. Checkpoints are directories, as those
of Lightning's sharded strategies: a save of memfit's, and `lightning.ckpt` with all that is neither
a weight nor a state of the optimizer.

[Note: behind fit]
Where a limit was named, the model stays at home when `fit` ends, until `close`:
`trainer.save_checkpoint`, `validate`, `test` and `predict` stream weights as inside of `fit`, and
the limit holds for them. A checkpoint of Lightning's own takes weights and states twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy  # pyright: ignore[reportMissingImports]
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # pyright: ignore[reportMissingImports]

from memfit.api import Job, Lines, fit, generators_kept, load, sample_of
from memfit.core.errors import UnsupportedError, UsageError
from memfit.integrations import DECIDED_BY_HOSTS

_REST = "lightning.ckpt"


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
        self._saved: Path | None = None

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
        if module.trainer.precision.startswith("16"):
            raise UnsupportedError('precision="16-mixed" reads gradients that may rest elsewhere: use "bf16-mixed"')
        options = dict(self._options)
        with generators_kept():
            sample = self._batch_of(module, sample_of(options.pop("sample"))) if "sample" in options else batch
            loss = self._loss if module.automatic_optimization else self._first_loss
            self._module = module
            self.job = fit(module, self.optimizers[0], loss, sample, lines=True, **options)
        if self._saved is not None:
            self.job.load(self._saved, restore_random=False)  # the trainer restores its own
            self._saved = None
        self._lines = self._training.enter_context(self.job.lines())

    def _loss(self, module: Any, batch: Any) -> torch.Tensor:
        """Returns the loss of a batch, for planning: of the strategy's own step, inside of all that
        the precision puts around it.
        """
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        with _without_logs(module):
            found = super().training_step(batch, *([0] if takes_index else []))
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
        """Returns nothing while weights rest at home: `save_checkpoint` writes them."""
        return {} if self._is_home() else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns nothing while states rest at home: `save_checkpoint` writes them."""
        return {} if self._is_home() else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a directory. See [Note: where a batch is first seen]."""
        if self.job is None or not self._is_home():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        # Inside of the save: a checkpoint that is there is whole, at every instant.
        self.job.save(filepath, write_beside=lambda new: torch.save(checkpoint, new / _REST))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Reads a directory that `save_checkpoint` wrote, or a file of Lightning's."""
        path = Path(checkpoint_path)
        if not path.is_dir():
            # Lightning 2.5 has one argument.
            return super().load_checkpoint(checkpoint_path, *([] if weights_only is None else [weights_only]))
        if not (path / _REST).is_file():
            raise UsageError(
                f"the checkpoint {path} has no {_REST}: it was not written to its end, or not by MemfitStrategy; name another"
            )
        self._saved = path
        # Written by this trainer: callbacks keep objects of their own classes in it.
        return torch.load(path / _REST, weights_only=bool(weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002, Lightning's signature
        """Loads weights, unless they come when the model moves home."""
        module: Any = self.lightning_module
        if self.job is not None and self._is_home():
            if self._saved is None:
                raise UnsupportedError(
                    "ckpt_path names a file of plain Lightning's, and the model rests at home: call trainer.strategy.close() before, or name a checkpoint that "
                    "MemfitStrategy wrote"
                )
            self.job.load(self._saved, weights_only=True)
        elif self._saved is None:
            super().load_model_state_dict(checkpoint, strict)
        elif module.trainer.training:
            return
        else:
            load(self._saved, module)
        self._saved = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads states, unless they come when the model moves home."""
        if self._saved is None:
            super().load_optimizer_state_dict(checkpoint)


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
