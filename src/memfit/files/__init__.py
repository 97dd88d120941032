"""Weights and optimizer states as safetensors, written and read a piece at a time.

In: tensors wherever they rest (device, host, disk). Out: a directory that other programs load,
complete or not there at all; and back. Nothing is pickled. Memory: two pieces of 2 MiB while
writing, one while reading.
"""
