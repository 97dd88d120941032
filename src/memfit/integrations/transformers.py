"""transformers' `Trainer` inside a memory limit.

In: a `Trainer` with its arguments, and what `memfit.fit` shall do. Out: the same training, bit for
bit, with checkpoints that `from_pretrained` and plain `Trainer` read.

[Note: what a trainer keeps]
The trainer's own loop runs under `job.lines()`: its batches, `training_step`, accumulation,
clipping, schedulers, callbacks and logs are the host's, and none of them is overridden. The model
moves home when the first batches are there (`get_batch_samples`), because only then it is known
what a batch is. From then on the trainer's own ways to read and write whole models are replaced:
evaluation and prediction stream weights, checkpoints are written from the homes and read into them,
a piece at a time. A checkpoint counts when its last file is there.

With `mode="collected"` windows of accumulation are steps of the job instead
(`integrations/transformers.py`, [Note: collected windows]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.process_state import is_tracing
from memfit.integrations import DECIDED_BY_HOSTS
from memfit.job.fit import fit
from memfit.job.job import Job
from memfit.job.lines import Lines
from memfit.planner.first_batch import generators_kept, sample_of
from memfit.tensors.guard import is_away
from memfit.tensors.with_frozen import WithFrozen, saved_model
from memfit.trace.batch import Parts

# Windows of accumulation of transformers' `Trainer`, each made as one step.
#
# In: the batches of a window, which the trainer asks for one by one. Out: the losses, the norm and
# the update that its own loop would have come to.
#
# [Note: collected windows]
# The first `training_step` of a window makes all of it, by one `job.step(memfit.Parts(...))`:
# weights that travel come once a window, where the parts pass layer by layer. A part's loss is the
# host's own `training_step` up to its backward, so that what it divides by, counts and logs is the
# host's. What the host does from there to the update (backward, clipping, `optimizer.step`) has
# been done by then, and gives what it came to. Callbacks that look between backward and update
# would see neither.


@dataclass
class Window:
    """A window of accumulation, of which the host asks batch by batch.

    Attributes:
        batches: all of it.
        items: the host's count of what their losses are means over; None: it does not count.
        losses: of batches that the host has not asked for yet.
        norm: of the gradients, before they were clipped.
        is_running: its step is being made.
    """

    batches: list[Any]
    items: Any
    losses: list[float] = field(default_factory=list[float])
    norm: float | None = None
    is_running: bool = False


class CollectedWindows:
    """The part of `MemfitMixin` that makes a window at once. See [Note: collected windows].

    Attributes:
        job: the trainer's.
    """

    job: Job | None
    args: Any
    accelerator: Any
    optimizer: Any
    callback_handler: Any
    _memfit_window: Window | None = None
    _memfit_loss: torch.Tensor | None = None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Trainer.training_step`. The first one of a window makes its step."""
        window = self._memfit_window
        if window is None or self.job is None or window.is_running:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if not window.losses:
            window.is_running = True
            try:
                result = self.job.step(Parts([dict(batch) for batch in window.batches]))
            finally:
                window.is_running = False
            window.losses, window.norm = list(result.losses), result.norm
        return torch.tensor(window.losses.pop(0), device=self.args.device)

    def _memfit_part(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the loss that the host's `training_step` would run back."""
        window = self._memfit_window
        assert window is not None
        with uncounted(self) if is_tracing() else nullcontext():
            super().training_step(saved_model(model), dict(batch), window.items)  # type: ignore[misc]
        # Parts take turns at the entries of blocks, and between the host's backward and here is
        # none: it is this part's.
        loss, self._memfit_loss = self._memfit_loss, None
        assert loss is not None
        return loss

    @contextmanager
    def _memfit_collecting(self) -> Iterator[None]:
        """Context in which the host's backward notes the loss, its clipping gives the window's
        norm, and its update is made already.

        Raises:
            UnsupportedError: a callback looks between backward and update.
        """
        asking = TrainerCallback.on_pre_optimizer_step
        looking = [c for c in self.callback_handler.callbacks if type(c).on_pre_optimizer_step is not asking]
        if looking:
            raise UnsupportedError(
                f"the callback {type(looking[0]).__name__} looks at gradients before the update (on_pre_optimizer_step), which has been made by then with "
                "memfit={'mode': 'collected'}: leave 'mode' out, or the callback"
            )

        def note(loss: torch.Tensor, **_: Any) -> None:
            self._memfit_loss = loss

        def norm(*_: Any, **__: Any) -> torch.Tensor | None:
            window = self._memfit_window
            return None if window is None or window.norm is None else torch.tensor(window.norm)

        def nothing(*_: Any, **__: Any) -> None:
            """Updates nothing: `job.step` has."""

        places = [
            (self.accelerator, "backward", note),
            (self.accelerator, "clip_grad_norm_", norm),
            (self.optimizer, "step", nothing),
        ]
        before = [vars(owner).get(name) for owner, name, _ in places]
        for owner, name, stand_in in places:
            setattr(owner, name, stand_in)
        try:
            yield
        finally:
            for (owner, name, _), own in zip(places, before, strict=True):
                if own is None:
                    del vars(owner)[name]
                else:
                    setattr(owner, name, own)


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Context in which TRL's trainers count into metrics that are dropped."""
    kept = {name: getattr(trainer, name) for name in ("_metrics", "_total_train_tokens") if hasattr(trainer, name)}
    if "_metrics" in kept:
        trainer._metrics = {mode: type(found)(list) for mode, found in kept["_metrics"].items()}  # noqa: SLF001, TRL's
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)


