"""Aliases: the field's other words for memfit's choices, accepted wherever a choice is read. What
memfit writes are its own words.

In: a word as a person wrote it, and its purpose. Out: memfit's word, or the word unchanged if it is
not known; the reader of the choice then refuses it. The glossary (docs/glossary.md) has them; a
test compares.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_SAVED = {
    "keep": ("kept", "save"),
    "recompute": (
        "rematerialization", "rematerialize", "remat", "recomputation", "checkpoint", "checkpointing", "activation checkpointing",
        "gradient checkpointing",
    ),
    "select": ("selective", "selective checkpointing", "selective activation checkpointing", "selective recompute"),
    "offload": ("SwapOut", "SwapIn", "swap", "SwapOut / SwapIn", "activation offload", "offloading"),
}  # fmt: skip
_TIER = {
    "device": ("gpu", "cuda", "accelerator", "vram", "hbm"),
    "host": ("cpu", "ram", "dram", "pinned"),
    "disk": ("nvme", "ssd", "file", "files"),
}
_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "saved": _SAVED,
    "saved_home": _TIER,
    "boundary_home": _TIER,
    "weight_home": _TIER,
    "gradient_home": _TIER,
    "state_home": _TIER,
    "update_on": _TIER,
    "order": {
        "layer-major": ("breadth-first",),
        "microbatch-major": ("depth-first", "gradient accumulation", "plain accumulation"),
    },
    "compute_dtype": {"bfloat16": ("bf16",), "float16": ("fp16", "half")},
    "allow": {
        "bf16": ("bfloat16",),
        "fp16": ("float16", "half"),
        "int8-state": ("8-bit optimizer", "8bit optimizer", "int8 states"),
        "int4-state": ("4-bit optimizer", "4bit optimizer", "int4 states"),
        "fp8-state": ("fp8 optimizer", "fp8 states"),
        "bf16-state": ("bf16 optimizer", "bf16 states"),
        "nf4-frozen": ("QLoRA", "nf4 base", "4-bit base"),
        "int8-frozen": ("LLM.int8", "int8 base", "8-bit base"),
    },
}
_FIELDS = {
    "microbatches": ("micro_batches", "gradient_accumulation_steps", "accumulation_steps", "micro_steps"),
    "weight_home": ("weight_placement", "param_home", "parameter_home"),
    "gradient_home": ("gradient_placement", "grad_home"),
    "state_home": ("state_placement", "optimizer_home", "optimizer_state_home"),
    "update_on": ("update_device", "optimizer_device", "step_on"),
    "saved": ("activations", "checkpointing"),
}


def _plain(word: str) -> str:
    return re.sub(r"[\s_/-]+", "", word).lower()


def _turned(words: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {_plain(alias): own for own, aliases in words.items() for alias in (own, *aliases)}


_BY_PURPOSE = {purpose: _turned(words) for purpose, words in _WORDS.items()}
_BY_FIELD = _turned(_FIELDS)


def own_word(purpose: str, word: str) -> str:
    """Returns memfit's word for a choice; an unknown word is returned unchanged.

    Args:
        purpose: the field of a plan that it is for, or "allow".
        word: as it was written; capitals, blanks, hyphens and underlines do not matter.
    """
    return _BY_PURPOSE.get(purpose, {}).get(_plain(word), word)


def own_field(name: str) -> str:
    """Returns memfit's name for a field of a plan's JSON; an unknown name is returned unchanged."""
    return _BY_FIELD.get(_plain(name), name)


def own_allowances(allow: Collection[str]) -> Collection[str]:
    """Returns the permissions given to `fit(allow=...)` in memfit's words. A string in place of a
    set is returned unchanged, to be refused later.
    """
    if isinstance(allow, str):
        return allow
    return frozenset(own_word("allow", name) if isinstance(name, str) else name for name in allow)  # pyright: ignore[reportUnnecessaryIsInstance], users pass anything
