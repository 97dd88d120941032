"""Operating systems that memfit runs on.

In: `sys.platform`. Out: nothing, or an error that says where to go.
"""

from __future__ import annotations

from memfit.core.errors import PlatformError

_WAYS = {
    "darwin": "run it in a Linux container or virtual machine (it has no backend for Apple's GPUs)",
    "win32": "run it in WSL 2, which is Linux (wsl --install, then pip install memfit there)",
}


def check_platform(platform: str) -> None:
    """Refuses other systems than Linux.

    Args:
        platform: as `sys.platform` has it.

    Raises:
        PlatformError: another system.
    """
    if platform == "linux":
        return
    name = {"darwin": "macOS", "win32": "Windows"}.get(platform, repr(platform))
    way = _WAYS.get(platform, "run it on Linux, or in a Linux container or virtual machine")
    raise PlatformError(
        f"memfit runs on Linux only, and this is {name}: it measures and limits memory through /proc and the allocator of Linux. To use it here, {way}"
    )
