"""When a difference between statistics counts: beyond sampling error, and large enough to matter.

With many samples a harmless difference is significant too, and with few a large one is chance; so both are asked.
Needs neither torch nor NumPy, since rules import it.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.10
"""of the channels, and two of them where there are more than two, must differ beyond sampling error ..."""
SHIFT = 0.25
"""... and the means by more than this many standard deviations ..."""
LOG_VAR = 0.4
"""... or the variances by more than a factor of exp(0.4) = 1.5"""


@dataclass(frozen=True)
class Difference:
    """How far one set of statistics lies from another, over the live channels of a site."""

    share_mean: float
    """share of channels whose mean differs beyond sampling error"""
    share_var: float
    """the same for the variance"""
    shift: float
    """root mean square over channels of the difference of the means, in units of the denominator"""
    log_var: float
    """log of (batch variance + eps) / (stored variance + eps): of the median channel or of the mean ratio, whichever
    is nearer to 0. Sparse activations have heavy tails: in few samples most channels look too quiet and a few too
    loud, so either number alone strays, and to opposite sides; a true change of scale moves both."""
    channels: int
    """how many live channels there are"""

    def common(self, share: float) -> bool:
        """More channels than chance puts beyond sampling error."""
        return share > SHARE and round(share * self.channels) >= min(2, self.channels)


def matters(found: Difference) -> tuple[float, bool]:
    """The larger difference in units of its bound, and whether one is beyond both its bound and sampling error.

    Where one is, the size is that of the significant ones.
    """
    both = ((found.shift / SHIFT, found.share_mean), (abs(found.log_var) / LOG_VAR, found.share_var))
    proven = [effect for effect, share in both if found.common(share) and effect > 1]
    return (max(proven), True) if proven else (max(effect for effect, _ in both), False)
