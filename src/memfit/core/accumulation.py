"""Profile of a step that accumulates: what the user's own loop may do, as planning sees it.

In: the profile of one batch. Out: that of two such batches, one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.core.profile import Profile


def accumulated(profile: Profile) -> Profile:
    """Returns the profile of a step of the user's own loop, which runs two batches like this one
    back before it updates: the second meets the gradients of the first, as any later one does.
    """
    # Nobody cuts anything: what forbids to cut a batch has no say.
    return replace(
        profile,
        batch_rows=2 * profile.batch_rows,
        reads_batch_statistics=False,
        unsplittable_buffers=(),
        is_accumulated=True,
    )
