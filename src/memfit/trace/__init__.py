"""Traces of a model's training step: memory and work of every operation, without allocating.

In: a model, its loss and a batch. Out: blocks of weights that travel together (`blocks`), a
`core.profile.Profile` (`trace`), and the rule that cuts batches into microbatches (`cutting`,
`splitting`).
Parts: `trace_run` (one run on `standins`), `recorder` and `storage_log` (events of a run), `known`
(operations on tensors without data), `workspaces` and `measuring` (memory inside operations),
`summary` and `assemble` (events as a profile).
"""
