"""The GPU check's parts: models sized for a device, plans, the work of each child process, the table.

In: a device. Out: one record for each part, and a table in Markdown. `benchmarks/gpu.py` runs them, each in a process of its own.
"""
