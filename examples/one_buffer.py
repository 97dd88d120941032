"""An arena: tensors in one buffer, released and defragmented while views of them stay valid.

Run: python examples/one_buffer.py
"""

from __future__ import annotations

import torch

from memfit.devices.buffer_arena import Arena, plan_offsets


def main() -> None:
    """Fragments a buffer, closes the holes, and then places buffers whose lifetimes are known."""
    arena = Arena(torch.zeros(1000))
    tensors = [arena.allocate(10, 10).fill_(index) for index in range(10)]
    column = tensors[7][:, 3]  # a view of a live tensor
    for tensor in tensors[::2]:
        arena.release(tensor)
    print(f"fragmentation {arena.statistics().fragmentation:.2f}")
    try:
        arena.allocate(500)
    except torch.OutOfMemoryError as error:
        print(error)
    print(f"moved {arena.defragment()} bytes, fragmentation {arena.statistics().fragmentation:.2f}")
    arena.allocate(500).fill_(-1.0)
    print(f"the view still reads {column[0].item():.0f}, the tensor {tensors[7][0, 0].item():.0f}")

    # (start, end, elements): live from start on and before end.
    lifetimes = [(0, 4, 300), (1, 2, 500), (2, 4, 400), (3, 4, 100)]
    offsets, capacity = plan_offsets(lifetimes)
    planned = Arena(torch.zeros(capacity))
    first = planned.allocate(300, offset=offsets[0])
    second = planned.allocate(500, offset=offsets[1])
    planned.release(second)
    third = planned.allocate(400, offset=offsets[2])
    print(f"{capacity} elements hold {sum(size for _, _, size in lifetimes)}: offsets {offsets}")
    assert first.storage_offset() != third.storage_offset()


if __name__ == "__main__":
    main()
