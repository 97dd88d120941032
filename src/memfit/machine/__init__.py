"""Machines: this one, or one that is described in numbers.

In: the operating system, a device, files that describe hardware. Out: the limit of the process and
its room for tensors (`machine`), measured rates (`probing`), meters of memory (`meters`) and the
proof that a limit was kept (`proof`). `machine.host` reads and sets the operating system, without
torch.
"""
