"""The user's own optimizer, run piece by piece.

In: a live `torch.optim.Optimizer` and the model's named parameters. Out: an `OptimizerDriver` that
applies exactly what `optimizer.step()` would have done (bit for bit) to a flat piece of one
parameter, tells which state tensors a parameter has before any exists, takes the states out of the
user's object and puts them back, and keeps that object truthful (`state_dict`, `load_state_dict`,
hooks, LR schedulers) while memfit owns the states.
"""

from memfit.optimizers.driver import OptimizerDriver
from memfit.optimizers.interception import AwayStates, OwnerCallbacks
from memfit.optimizers.standing import StandingPart
from memfit.optimizers.state_tensors import StateTensor
from memfit.optimizers.validation import UpdateKind, Verdict

__all__ = ["AwayStates", "OptimizerDriver", "OwnerCallbacks", "StandingPart", "StateTensor", "UpdateKind", "Verdict"]
