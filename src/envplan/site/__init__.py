"""Many jobs under one power budget, shared exactly.

Enters: jobs with their frontiers, and a budget over time. Leaves: a SitePlan, which plan each job
follows when, and what the next kilowatt is worth. Only the command line and `check` import it.
"""

from envplan.site.budget import Budget, read_budget
from envplan.site.jobs import SiteJob, read_jobs
from envplan.site.model import SitePlan
from envplan.site.plan import plan_site

__all__ = ["Budget", "SiteJob", "SitePlan", "plan_site", "read_budget", "read_jobs"]
