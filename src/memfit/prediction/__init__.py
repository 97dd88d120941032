"""Prices a step before it runs: bytes at every operation, seconds, and bytes moved.

In: `Step` (`scheduling.lower`), `Hardware`. Out: `Timeline` (`predict`), and the residents at its
peak (`peak_report`). Nothing here imports torch.
"""

from memfit.prediction.predict import predict
from memfit.prediction.residents import Resident, peak_report, residents_at

__all__ = ["Resident", "peak_report", "predict", "residents_at"]
