"""Measures what was predicted: meters of devices and processes, peaks by phase, the proof.

In: allocators and the operating system. Out: bytes, and an error where a limit was passed.
"""
