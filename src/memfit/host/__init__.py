"""The machine under a run, as the operating system gives it out: read, set where that is safe,
advised elsewhere.

In: /proc, /sys, the environment, a directory. Out: `Host` (what is there), `Setting`s (environment
variables that are safe to set before torch is loaded), `Measurements` (what they bring, as ratios
within one run), `SettingChange`s (what a person may do). Nothing here imports torch: this room runs
before it; only the child processes that measure load it (`trials.py`). Nothing is changed but by
`restart_with_settings`.
"""

from memfit.host.advice import NOT_MEASURED, SettingChange, advise_changes
from memfit.host.describe import describe_host
from memfit.host.measure import Measurements, measure_host
from memfit.host.others import Others, OthersMeter
from memfit.host.processor_caches import cache_bytes
from memfit.host.read import Host, read_host
from memfit.host.restart import restart_with_settings
from memfit.host.settings import Setting, choose_settings

__all__ = [
    "NOT_MEASURED",
    "Host",
    "Measurements",
    "Others",
    "OthersMeter",
    "Setting",
    "SettingChange",
    "advise_changes",
    "cache_bytes",
    "choose_settings",
    "describe_host",
    "measure_host",
    "read_host",
    "restart_with_settings",
]
