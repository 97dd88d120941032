"""The data that every other room reads: profile, plan, schedule, timeline, limits, hardware, units,
errors.

In: nothing. Out: frozen dataclasses and pure functions. Nothing here imports torch.
"""
