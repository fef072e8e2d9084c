"""The one exact engine: when operations run, and what they draw.

Enters: a pipeline, tables of options, a choice for each operation. Leaves: times and energies.
Knows no bound, no request and no plan; everything from frontier/ on may import it.
"""

from envplan.replay.engine import Ask, Machine, Parts, Problem, Replay, Rows, Search

__all__ = ["Ask", "Machine", "Parts", "Problem", "Replay", "Rows", "Search"]
