"""`python -m envplan.plan` writes the JSON Schema of plan.json anew."""

from envplan.plan.model import Plan

Plan.write_schema()