def collects(mode: object) -> bool:
    """Tells whether windows are collected.

    Raises:
        UsageError: an unknown mode.
    """
    if mode not in ("lines", "collected"):
        raise UsageError(
            f"memfit={{'mode': {mode!r}}}: it is 'lines', in which the trainer's own loop runs, or 'collected', in which a window of accumulation is one step"
        )
    return mode == "collected"


_STATES, _SCHEDULER, _LAST = "optimizer.pt", "scheduler.pt", "trainer_state.json"


class MemfitMixin(CollectedWindows):
    """Puts a subclass of `Trainer` inside a memory limit: `class MyTrainer(MemfitMixin, Trainer)`.

    Args:
        args, kwargs: of the trainer.
        memfit: keyword arguments of `memfit.fit`, such as `{"limit": "8GiB"}`. `sample` may be the
            largest batch that will come; by default it is the largest of the first step. `frozen`
            may be models that the trainer's loss calls and nothing trains, by a name:
            `{"teacher": teacher}`. They rest at home beside the model, inside the same limit.
            `mode` is "lines", or "collected": weights that travel come once a window of
            accumulation.

    Attributes:
        job: from the first step on; None before it and after `close`.
    """

    model: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, *args: Any, memfit: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.job: Job | None = None
        self._memfit_options = dict(memfit or {})
        self._memfit_collects = collects(self._memfit_options.pop("mode", "lines"))
        self._memfit_frozen: dict[str, nn.Module] = dict(self._memfit_options.pop("frozen", {}))
        self._memfit_stack: ExitStack | None = None
        self._memfit_weights: Path | None = None
        self._memfit_states: Path | None = None
        self._memfit_lines: Lines | None = None
        self._memfit_in_checkpoint = False
        self._memfit_trainable: list[nn.Parameter] = []
        refused = [name for name in self._memfit_options if name in DECIDED_BY_HOSTS]
        if refused:
            raise UsageError(
                f"memfit={{{refused[0]!r}: ...}}: the trainer decides that by arguments of its own (max_grad_norm, output_dir, resume_from_checkpoint); leave it out"
            )
        super().__init__(*args, **kwargs)
        _refuse(self, is_collected=self._memfit_collects)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves nothing where weights have no values yet: `memfit.fit` gives them."""
        if not _has_away(model):
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    # --- training --------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.train`. The job stays afterwards, for `evaluate`, `predict` and
        `save_model`; `close` makes the model an ordinary one again.
        """
        self.close()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(_last_whole(Path(self.args.output_dir)))
        elif resume_from_checkpoint:
            _check_whole(Path(resume_from_checkpoint))
        try:
            with ExitStack() as stack:
                self._memfit_stack = stack
                return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._memfit_stack = None

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """See `Trainer.get_batch_samples`. With the first batches the model moves home."""
        found, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if self._memfit_collects:
            # The host's own, which it sets behind this: parts are traced before.
            self.current_gradient_accumulation_steps = len(found)
            self._memfit_window = Window(found, items)
        if self.job is None and found and self._memfit_stack is not None:
            self._memfit_begin(found, items, self._memfit_stack)
        if self._memfit_lines is not None and found:
            self._memfit_lines.expect(self._prepare_inputs(max(found, key=_elements)))  # type: ignore[attr-defined]
        return found, items

    def _memfit_begin(self, batches: list[Any], items: Any, stack: ExitStack) -> None:
        options = dict(self._memfit_options)
        sample = options.pop("sample", None)
        sample = max(batches, key=_elements) if sample is None else sample_of(sample)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.model.train()
        frozen, whole = self._memfit_others(), self.model
        if frozen:
            # Nothing trains them; trainers leave that to their `no_grad`. A weight that the model
            # has as well goes on training.
            own = {id(p) for p in self.model.parameters()}
            others = [p for other in frozen.values() for p in other.parameters() if id(p) not in own]
            self._memfit_trainable = [p for p in others if p.requires_grad]
            stack.callback(self._memfit_release_others)
            for parameter in self._memfit_trainable:
                parameter.requires_grad = False
            whole = WithFrozen(self.model, **frozen)
        how: dict[str, Any] = {"lines": True, "loss": _loss_of(self, items), "sample": self._prepare_inputs(sample)}  # type: ignore[attr-defined]
        if self._memfit_collects:
            stack.enter_context(self._memfit_collecting())
            # As many parts as the longest window has, each of which may be the largest.
            parts = [dict(sample)] * max(self.args.gradient_accumulation_steps, len(batches))
            how = {"loss": self._memfit_part, "sample": Parts(parts), "max_grad_norm": self.args.max_grad_norm or None}
        with generators_kept():  # batches of a resumed run come from them
            job = fit(whole, optimizer, weights=self._memfit_weights, **how, **options)
            self.job = job
            if self._memfit_states is not None:
                job.load_states(self._memfit_states)
        self._memfit_weights = self._memfit_states = None
        if not self._memfit_collects:
            lines = self._memfit_lines = stack.enter_context(job.lines())
            stack.callback(setattr, self, "_memfit_lines", None)
            if frozen:
                stack.enter_context(self._memfit_whole_losses(lines))

    def _memfit_others(self) -> dict[str, nn.Module]:
        """Returns the frozen models that the loss calls, by name."""
        reference = getattr(self, "ref_model", None)
        return self._memfit_frozen | ({} if reference is None else {"reference": reference})

    @contextmanager
    def _memfit_whole_losses(self, lines: Lines) -> Iterator[None]:
        """Makes each `compute_loss` one forward of the lines, which calls several models.

        Of the trainer itself: a class of the user's that begins with the mixin has its own one
        ahead of the mixin's.
        """
        method = self.compute_loss  # type: ignore[attr-defined]
        before = vars(self).get("compute_loss")

        @wraps(method)
        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with lines.forward(inputs):
                return method(model, inputs, *args, **kwargs)

        vars(self)["compute_loss"] = compute_loss
        try:
            yield
        finally:
            del vars(self)["compute_loss"]
            if before is not None:
                vars(self)["compute_loss"] = before

    def _memfit_release_others(self) -> None:
        """Gives the frozen models back as they were, where there is no job that has them."""
        while self.job is None and self._memfit_trainable:
            self._memfit_trainable.pop().requires_grad_()

    def close(self) -> None:
        """Makes model and optimizer ordinary and complete again, if there is a job; see
        `Job.close`.

        Raises:
            DoesNotFitError: a model that was never whole does not fit under the limit; `job.save`
                it.
        """
        if self.job is not None:
            self.job.close()
            self.job = None
            self._memfit_release_others()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- forward only ----------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.evaluation_loop`, with weights streamed."""
        if self.job is None:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        with self.job.inference():
            found = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
            modes = [(module, module.training) for module in self.model.modules()]
        # As the loop left them, in evaluation mode: TRL tells by it what its next log is of.
        for module, is_training in modes:
            module.training = is_training
        return found

    # --- checkpoints -----------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.job is None:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        if _is_peft(self.model):
            # The adapter alone is written: of the base nothing is read.
            super()._save(output_dir, _trained(self.model, self.job))  # type: ignore[misc]
            return
        target = Path(output_dir or self.args.output_dir)
        has_states = self._memfit_in_checkpoint and not self.args.save_only_model
        _save_beside(self.job, target, "trainer" if has_states else "weights")
        for helper in (getattr(self, "processing_class", None), getattr(self.data_collator, "tokenizer", None)):  # type: ignore[attr-defined]
            if helper is not None:
                helper.save_pretrained(target)
                break
        torch.save(self.args, target / "training_args.bin")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._memfit_in_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._memfit_in_checkpoint = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.job is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        if _is_peft(self.model):
            # Of the adapter, which is small.
            torch.save(self.optimizer.state_dict(), Path(output_dir) / _STATES)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # The host reads all weights beside the model, and passes over names that it does not find:
        # of some models its own checkpoints have older ones.
        if _has_away(self.model) or not (_is_peft(self.model) or self.args.eval_on_start):
            self._memfit_weights = Path(resume_from_checkpoint)  # read when the model moves home
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._memfit_states = Path(checkpoint) / _STATES
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        if self.job is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        best = Path(self.state.best_model_checkpoint)
        if _is_peft(self.model):
            _load_trained(self.model, self.job, best)
        else:
            self.job.load(best, weights_only=True)


class MemfitTrainer(MemfitMixin, Trainer):
    """`Trainer` inside a memory limit.

        trainer = MemfitTrainer(model, args, train_dataset=data, memfit={"limit": "8GiB"})
        trainer.train()

    Losses, norms, learning rates and weights are those of `Trainer`, bit for bit. See
    `MemfitMixin`.
    """


def _refuse(trainer: Any, *, is_collected: bool) -> None:
    """Refuses arguments of the trainer that do not go with a memory limit.

    Raises:
        UnsupportedError: says which, and what to do instead.
    """
    args, scaler = trainer.args, trainer.accelerator.scaler
    reasons = {
        "several devices (n_gpu, world_size)": (
            args.n_gpu > 1 or args.world_size > 1,
            "one process with one device is served: set CUDA_VISIBLE_DEVICES, or start it without torchrun",
        ),
        "deepspeed or fsdp": (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
            "both move weights, as memfit does: leave the argument out",
        ),
        "fp16=True": (is_collected and scaler, "losses are scaled in its loop: leave memfit={'mode': 'collected'} out"),
        "torch_compile=True": (args.torch_compile, "it compiles the whole model: leave it out"),
        "auto_find_batch_size=True": (
            args.auto_find_batch_size,
            "a batch that does not fit is planned for, or refused before the first step: leave it out",
        ),
        "use_liger_kernel=True": (
            getattr(args, "use_liger_kernel", False),
            "it replaces modules' forwards: leave it out",
        ),
        "gradient_checkpointing=True": (
            args.gradient_checkpointing,
            "the plan decides what is computed again, and it would be paid for twice: leave it out",
        ),
        "sync_ref_model=True": (
            getattr(args, "sync_ref_model", False),
            "its callback writes a reference whose weights are away: leave it out",
        ),
    }
    for name, (is_asked, why) in reasons.items():
        if is_asked:
            raise UnsupportedError(f"MemfitTrainer does not go with {name}: {why}")


def _loss_of(trainer: Any, items: Any) -> Callable[[Any, Any], Any]:
    """Returns the trainer's loss of one batch, for planning; it counts and logs nothing."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        with uncounted(trainer), trainer.compute_loss_context_manager():
            # A shallow copy: label smoothing takes labels out, TRL adds keys.
            return trainer.compute_loss(saved_model(model), dict(batch), num_items_in_batch=items)

    return loss


def _elements(batch: Any) -> int:
    found = batch.values() if isinstance(batch, Mapping) else ()
    return sum(value.numel() for value in found if isinstance(value, torch.Tensor))


def _has_away(model: nn.Module) -> bool:
    return any(is_away(p) for p in model.parameters())


def _save_beside(job: Job, target: Path, form: Literal["trainer", "weights"]) -> None:
    """Saves into a directory that may have checkpoints in it."""
    if not target.is_dir() or not any(path.is_dir() for path in target.iterdir()):
        job.save(target, form=form)
        return
    # A save takes the place of its whole directory, which here has others in it.
    staged = target / ".memfit-save"
    job.save(staged, form=form)
    for file in staged.iterdir():
        file.replace(target / file.name)
    staged.rmdir()


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _trained(model: nn.Module, job: Job) -> dict[str, torch.Tensor]:
    """Copies of the weights that train, brought block by block."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            with job.weights(name):
                found[name] = parameter.detach().clone()
    return found


def _load_trained(model: Any, job: Job, checkpoint: Path) -> None:
    """Reads the adapter of a checkpoint into the weights that train, block by block.

    Raises:
        UsageError: the checkpoint is not of this adapter.
    """
    from peft import get_peft_model_state_dict, load_peft_weights

    saved = load_peft_weights(str(checkpoint), device="cpu")
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Names in files are PEFT's: it is given numbers in the places of weights, and says where each
    # one goes.
    numbers = {name: torch.tensor(index) for index, (name, _) in enumerate(trained)}
    found = {int(number): saved.get(key) for key, number in get_peft_model_state_dict(model, numbers).items()}
    for index, (name, parameter) in enumerate(trained):
        values = found.get(index)
        if values is None or values.shape != parameter.shape:
            raise UsageError(
                f"the adapter of {checkpoint} has no {name!r} of shape {list(parameter.shape)}: it is of another adapter. Call trainer.close() for the model as it "
                "is now, and model.load_adapter(...) for that one"
            )
        with job.weights(name), torch.no_grad():
            parameter.copy_(values)


def _check_whole(checkpoint: Path) -> None:
    missing = [name for name in (_LAST, _STATES, _SCHEDULER) if not (checkpoint / name).is_file()]
    if missing:
        raise UsageError(
            f"the checkpoint {checkpoint} has no {missing[0]}: it was not written to its end, or with save_only_model=True, and would be resumed without what "
            "is missing. Name another one, or load its weights into the model and train anew"
        )


def _last_whole(directory: Path) -> Path:
    """Returns the newest checkpoint that was written to its end."""
    found = [path for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    whole = [path for path in found if all((path / name).is_file() for name in (_LAST, _STATES, _SCHEDULER))]
    if not whole:
        raise UsageError(
            f"resume_from_checkpoint=True: {directory} has no checkpoint that was written to its end (found {sorted(path.name for path in found)}). "
            "Name one by its path, or leave it out to begin anew"
        )
    return max(whole, key=lambda path: int(path.name.split("-")[-1]))
