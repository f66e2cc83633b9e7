"""A checkpoint's model as a folder of its own, proven to load."""

import json
import shutil
from pathlib import Path

from nemo_rl_core.errors import ModelError
from nemo_rl_core.infra.files import hash_file


def export_model(source: Path, target: Path) -> int:
    """Copies a transformers folder and loads the copy.

    Args:
        source: `model/` of a checkpoint.
        target: A folder that does not exist yet.

    Returns:
        The number of parameters.

    Raises:
        ModelError: If the copy does not load in transformers to exactly the weights of its files.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    shutil.copytree(source, target)
    for file in sorted(source.glob("*.safetensors")):
        if hash_file(file) != hash_file(target / file.name):
            raise ModelError(f"the copy of {file.name} differs from its source", fix="try again")
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    wrong = {kind: sorted(names) for kind, names in report.items() if names}
    if wrong:
        raise ModelError(
            "the exported model does not load completely in transformers",
            got=json.dumps(wrong, default=str)[:300],
        )
    state = model.state_dict()
    for file in sorted(target.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not state[name].equal(tensor.to(state[name].dtype)):
                raise ModelError(f"tensor {name!r} changed on the way through transformers")
    return int(sum(parameter.numel() for parameter in model.parameters()))
