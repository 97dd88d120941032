"""Tools over tensors that know nothing of plans, homes or steps.

In: torch's tensors, modules' arguments, generators. Out: the tensors inside a value, random streams
that are the same in any order, the safetensors container, and errors for weights that are away.
"""
