"""Builds models that are bigger than memory without their weights (deferred initialization).

In: a function that builds a model; perhaps a directory of safetensors files. Out: the model whose
large weights have no bytes, and sources that give each weight its values when its block moves in:
what its own initialisation computes, or what the files hold.
"""

from memfit.deferred.origin import Origin, build_empty, find_origins
from memfit.deferred.shards import WeightFiles

__all__ = ["Origin", "WeightFiles", "build_empty", "find_origins"]
