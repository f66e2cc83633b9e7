"""No file imports one that imports it back, at any depth, not even for types."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_two_files_import_each_other() -> None:
    graph = grimp.build_graph("nemo_rl_core", "tasks", "workflows", cache_dir=None)
    # A package's `__init__` re-exports names of its modules.
    packages = {module for module in graph.modules if graph.find_children(module)}
    files = graph.modules - packages
    imports = {
        file: graph.find_modules_directly_imported_by(file) - packages for file in sorted(files)
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"these files import each other: {' -> '.join(error.args[1])}")
