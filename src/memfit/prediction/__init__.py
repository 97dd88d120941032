"""Prices a step before it runs: bytes at every operation, seconds, and bytes moved.

In: `Step` (`scheduling.lower`), `Hardware`. Out: `Timeline` (`predict`), the residents at its peak (`peak_report`)
and the check against a budget (`check_limits`). Nothing here imports torch.
"""

from memfit.prediction.predict import check_limits, predict
from memfit.prediction.residents import Resident, peak_report, residents_at

__all__ = ["Resident", "check_limits", "peak_report", "predict", "residents_at"]
