"""Imports go one way: no circles, and a planning core without frameworks, drivers or pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import networkx as nx
import pytest

import envplan

#: From the first box to the last: nothing imports what stands in a later line.
LAYERS = [
    ["errors"],
    ["units", "cores", "_files", "_words", "quantities", "_notebook"],
    ["_tables", "_model"],
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


PACKAGE = Path(envplan.__file__).parent
BOXES = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """For each module those that it imports, within functions, too."""
    graph = grimp.build_graph("envplan", exclude_type_checking_imports=True, cache_dir=None)
    # An editable installation shows more folders of the checkout as if they were in the package.
    modules = {module for module in graph.modules if _box(module) in BOXES}
    return {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}


def test_no_module_imports_what_imports_it(imports: dict[str, set[str]]) -> None:
    graph = nx.DiGraph((module, other) for module, used in imports.items() for other in used)
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert circles == []


def test_boxes_import_only_earlier_boxes(imports: dict[str, set[str]]) -> None:
    level = {name: k for k, layer in enumerate(LAYERS) for name in layer}
    assert {_box(module) for module in imports} <= level.keys() | {"_kernel", "_serving", "schemas"}
    # Boxes of one line may use each other, as long as there is no circle.
    backwards = [
        (module, other)
        for module, used in imports.items()
        for other in used
        if level.get(_box(module), len(level)) < level.get(_box(other), -1)
    ]
    assert backwards == []


def _box(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def test_planning_loads_no_framework_driver_or_picture() -> None:
    code = (
        f"import sys, {', '.join(CORE)}\nprint([name for name in {OUTSIDE} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
