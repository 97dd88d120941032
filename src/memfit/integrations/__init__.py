"""Trainers and models of other libraries.

In: a host's trainer, made by the user. Out: the same trainer inside a memory limit (`transformers`,
`lightning`); each module imports its host; `import memfit` imports none of them.
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
