"""Planner: chooses the plan for a model, a machine and a limit, and explains the choice.

In: a model, an optimizer, a loss, a batch, wishes and a machine. Out: a plan with its prediction,
or the smallest limit that works. `planner.search` holds the search itself, without torch.
"""
