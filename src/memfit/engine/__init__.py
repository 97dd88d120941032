"""Engine: executes a step with the user's own model, loss and autograd.

In: a lowered step, a model with hooks on its calls, blocks of weights with their homes. Out: one
step: forward and backward of every microbatch, gradients at home, updates. Also forward passes
outside of a step, for inference.
"""
