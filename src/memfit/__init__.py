"""memfit: you say how much memory there is; it trains your PyTorch model inside it and shows the
proof.

Names are loaded when they are first used: importing a part that needs no torch (`memfit.core`,
`memfit.host`, the command line's help) does not load it, and settings that torch reads when it is
loaded can still be made.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from memfit.core.platforms import check_platform
from memfit.core.version import VERSION

if TYPE_CHECKING:
    from memfit import arena, communicator, losses, parameter_server, sinks
    from memfit.api import (
        Job,
        MemfitEma,
        Parts,
        ResumableLoader,
        StepResult,
        empty,
        first_batch,
        fit,
        infer,
        profile,
        verify,
    )
    from memfit.core.errors import (
        AwayError,
        DoesNotFitError,
        LimitBreachError,
        MemfitError,
        MemfitWarning,
        PeerError,
        PlanError,
        PlatformError,
        StoreError,
        StoreInUseError,
        TierUnavailableError,
        TornStepError,
        UnsupportedError,
        UsageError,
    )
    from memfit.core.plan import Plan
    from memfit.core.planning_state import is_planning, is_tracing
    from memfit.tensors.random_streams import microbatch_streams
    from memfit.tensors.with_frozen import WithFrozen

check_platform(sys.platform)
__version__ = VERSION

_ORIGINS = {
    "AwayError": "memfit.core.errors",
    "DoesNotFitError": "memfit.core.errors",
    "Job": "memfit.api",
    "LimitBreachError": "memfit.core.errors",
    "MemfitEma": "memfit.api",
    "MemfitError": "memfit.core.errors",
    "MemfitWarning": "memfit.core.errors",
    "PeerError": "memfit.core.errors",
    "Plan": "memfit.core.plan",
    "PlanError": "memfit.core.errors",
    "PlatformError": "memfit.core.errors",
    "Parts": "memfit.api",
    "ResumableLoader": "memfit.api",
    "StepResult": "memfit.api",
    "StoreError": "memfit.core.errors",
    "StoreInUseError": "memfit.core.errors",
    "TierUnavailableError": "memfit.core.errors",
    "TornStepError": "memfit.core.errors",
    "UnsupportedError": "memfit.core.errors",
    "UsageError": "memfit.core.errors",
    "WithFrozen": "memfit.tensors.with_frozen",
    "empty": "memfit.api",
    "first_batch": "memfit.api",
    "fit": "memfit.api",
    "infer": "memfit.api",
    "is_planning": "memfit.core.planning_state",
    "is_tracing": "memfit.core.planning_state",
    "microbatch_streams": "memfit.tensors.random_streams",
    "profile": "memfit.api",
    "verify": "memfit.api",
}

__all__ = [
    "AwayError",
    "DoesNotFitError",
    "Job",
    "LimitBreachError",
    "MemfitEma",
    "MemfitError",
    "MemfitWarning",
    "Parts",
    "PeerError",
    "Plan",
    "PlanError",
    "PlatformError",
    "ResumableLoader",
    "StepResult",
    "StoreError",
    "StoreInUseError",
    "TierUnavailableError",
    "TornStepError",
    "UnsupportedError",
    "UsageError",
    "WithFrozen",
    "__version__",
    "arena",
    "communicator",
    "empty",
    "first_batch",
    "fit",
    "infer",
    "is_planning",
    "is_tracing",
    "losses",
    "microbatch_streams",
    "parameter_server",
    "profile",
    "sinks",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads a public name. Source: PEP 562."""
    if name in {"arena", "communicator", "losses", "parameter_server", "sinks"}:
        return importlib.import_module(f"memfit.{name}")
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ORIGINS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
