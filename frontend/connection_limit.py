"""How many connections a process may hold: as many as it is told to, or as its descriptors allow.

Connections beyond the limit are of two kinds. A few surplus ones may still ask a short question, so that a probe is
answered on a server whose clients hold all it has; those beyond them hear that there are too many, and nothing is read.
Must not know what a connection says.
"""

from __future__ import annotations

import resource
from typing import Literal

#: Connections beyond the limit that are heard, each for one request.
NUM_SURPLUS = 32
#: Descriptors that are no connections: listeners, channels, logs, what a scrape of the metrics opens.
RESERVED_DESCRIPTORS = 96
#: Turns of the event loop for which a connection stays open that only hears there are too many; for each there must be descriptors.
_TURNS_OPEN = 3
#: Connections that are taken in one turn even if descriptors seem to be short.
_FEWEST_A_TURN = 8
#: Stands for the limit of descriptors where the system sets none.
_MOST_DESCRIPTORS = 1 << 20

Place = Literal["within", "surplus", "beyond"]


class ConnectionLimit:
    """One per listener. `num_refused` counts connections that were not heard."""

    def __init__(self, maximum: int) -> None:
        self.num_refused = 0
        self._maximum = maximum

    @property
    def maximum(self) -> int:
        """May change at run time; connections that are open stay so."""
        num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_descriptors == resource.RLIM_INFINITY:
            return self._maximum
        return max(1, min(self._maximum, num_descriptors - RESERVED_DESCRIPTORS - NUM_SURPLUS))

    @maximum.setter
    def maximum(self, value: int) -> None:
        self._maximum = value

    def num_to_take(self, num_open: int) -> int:
        """New connections for which there are descriptors in one turn of the event loop, also if none of them may stay."""
        num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_descriptors == resource.RLIM_INFINITY:
            num_descriptors = _MOST_DESCRIPTORS
        return max(_FEWEST_A_TURN, (num_descriptors - RESERVED_DESCRIPTORS - num_open) // _TURNS_OPEN)

    def place(self, num_open: int) -> Place:
        """What becomes of a connection with which `num_open` are open."""
        surplus = num_open - self.maximum
        if surplus <= 0:
            return "within"
        if surplus <= NUM_SURPLUS:
            return "surplus"
        self.num_refused += 1
        return "beyond"


def raise_descriptor_limit() -> None:
    """Sets the limit of descriptors as high as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
