"""The sweep's parts: models of transformers made small, their natural batches, random plans, and the comparison with plain PyTorch.

In: a model type and a seed. Out: one outcome for each plan drawn. `benchmarks/sweep.py` runs them, each model in a process of its own.
"""
