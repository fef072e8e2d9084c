"""From a plan to what every rank of a job sets its clock to, and the files that say so.

Enters: a plan and where ranks run; clocks in files of others. Leaves: frequency plans.
The runtime, serving, checks and the command line may import it.
"""
