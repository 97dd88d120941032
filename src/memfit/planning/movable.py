"""Which blocks may rest elsewhere than on the device: the large ones, and small ones where they are
many.

In: `Profile`. Out: sets of names.
"""

from __future__ import annotations

from itertools import accumulate

from memfit.core.profile import Profile
from memfit.core.units import KIB, MIB

# Moving less than this saves little memory, and a transfer of its own costs more than it. Such a
# block may rest in memory also where a journal is kept, which then has two rooms for it on disk.
SMALL_BLOCK_BYTES = MIB

# What stays on the device has its gradient and states there too: with Adam four times its weights.
_STAYING_SHARE = 4

# Four pages: of less, direct I/O would move more padding than block.
_LEAST_BLOCK_BYTES = 16 * KIB


def movable_sets(profile: Profile) -> tuple[frozenset[str], ...]:
    """Returns sets of blocks that may move together: the large ones; and where the small ones with
    their states hold more in all than the largest block, which is on the device at some time under
    any plan, a set of large and small ones that leaves less than that.

    Args:
        profile: of the model.
    """
    large = frozenset(b.name for b in profile.blocks if b.weight_bytes >= SMALL_BLOCK_BYTES)
    every = movable_blocks(profile)
    return tuple(names for names in dict.fromkeys((large, every)) if names)


def movable_blocks(profile: Profile) -> frozenset[str]:
    """Returns the largest of `movable_sets`; blocks of one size are all in it, or none is."""
    least = _least_bytes([b.weight_bytes for b in profile.blocks])
    return frozenset(b.name for b in profile.blocks if b.weight_bytes >= least)


def _least_bytes(sizes: list[int]) -> int:
    """Returns from which size on blocks may move."""
    small = sorted(size for size in sizes if size < SMALL_BLOCK_BYTES)
    may_stay = max(SMALL_BLOCK_BYTES, max(sizes, default=0) // _STAYING_SHARE)
    over = next(
        (size for size, held in zip(small, accumulate(small), strict=True) if held > may_stay), SMALL_BLOCK_BYTES
    )
    return max(_LEAST_BLOCK_BYTES, over)
