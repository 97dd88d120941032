"""Steps as data: built from decisions, lowered to operations, proven legal, priced in bytes and
seconds.

In: `Plan`, `Profile`, `Hardware`. Out: a `Schedule` (`build`), made by small passes over the order
of computing (`orders`); its meaning as a `core.step.Step` (`lower`), which the engine executes; the
proof that a step is legal, also one that a person edited (`check`); and a `Timeline` (`predict`)
from a simulation (`clock`) and sums of bytes (`bytes`). Nothing here imports torch.
"""
