"""Choice of the frozen weights that rest in few bits, and of what must be allowed for it.

In: a model, a profile, a format. Out: the profile with what rests in it. See `core.frozen_formats`,
[Note: frozen weights in few bits].
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from memfit.core.errors import UsageError
from memfit.core.frozen_formats import FrozenFormat, encoded_sizes
from memfit.core.plan import Plan
from memfit.core.precision import WITHOUT_MASTERS
from memfit.core.profile import BlockProfile, Profile
from memfit.core.state_formats import StateFormat
from memfit.homes.encoded_weights import ENCODING_BYTES

STATE_FORMATS = tuple(one for one in StateFormat if one is not StateFormat.GIVEN)


def computes_in_bf16(allow: Collection[str]) -> bool:
    """Tells whether weights may compute in bf16."""
    return "bf16" in allow or WITHOUT_MASTERS in allow


def encodes_states(allow: Collection[str]) -> bool:
    """Tells whether optimizer states may rest in fewer bits."""
    return any(one.allowance in allow for one in STATE_FORMATS)


def encoding_bytes(model: nn.Module, allow: Collection[str]) -> int:
    """Returns what encoding a frozen weight on its way home takes at most, in a format that is
    allowed: pieces, and what was encoded in parts and whole.
    """
    formats = [one for one in FrozenFormat if one is not FrozenFormat.GIVEN and one.allowance in allow]
    found = 0
    for p in model.parameters() if formats else ():
        shape, dtype = tuple(p.shape), str(p.dtype).removeprefix("torch.")
        for one in formats if not p.requires_grad else ():
            if one.can_hold(shape, dtype):
                found = max(found, min(ENCODING_BYTES, 20 * p.numel()) + 2 * sum(one.parts(shape)))
    return found


def with_frozen(model: nn.Module, profile: Profile, chosen: FrozenFormat) -> Profile:
    """Returns the profile with frozen weights of the model that rest in a format."""
    if chosen is FrozenFormat.GIVEN:
        return profile
    names = linear_names(model)
    return replace(profile, blocks=tuple(_in_few_bits(block, chosen, names) for block in profile.blocks))


def _in_few_bits(block: BlockProfile, chosen: FrozenFormat, names: Collection[str]) -> BlockProfile:
    encoded = frozenset(
        p.name
        for p in block.parameters
        if p.name in names and not p.requires_grad and not block.is_spanning and chosen.can_hold(p.shape, p.dtype)
    )
    if not encoded:
        return block
    parts = [chosen.parts(p.shape) if p.name in encoded else p.nbytes for p in block.parameters]
    return replace(block, encoded=encoded, encoded_bytes=encoded_sizes(parts)[1])


def linear_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of weights that linear layers use, and nothing else does; without the head
    that gives logits, which formats of few bits leave as it is by custom.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    kinds: dict[int, bool] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            is_linear = isinstance(module, nn.Linear) and key == "weight" and module is not head
            kinds[id(parameter)] = kinds.get(id(parameter), True) and is_linear
    return frozenset(name for name, p in model.named_parameters() if kinds[id(p)])


def check_frozen(plan: Plan, allow: Collection[str]) -> None:
    """Raises `UsageError` where a plan keeps frozen weights in a format that is not allowed."""
    if plan.frozen_format is not FrozenFormat.GIVEN and plan.frozen_format.allowance not in allow:
        raise UsageError(
            f"the plan keeps frozen weights in {plan.frozen_format}, which rounds them once: "
            f'fit(..., allow={{"{plan.frozen_format.allowance}"}}) permits it'
        )
