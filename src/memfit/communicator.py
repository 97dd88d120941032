"""Collectives between processes, on tensors and plain lists.

    communicator = memfit.communicator.create()
    communicator.allreduce([1, 2, 3], op=sum)

In: `torchrun`, or a process group of the program's own. Out: a `Communicator`.
"""

from memfit.mesh.collectives import Communicator, Pending, create

__all__ = ["Communicator", "Pending", "create"]
