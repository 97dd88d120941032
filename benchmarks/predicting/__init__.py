"""The parts of `predictions.py` and `peers.py`: cases drawn from a seed, and one case measured.

In: a seed and a number. Out: a case as JSON says it; what was predicted of it and measured.
"""
