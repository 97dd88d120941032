"""Check for calls that cannot be recomputed: running them twice would compute something else.

In: a plan and the calls of a trace. Out: nothing, or an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.errors import UnsupportedError
from memfit.core.plan import Plan
from memfit.core.profile import CallProfile


def check_again(plan: Plan, calls: Sequence[CallProfile]) -> None:
    """Checks that the plan recomputes no call that would then compute something else. Raises
    `UnsupportedError`.
    """
    for call in calls:
        if call.runs_once and plan.call(call.index).saved.policy.recomputes:
            why, way_out = _why(call)
            raise UnsupportedError(
                f"call {call.index} ({call.site}) {why}: plan saved='keep' or 'offload' for it{way_out}"
            )


def _why(call: CallProfile) -> tuple[str, str]:
    if call.changes_arguments:
        return (
            "puts tensors into an object that it was given (a key-value cache), so running it again would be wrong",
            ", or switch the cache off (use_cache=False)",
        )
    if call.is_substituted:
        return (
            "is called with other tensors in the places of its parameters (torch.func.functional_call, for instance), and run again it would compute with its own",
            "",
        )
    return (
        "changes a tensor in place that its module keeps (no buffer), and run again it would meet what it left there",
        ", or make it a buffer (register_buffer)",
    )
