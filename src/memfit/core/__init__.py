"""Data that every other room reads: profile, plan, schedule, step, timeline, limits, hardware,
number formats, units, errors.

In: nothing. Out: frozen dataclasses and pure functions. Nothing here imports torch.
"""
