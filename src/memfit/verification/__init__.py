"""Measures what was predicted, and finds what should not be there.

In: allocators, the operating system, a job between steps. Out: peaks by phase and the proof
(`meters`), an error where a limit was passed, and a report of tensors that survive from step to
step with the names of their holders (`census`).
"""
