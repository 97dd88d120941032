"""A parameter server: some ranks hold the weights, the others push gradients and pull weights.

    with memfit.parameter_server.create(model, optimizer, staleness=1, limit="2GiB") as server:
        ...

In: `torchrun`, or a process group of the program's own; a model and an optimizer on each rank. Out:
`ParameterServer`. Weights, sums of gradients and optimizer states rest in any tier of the servers.
Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; bounded
staleness: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", section 2.
"""

from memfit.job.server import ParameterServer, create
from memfit.mesh.collectives import Pending

__all__ = ["ParameterServer", "Pending", "create"]
