"""Profiles of `memfit.Parts`, whose sums are the user's own.

In: a profile of the largest part, or what its trace failed with. Out: the profile with what parts
ask of a plan; the error in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from memfit.batches.batch import UncuttableError
from memfit.batches.cutting import Cut
from memfit.batches.parts import ByParts
from memfit.core.errors import UsageError
from memfit.core.profile import Profile
from memfit.profiling.gradient_hooks import has_gradient_hooks


def with_own_parts(profile: Profile, model: nn.Module, cut: Cut) -> Profile:
    """Returns the profile as one of parts, where batches come in parts.

    A hook on a gradient meets what it meets in the user's loop only where parts go one after the
    other and sums lie in `.grad`: gradients with hooks count as gradients that are read.
    """
    if not isinstance(cut, ByParts):
        return profile
    hooked = [name for name, parameter in model.named_parameters() if has_gradient_hooks(parameter)]
    reads = tuple(dict.fromkeys([*profile.read_gradients, *hooked]))
    return replace(profile, own_parts=profile.batch_rows, read_gradients=reads)


@contextmanager
def failures_of_parts(cut: Cut) -> Iterator[None]:
    """Context in which a loss that does not run on a part raises `UsageError`: nobody cut it but
    the user.
    """
    try:
        yield
    except UncuttableError as error:
        if not isinstance(cut, ByParts):
            raise
        cause = error.__cause__ or error
        told = str(cause).strip() or type(cause).__name__
        raise UsageError(
            f"loss(model, batch) fails on the largest of the parts: {told:.200}. Nothing was changed; see that it runs on it in plain PyTorch"
        ) from error
