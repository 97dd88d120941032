"""Measures what was predicted, and finds what should not be there.

In: allocators, the operating system, a job between steps. Out: peaks by phase (`meters`), the proof
and an error where a limit was passed (`proof`), and a report of tensors that survive from step to
step with the names of their holders (`census`).
"""
