"""The engine: carries out a schedule with the user's own model, loss and autograd.

In: a schedule, a model whose calls are hooked, blocks of weights with their homes. Out: one step:
forward and backward of every microbatch, gradients on their way home, updates. Also forward passes
outside of a step, for inference.
"""
