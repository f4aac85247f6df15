"""Attention as statistics: an estimate with its error bar, temperatures fitted to observed choices, evidence per row.

`estimate` treats the values that a query reads as noisy observations of one vector. Attention's output is the
maximum-likelihood estimate of that vector, and the spread of the values around it gives the error bar. `calibrate` fits
inverse temperatures beta in p_j ~ exp(beta s_j) to choices that were observed. `evidence` measures how far each row of
a plan is from the uniform one. `estimate` and `evidence` are one fused pass each and never store the plan.
"""

from .calibration import Calibration as Calibration
from .fitting import calibrate as calibrate
from .student import student_quantile as student_quantile
from .uniformity import Evidence as Evidence
from .uniformity import evidence as evidence
from .weighted_mean import Estimate as Estimate
from .weighted_mean import estimate as estimate
