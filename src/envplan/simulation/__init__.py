"""Plans as they run: one iteration, many replicas, replicas on unlike hardware.

Enters: plans and their profiles. Leaves: timelines, reports of clusters, Chrome traces.
Pictures, sweeps, checks and the command line may import it.
"""
