"""Jobs: `fit`, `infer` and `verify`, and the run that follows, step by step.

In: a model, an optimizer, a loss, a batch, a limit. Out: steps that are whole or not at all, under
the limit, with its proof; commits that survive a crash. `fit` decides and begins, `step_runner`
makes steps, `lines` serves the user's own loop, `server` a parameter server.
"""
