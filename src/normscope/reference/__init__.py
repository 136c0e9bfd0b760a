"""What every normalization computes, in float64 NumPy, written straight from the formulas.

This is the truth that other code is checked against: it favours being obviously right over being fast, shares no
code with what it checks, and imports NumPy alone. A specification is read by the names of its fields.

How exact it is: statistics take two passes about a pivot near the mean, so that the centered elements are right to
a few ulp of float64 whatever the level of the input, and exactly 0 in a constant set. A sum over n elements adds up
to n ulp to a variance in the worst case, about sqrt(n) ulp as a rule; it runs in the order of the elements, so the
result is the same on every machine with IEEE arithmetic (whitening, which calls LAPACK, aside).
"""

from normscope.reference.forward import forward, statistics
from normscope.reference.gradient import jacobian, vjp
from normscope.reference.running import RunningState, update_running

__all__ = ["RunningState", "forward", "jacobian", "statistics", "update_running", "vjp"]
