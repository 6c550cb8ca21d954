"""Every notebook runs from top to bottom, and has its outputs for readers who do not run it."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    """The folder is found: without it the tests below would pass for nothing."""
    assert {"quickstart", "cost_model", "scaling", "serving"} <= {notebook.stem for notebook in NOTEBOOKS}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    """A fresh kernel executes all cells; the reports and pictures come out."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # the notebook asks for its own devices
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
    complaints = "".join(output.text for output in shown if output.output_type == "stream" and output.name == "stderr")
    assert not complaints or (complaints.endswith("\r") and "\n" not in complaints)  # at most a progress line, wiped


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_its_outputs(path):
    """Every cell was run in order, with pictures and reports, and left no complaint and no path of the machine (`make notebooks`)."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {"text/html", "image/png"} <= {kind for output in outputs for kind in output.get("data", {})}
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    texts = [text for output in outputs for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt)/\S*", "\n".join(texts))
