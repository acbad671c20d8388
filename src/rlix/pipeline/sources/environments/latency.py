"""Simulated waiting: how long tools and sandboxes take, and how some of them never come back."""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

_Z99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Seconds, lognormal with the given median and 99th percentile; both 0 for no wait at all."""

    p50_s: float
    p99_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.p50_s <= self.p99_s or (self.p50_s == 0) != (self.p99_s == 0):
            raise ValueError(f"p50 {self.p50_s:g} s and p99 {self.p99_s:g} s: give 0 < p50 <= p99, or 0 for both")

    def scaled(self, factor: float) -> "Lognormal":
        return Lognormal(self.p50_s * factor, self.p99_s * factor)

    def draw(self, source: random.Random) -> float:
        """One wait. Draws exactly one variate, whatever the parameters."""
        z = source.gauss(0.0, 1.0)
        if self.p50_s == 0:
            return 0.0
        sigma = math.log(self.p99_s / self.p50_s) / _Z99
        return self.p50_s * math.exp(sigma * z)
