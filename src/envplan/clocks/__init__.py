"""Clocks as profiles, plans and the runtime write them: requests within an operation, rungs.

Enters: the text of a config, or a rung as JSON. Leaves: ClockRequests and Rungs.
Nodes that only follow a plan load this, so it imports the standard library and pydantic only;
everybody may import it.
"""

from envplan.clocks.pause import MIN_PAUSE_NS
from envplan.clocks.requests import MARK, PART_NAME, ClockRequest, parse_clock_requests
from envplan.clocks.rung import Rung

__all__ = ["MARK", "MIN_PAUSE_NS", "PART_NAME", "ClockRequest", "Rung", "parse_clock_requests"]
