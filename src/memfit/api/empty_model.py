"""`empty`: models that are bigger than memory from the start.

In: the function that builds a model. Out: the model without the bytes of its weights, for
`memfit.fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from memfit.deferred import build_empty

_Model = TypeVar("_Model", bound=nn.Module)


def empty(build: Callable[[], _Model], *, initialises: bool = True) -> _Model:
    """Builds a model whose weights take no memory until `memfit.fit` sends each to its home.

        model = memfit.empty(lambda: LlamaForCausalLM(config))
        optimizer = torch.optim.AdamW(model.parameters())
        job = memfit.fit(model, optimizer, loss, sample, limit="2GiB")

    The parameters are those that stay: an optimizer may be made over them, gradients may be turned
    off, modules may be wrapped. Their values are what plain building gives, bit for bit, with the
    random numbers of the same seed, and the generators are left as plain building leaves them: what
    `build` does to weights is noted, and done for one weight at a time when its block moves home.
    Buffers and parameters below 64 KiB are ordinary. Until then, reading a weight raises
    `AwayError`.

    Memory: address space (no memory) for all weights while `build` runs, and for a moment the
    largest tensor whose random numbers must be drawn; afterwards the buffers, the small parameters
    and about 6 KiB a weight. On a GPU the same: a weight that `build` makes there takes its bytes
    only for moments.
    Time: normal and uniform numbers of large tensors on the CPU are skipped in the generator, some
    milliseconds a weight, and drawn in `fit`. Others are drawn in both: on a GPU, of other
    distributions, and where `build` looks at what it has drawn (`nn.init.trunc_normal_`).

    Args:
        build: builds the model, and may do whatever it likes to it: initialise, convert
            (`.to(torch.bfloat16)`), tie. Weights that it makes from data (a file that it reads) are
            ordinary, whole in memory.
        initialises: False draws no random numbers, which is faster and needs
            `fit(weights=directory)`.

    Returns:
        The model.

    Raises:
        UsageError: `build` returned no module. UnsupportedError: an operation on weights that
            cannot be put off. Whatever `build` raises.
    """
    return build_empty(build, draws=initialises)  # type: ignore[return-value]


__all__ = ["empty"]
