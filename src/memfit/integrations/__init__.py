"""Hosts that have a training loop of their own: what they need beside `job.lines()`.

In: a host's trainer, made by the user. Out: the same trainer inside a memory limit. Each module
imports its host; `import memfit` imports none of them.
"""

DECIDED_BY_HOSTS = (
    "lines",
    "max_grad_norm",
    "store",
    "resume",
    "durability",
    "scheme",
    "on_breach",
    "adapt",
    "weights",
    "weight",
    "split",
)
"""Keywords of `memfit.fit` that a host's own arguments decide."""
