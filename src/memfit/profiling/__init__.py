"""What a model does with memory, found out by tracing.

In: a model, its loss and a batch. Out: `blocks.find_blocks` partitions the weights,
`trace.profile_step` gives a `core.profile.Profile`, `batch` counts and slices rows.
"""
