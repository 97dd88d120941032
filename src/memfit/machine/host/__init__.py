"""Host: processors, memory, disks and settings of the operating system.

In: /proc, /sys, the environment, a directory. Out: `Host` (`read`), `Setting`s (environment
variables that are safe to set before torch is loaded), `Measurements` (effects of settings, as
ratios within one run), `SettingChange`s (changes that a person may make). Nothing here imports
torch; only child processes that measure load torch (`trials`). Only `restart_with_settings` changes
anything.
"""
