"""Traces a model to learn what it does with memory.

In: a model, its loss and a batch. Out: `blocks.find_blocks` partitions the weights,
`trace.profile_step` gives a `core.profile.Profile`, `batch` counts and slices rows.
"""
