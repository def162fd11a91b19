"""What things cost here, measured: bytes per second each way on the link, seconds per prompt token at each length.

Starts from what workers measured in warm-up and follows what transfers and steps report. Nothing reads a
clock: every number arrives in a message, so a replay prices as the original did.
"""

from __future__ import annotations

#: Weight of the newest measurement of the link.
_LINK_WEIGHT = 0.1
#: How fast old prefill steps are forgotten, per step.
_FORGET = 0.98
#: A step tells what prefill costs if it has this many tokens and most of them belong to prompts.
_MIN_TOKENS = 32
_MIN_SHARE = 0.75


class LinkRate:
    """Bytes per second of one direction."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = max(bytes_s, 1.0)
        self.total_bytes = 0
        self.total_seconds = 0.0

    def measure(self, num_bytes: int, seconds: float) -> None:
        """A group of transfers took so long. Unmeasurably short ones count as bytes only."""
        self.total_bytes += num_bytes
        self.total_seconds += seconds
        if seconds > 0:
            self.bytes_s += _LINK_WEIGHT * (num_bytes / seconds - self.bytes_s)

    def seconds(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_s


class PrefillRate:
    """Seconds to compute n positions behind a context: a n + b n (mean context), fitted to the steps seen.

    Two numbers by least squares with forgetting: the linear layers cost `a` per position, attention `b` per
    position and position looked at. A fit that makes no sense (a negative number) falls back to the plain mean.
    """

    def __init__(self, tokens_s: float) -> None:
        per_token = 1.0 / max(tokens_s, 1e-9)
        self.per_token_s, self.per_pair_s = per_token, 0.0
        # Sums of x x, x y, y y, x t, y t, with x tokens and y pairs; the first measurement counts as one short step.
        first = float(_MIN_TOKENS)
        self._xx, self._xy, self._yy = first * first, 0.0, 0.0
        self._xt, self._yt = first * first * per_token, 0.0

    @property
    def tokens_s(self) -> float:
        """At the start of a prompt."""
        return 1.0 / self.per_token_s

    def measure(self, num_tokens: int, num_pairs: float, num_step_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` prompt positions, which looked at `num_pairs` positions in all."""
        if num_tokens < _MIN_TOKENS or num_tokens < _MIN_SHARE * num_step_tokens or seconds <= 0:
            return
        x, y = float(num_tokens), num_pairs
        self._xx = _FORGET * self._xx + x * x
        self._xy = _FORGET * self._xy + x * y
        self._yy = _FORGET * self._yy + y * y
        self._xt = _FORGET * self._xt + x * seconds
        self._yt = _FORGET * self._yt + y * seconds
        self._solve()

    def seconds(self, first: int, last: int) -> float:
        """To compute positions `first` to `last` (exclusive)."""
        num_tokens = max(0, last - first)
        return num_tokens * self.per_token_s + num_pairs(first, last) * self.per_pair_s

    def _solve(self) -> None:
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > 1e-6 * self._xx * self._yy:
            per_token = (self._xt * self._yy - self._yt * self._xy) / determinant
            per_pair = (self._yt * self._xx - self._xt * self._xy) / determinant
            if per_token > 0 and per_pair >= 0:
                self.per_token_s, self.per_pair_s = per_token, per_pair
                return
        self.per_token_s, self.per_pair_s = self._xt / self._xx, 0.0


def num_pairs(first: int, last: int) -> float:
    """How many positions the positions `first` to `last` (exclusive) look at, themselves included."""
    return max(0, last - first) * (first + last + 1) / 2
