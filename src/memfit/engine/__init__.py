"""Engine: executes a step with the user's own model, loss and autograd.

In: a lowered step, a model with hooks on its calls, blocks of weights with their homes. Out: one
step: forward and backward of every microbatch, gradients at home, updates. Also forward passes
outside of a step, for inference.
Parts: `engine` and `run` (the step), `frames` (saved tensors of one call: kept, recomputed,
selected or offloaded), `driven_run` (the user's own loop), `streaming` (weights outside of a step),
`caches` and `conversions` (models of transformers, which is never imported here).
"""
