"""Files of weights and optimizer states, written and read a piece at a time, and models built
without the bytes of their weights.

In: tensors wherever they rest (device, host, disk); a function that builds a model. Out: a
directory of safetensors that other programs load, complete or absent; and back (`writer`,
`reader`). For a model without bytes, the source of each weight: its own
initialisation or a file (`origin`, `weight_sources`). Nothing is pickled. Memory: two pieces of 2
MiB while writing, one while reading.
"""
