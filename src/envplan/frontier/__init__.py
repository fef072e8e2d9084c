"""The relaxed time-energy frontier of a pipeline: the lower bound that all plans stand above.

Enters: a pipeline and a profile. Leaves: the exact curve and its states, as a `Relaxation`.
Knows no plan; limits, plans and the search import it.
"""

from envplan.frontier.network import Network, build_network, network_events
from envplan.frontier.relaxation import BlockingPowerSource, Relaxation
from envplan.frontier.tracer import Progress

__all__ = [
    "BlockingPowerSource",
    "Network",
    "Progress",
    "Relaxation",
    "build_network",
    "network_events",
]
