"""The code blocks of the five documents of NeMo RL that define the API, and how each is tested.

A file of `blocks/` is one block as its document has it, named by the document's number and the line
of its fence. Only the package is renamed, `nemo_rl` to `nemo_rl_core`. Blocks use names that they
do not define (`batch`, `cluster`, `dataset`): a test gives them. Models and data sets of the hub
are folders of those relative names in the working directory (`lay_out`).

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

NO_CODE = {
    "002_L020": "the layers, drawn with box characters",
    "002_L128": "the flow of data, drawn with box characters",
    "002_L162": "marked as Python, but a call followed by a drawn tree of what it calls",
    "003_L001": "a Mermaid diagram; its modules are in tests/unit/test_documented_names.py",
}
"""The blocks that nothing can run, each with its reason."""

MODELS = (
    "Qwen/Qwen2.5-1.5B",
    "llama2-7b",
    "llama3.1-8b",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-8B-Instruct",
)
"""Every name of a model in the blocks."""

SUMS = [(a, b) for a in range(1, 9) for b in range(1, 9)]


def source(name: str) -> str:
    """The text of a block, with this project's name of the package."""
    (file,) = BLOCKS.glob(f"{name}.*")
    return re.sub(r"\bnemo_rl\b", "nemo_rl_core", file.read_text())


def run(name: str, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Runs a block.

    Args:
        name: Of its file, without the suffix.
        names: That the block uses and does not define.

    Returns:
        All names after the block.
    """
    known = {"__name__": f"block_{name}", **(names or {})}
    exec(compile(source(name), f"{name}.py", "exec"), known)
    return known


def lay_out(folder: Path, model: Path) -> None:
    """Makes the folders that the blocks name: one tiny model, and sums as data.

    Args:
        folder: That becomes the working directory.
        model: In the transformers layout.
    """
    for name in MODELS:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(model, target_is_directory=True)
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
