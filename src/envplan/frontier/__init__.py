"""The relaxed time-energy frontier of a pipeline: the lower bound that all plans stand above."""

from envplan.frontier.network import Network, build_network
from envplan.frontier.relaxation import (
    BlockingPowerSource,
    Relaxation,
)
from envplan.frontier.walk import Progress

__all__ = [
    "BlockingPowerSource",
    "Network",
    "Progress",
    "Relaxation",
    "build_network",
]
