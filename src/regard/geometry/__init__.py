"""The geometry of a plan: its gradient as an advantage, its metric, and what follows from both.

A score s_j changes its own weight at the rate w_j/tau, where w = pi g'. The row's price changes with it, because the
row has to meet its marginal. Let u = dL/dp be the utility of each key to a loss, and kappa the slack of the marginal:
0 where the rows must sum to their mass, infinite where they are free. Then

    dL/ds_j = (w_j/tau) (u_j - b),    b = sum w u / (sum w + kappa)                            (policy_gradient)
    dp/ds = tau M,    M = tau^-2 (diag w - w w^T / (sum w + kappa))                            (potential_hessian)

b is a baseline, the average utility. M is the metric of the row: for KL it is the Fisher information of the scores, and
dL/ds = tau M u holds for every regularizer and marginal.

The functions of scores [..., Tk] (or [..., H, Tq, Tk], as in `regard.solve`) store the plan. The functions of queries
and keys never store it: O(T) memory. At temperature 0 the plan does not change with the scores, so all of them raise.
"""

from .natural import natural_attention as natural_attention
from .products import fisher_vector_product as fisher_vector_product
from .products import free_energy_hvp as free_energy_hvp
from .products import jvp as jvp
from .scores import advantage as advantage
from .scores import fisher as fisher
from .scores import natural_gradient as natural_gradient
from .scores import policy_gradient as policy_gradient
from .scores import potential_hessian as potential_hessian
from .scores import sampled_policy_gradient as sampled_policy_gradient
