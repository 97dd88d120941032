"""What a schedule costs before it runs: bytes at every action, seconds, and bytes moved.

In: `Schedule`, `Plan`, `Profile`, `Hardware`. Out: `Timeline` (`predict`), the residents at its peak (`peak_report`)
and the check against a budget (`check_limits`). Nothing here imports torch.
"""

from memfit.prediction.predict import check_limits, predict
from memfit.prediction.residents import Resident, peak_report, residents_at

__all__ = ["Resident", "check_limits", "peak_report", "predict", "residents_at"]
