"""The tutorial as a notebook: current, and every cell of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.tutorial_notebook import notebook

PATH = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


def test_the_notebook_is_what_its_tool_writes() -> None:
    assert PATH.read_text(encoding="utf-8") == notebook()


def test_every_cell_of_the_notebook_runs() -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    document = nbformat.read(PATH, as_version=4)
    nbformat.validate(document)
    nbclient.NotebookClient(document, timeout=120, kernel_name="python3").execute()
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    shown = [output for cell in code for output in cell.outputs if "data" in output]
    kinds = {kind for output in shown for kind in output["data"]}
    assert {"text/html", "image/png"} <= kinds
