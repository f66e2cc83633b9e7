"""Code blocks of the five documents of NeMo RL that define the API, and how each is tested.

Each file in `blocks/` is an unchanged block of a document, named by the number of the document and
the line of the block. Only the package is renamed, `nemo_rl` to `nemo_rl_core`. Tests provide the
names that blocks use and do not define (`batch`, `cluster`, `dataset`). Models and data sets of the
hub are folders with these relative names in the working directory (`make_folders`).

The documents are those of NeMo RL, under the Apache License 2.0:

- 000 and 001: the overview of the API, in two versions
- 002: the architecture guide
- 003: the components; a diagram and no code
- 004: models and policies
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

BLOCKS = Path(__file__).parent / "blocks"

DRAWINGS = {
    "002_L020": "the layers, drawn with box characters",
    "002_L128": "the flow of data, drawn with box characters",
    "002_L162": "marked as Python, but a call followed by a drawn tree of what it calls",
    "003_L001": "a Mermaid diagram of the components",
}
"""Blocks that are no code; `tests/unit/test_reference_drawings.py` checks what they show."""

MODELS = (
    "Qwen/Qwen2.5-1.5B",
    "llama2-7b",
    "llama3.1-8b",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-8B-Instruct",
)
"""Names of the models in the blocks."""

SUMS = [(a, b) for a in range(1, 9) for b in range(1, 9)]


def source(name: str) -> str:
    """Returns the text of a block, with the package name of this project."""
    (file,) = BLOCKS.glob(f"{name}.*")
    return re.sub(r"\bnemo_rl\b", "nemo_rl_core", file.read_text())


def run(name: str, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Runs a block.

    Args:
        name: Name of its file, without the suffix.
        names: Names that the block uses and does not define.

    Returns:
        All names after the block.
    """
    variables = {"__name__": f"block_{name}", **(names or {})}
    exec(compile(source(name), f"{name}.py", "exec"), variables)
    return variables


def make_folders(folder: Path, model: Path) -> None:
    """Makes the folders that the blocks name: one tiny model, and sums as data.

    Args:
        folder: Future working directory.
        model: Model folder in the transformers layout.
    """
    for name in MODELS:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(model, target_is_directory=True)
    math = [
        {
            "problem": f"{a}+{b}=",
            "generated_solution": str(a + b),
            "expected_answer": str(a + b),
            "problem_source": "augmented_gsm8k",
        }
        for a, b in SUMS
    ]
    plain = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    for name, rows in (("nvidia/OpenMathInstruct-2", math), ("my-dataset", plain)):
        (folder / name).mkdir(parents=True)
        pd.DataFrame(rows).to_parquet(folder / name / "train.parquet")
