"""Write the JSON Schemas of envplan's files anew, from their models: python -m tools.schemas."""

from __future__ import annotations

import json

from envplan._io.documents import Document
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.order_file import Order
from envplan.plan import Plan
from envplan.serving.apply import ServingApplied
from envplan.serving.plan import ServingPlan
from envplan.site import SitePlan

DOCUMENTS: tuple[type[Document], ...] = (
    Plan,
    FrequencyPlan,
    Order,
    ServingPlan,
    ServingApplied,
    SitePlan,
)


def json_schema(model: type[Document]) -> str:
    """The text of a model's JSON Schema file."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": draft, **model.model_json_schema()}, indent=2) + "\n"


if __name__ == "__main__":
    for model in DOCUMENTS:
        model.schema_file().write_text(json_schema(model))
