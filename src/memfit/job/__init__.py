"""The job: what runs after `fit` and `infer`, step by step, with its limit, commits and saves. Also
what `fit` asks before there is a job: the machine, the problem, checks of arguments and plans.

In: a model, an optimizer and a plan. Out: steps that are whole or not at all, commits that survive
a crash, saves that other libraries read, and the proof that the limit was kept.
"""
