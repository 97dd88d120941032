"""One buffer, and tensors that are views of it: allocate, release, defragment.

In: a one-dimensional CPU tensor, and the sizes of tensors to place in it. Out: contiguous views at
offsets that the arena chooses, or that `plan_offsets` chose from known lifetimes; and statistics on
how fragmented the rest is.

The engine does not use arenas: blocks of weights take their bytes from the allocator's pool
(docs/architecture.md). It is a tool for people, for example for buffers of a fixed total size in a
loop of their own.
"""

from memfit.devices.buffer_arena import Arena, ArenaStatistics, plan_offsets

__all__ = ["Arena", "ArenaStatistics", "plan_offsets"]
