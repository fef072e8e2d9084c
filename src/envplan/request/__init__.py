"""The request for a plan: deadline, limits, machine, run and effort, as one frozen value.

Enters: numbers from options, files and Python. Leaves: a checked Request.
Limits judge a replay; nothing here knows a plan. Everything from plan/ on may import it.
"""

from envplan.request.request import Deadline, Effort, Request

__all__ = ["Deadline", "Effort", "Request"]
