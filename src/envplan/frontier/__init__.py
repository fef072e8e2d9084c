"""Tracing the time-energy frontier of a pipeline, and choosing frequencies along it."""

from envplan.frontier.trace import DEFAULT_BLOCKING_POWER_W, Frontier, trace_frontier

__all__ = ["DEFAULT_BLOCKING_POWER_W", "Frontier", "trace_frontier"]
