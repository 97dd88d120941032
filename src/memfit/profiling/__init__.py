"""Traces a model to learn what it does with memory.

In: a model, its loss and a batch. Out: `blocks.find_blocks` partitions the weights,
`trace.profile_step` gives a `core.profile.Profile`. Rows are counted and cut in `memfit.batches`.
Parts: `trace` (sizes of microbatches), `trace_run` (one run on `standins`), `recorder` and
`storage_log` (what happens in it), `known` (operations on tensors without data), `workspaces` and
`measuring` (memory inside operations), `summary` and `assemble` (the log as a profile).
"""
