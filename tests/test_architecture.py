"""Imports go one way: no circles, and a planning core without frameworks, drivers or pictures."""

from __future__ import annotations

import subprocess
import sys

import grimp
import networkx as nx
import pytest

#: From the first box to the last: nothing imports what stands in a later line.
LAYERS = [
    ["errors"],
    ["units", "_files", "_words", "quantities", "_notebook"],
    ["_documents", "_tables", "_model"],
    ["pipeline", "costs", "devices"],
    ["profile"],
    ["replay"],
    ["frontier", "noise"],
    ["limits"],
    ["request"],
    ["plan"],
    ["solve"],
    ["planners", "verify", "simulation", "frontier_file"],
    ["cluster", "replicas", "enforce", "chrome_trace"],
    ["profiling", "runtime", "plotting", "sweep", "serving", "check"],
    ["cli"],
]
CORE = ["envplan.solve", "envplan.planners", "envplan.verify", "envplan.simulation"]
OUTSIDE = ["torch", "pynvml", "matplotlib"]


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("envplan", exclude_type_checking_imports=True, cache_dir=None)


def test_no_module_imports_what_imports_it(imports: grimp.ImportGraph) -> None:
    graph = nx.DiGraph(
        (module, other)
        for module in imports.modules
        for other in imports.find_modules_directly_imported_by(module)
    )
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert circles == []


def test_boxes_import_only_earlier_boxes(imports: grimp.ImportGraph) -> None:
    level = {name: k for k, layer in enumerate(LAYERS) for name in layer}
    boxes = {module.split(".")[1] for module in imports.modules if "." in module}
    assert boxes - {"_kernel", "schemas"} <= level.keys() | {"profiles"}
    # Boxes of one line may use each other, as long as there is no circle.
    backwards = [
        (module, other)
        for module in imports.modules
        for other in imports.find_modules_directly_imported_by(module)
        if level.get(_box(module), len(level)) < level.get(_box(other), -1)
    ]
    assert backwards == []


def _box(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def test_planning_loads_no_framework_driver_or_picture() -> None:
    code = (
        f"import sys, {', '.join(CORE)}\n"
        f"print([name for name in {OUTSIDE} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
