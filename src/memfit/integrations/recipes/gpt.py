"""GPT-2 recipes: `gpt2-small` (the main run), `bench-98m` (peers were measured on it), `gpt-tiny`
(for tests).

In: a seed, a step count. Out: unmodified transformers models, torch's own AdamW and learning-rate
schedule, a loss, batches. Architecture: Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners", section 2.3, without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from memfit.core.errors import UsageError
from memfit.files.pretrained import need_transformers
from memfit.integrations.recipes.token_batches import TokenWindows, WindowStream, read_tokens, write_built_in_tokenizer

if TYPE_CHECKING:
    from transformers import GPT2Config


class BatchStream(Protocol):
    """Endless batches; says where it stands, and goes on from there."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def state_dict(self) -> dict[str, int]:
        """Position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, in the parts that a user would write by hand."""

    name: str
    """Names for `--recipe`."""
    description: str
    """One line for a list."""
    batch_size: int
    """Rows a step."""
    sequence_length: int | None
    """Tokens of a sequence; None: rows are not text."""
    build_model: Callable[[int], nn.Module]
    """Seed -> the model, in training mode, on the CPU in fp32.

    Memory: the weights, for a moment the output layer twice.
    """
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Model -> its optimizer. Takes no memory before the first step."""
    build_scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler]
    """Optimizer and number of steps -> the learning-rate schedule, stepped once after each training
    step.
    """
    loss: Callable[[nn.Module, Any], Tensor]
    """Model and batch -> mean loss in nats a token (or an image), a scalar."""
    batches: Callable[[int], BatchStream]
    """Seed -> endless batches: `(batch_size, sequence_length + 1)` token numbers of text, or images
    with labels. Text is read at the call.
    """
    keep_tokenizer: Callable[[Path], None]
    """Directory of a save -> the tokenizer is in it too."""
    is_large: bool = False
    """The model is to be built by `memfit.empty`."""
    weights: Path | None = None
    """A directory of files that its weights are read from; None: its own initialisation."""


def causal_language_loss(model: nn.Module, batch: Int64[Tensor, "batch window"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of each window's tokens given those before, through transformers' own
    causal language loss.

    Args:
        model: a transformers causal language model.
        batch: token numbers; all but the last are inputs, all but the first are targets.

    Returns:
        The mean over all targets, in nats. Only it is returned: the output object would keep the
            logits alive.
    """
    targets = batch[:, 1:].contiguous()
    # `shift_labels` are the targets as they are; without them transformers would shift `labels` and
    # lose a target a sequence.
    return model(input_ids=batch[:, :-1], labels=targets, shift_labels=targets, use_cache=False).loss


def build_adamw(model: nn.Module, *, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), everything else as torch has
    it.

    Args:
        model: its parameters are trained, all of them.
        learning_rate: the rate after warm-up.

    Returns:
        The optimizer; its two states of 4 bytes a parameter each appear in the first step.
    """
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def build_warmup(optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    """Linear warm-up over a quarter of the run, at most 100 steps; then the rate stays.

    Args:
        optimizer: the optimizer to schedule.
        total_steps: steps of the run.

    Returns:
        The schedule: step n of w warm-up steps (n from 1) runs at n / w of the rate.

    Raises:
        UsageError: the number of steps is not positive.
    """
    if total_steps < 1:
        raise UsageError(f"a run of {total_steps} steps: give at least 1")
    warmup_steps = max(1, min(100, total_steps // 4))
    return LambdaLR(optimizer, partial(_warmup_factor, warmup_steps))


def _warmup_factor(warmup_steps: int, steps_done: int) -> float:
    return min(1.0, (steps_done + 1) / warmup_steps)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The sizes that tell one GPT-2 from another."""

    layers: int
    width: int
    heads: int
    positions: int
    vocabulary_size: int
    tokens_used: int
    """Vocabulary of the text; numbers from here to `vocabulary_size` never occur."""
    tied: bool = True
    token_limit: int | None = None
    """Read no more text than this."""

    def config(self) -> GPT2Config:
        """The transformers configuration: no dropout, no cache."""
        from transformers import GPT2Config

        return GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            n_positions=self.positions,
            vocab_size=self.vocabulary_size,
            tie_word_embeddings=self.tied,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )


def _build_gpt(shape: _Shape, seed: int) -> nn.Module:
    from transformers import GPT2LMHeadModel

    # The caller's random numbers go on as if no model had been drawn from them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(shape.config()).train()
    # transformers derives this from the class's name, which GPT-2's does not give away, takes this
    # default and warns.
    model.loss_type = "ForCausalLM"
    return model


def _batches(shape: _Shape, batch_size: int, sequence_length: int, seed: int) -> WindowStream:
    tokens = read_tokens(shape.tokens_used, token_limit=shape.token_limit)
    return iter(TokenWindows(tokens=tokens, batch_size=batch_size, sequence_length=sequence_length, seed=seed))


def _gpt_recipe(
    name: str, description: str, shape: _Shape, *, batch_size: int, sequence_length: int, learning_rate: float
) -> Recipe:
    return Recipe(
        name=name,
        description=description,
        batch_size=batch_size,
        sequence_length=sequence_length,
        build_model=partial(_build_gpt, shape),
        build_optimizer=partial(build_adamw, learning_rate=learning_rate),
        build_scheduler=build_warmup,
        loss=causal_language_loss,
        batches=partial(_batches, shape, batch_size, sequence_length),
        keep_tokenizer=partial(write_built_in_tokenizer, shape.tokens_used),
    )


GPT2_SMALL = _gpt_recipe(
    "gpt2-small",
    "GPT-2 small, 124M parameters, 8 sequences of 512 tokens of Python source",
    # The vocabulary is padded to GPT-2's size, so that logits and embeddings cost what they cost
    # there.
    _Shape(layers=12, width=768, heads=12, positions=1024, vocabulary_size=50_257, tokens_used=16_384),
    batch_size=8,
    sequence_length=512,
    learning_rate=6e-4,
)

BENCH_98M = _gpt_recipe(
    "bench-98m",
    "GPT, 98M parameters, untied, vocabulary 8192, 8 sequences of 256 tokens: the run that peers were measured on",
    _Shape(layers=12, width=768, heads=12, positions=256, vocabulary_size=8192, tokens_used=8192, tied=False),
    batch_size=8,
    sequence_length=256,
    learning_rate=1e-3,
)

GPT_TINY = _gpt_recipe(
    "gpt-tiny",
    "GPT, 0.1M parameters, 4 sequences of 32 tokens: seconds, for tests and for trying things out",
    _Shape(layers=2, width=64, heads=4, positions=32, vocabulary_size=512, tokens_used=512, token_limit=20_000),
    batch_size=4,
    sequence_length=32,
    learning_rate=1e-2,
)

RECIPES: tuple[Recipe, ...] = (GPT2_SMALL, BENCH_98M, GPT_TINY)
"""All built-in recipes."""


def find_recipe(name: str) -> Recipe:
    """Finds a built-in recipe by its name.

    Raises:
        UsageError: no recipe has this name; the message lists those there are. Or the extra
            `memfit[transformers]` is not installed.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            need_transformers(f"the recipe {name}")
            return recipe
    raise UsageError(f"no recipe is called {name!r}: there are {', '.join(recipe.name for recipe in RECIPES)}")
