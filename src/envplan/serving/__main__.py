"""Writes the JSON Schemas of serving's files anew: python -m envplan.serving"""

from envplan.serving.apply import ServingApplied
from envplan.serving.plan import ServingPlan

ServingPlan.write_schema()
ServingApplied.write_schema()
