"""The limit sweep's parts: models, batches, optimizers and ways to train, drawn wider than the planner draws them.

In: a seed and a number. Out: a case as JSON says it, and what it stands for.
"""
