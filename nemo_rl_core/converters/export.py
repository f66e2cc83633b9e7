"""Export of a checkpoint's model into a separate folder, with a load test."""

import shutil
from pathlib import Path

from nemo_rl_core.checkpoints.model_code import is_trusted
from nemo_rl_core.checkpoints.weights import as_published, load_pretrained
from nemo_rl_core.converters.folders import StoredWeights
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ModelError
from nemo_rl_core.store.files import hash_file


def export_model(source: Path, target: Path) -> int:
    """Copies `model/` of a checkpoint and loads the copy; returns the number of parameters."""
    shutil.copytree(source, target)
    for file in sorted(source.glob("*.safetensors")):
        if hash_file(file) != hash_file(target / file.name):
            raise ModelError(f"the copy of {file.name} differs from its source", fix="try again")
    if is_trusted(target):  # this process does not run the code of a model
        count: int = run_ranks(_checked_count, target, world_size=1)[0]
        return count
    return _checked_count(target)


def _checked_count(target: Path) -> int:
    from transformers import AutoModelForCausalLM

    model, _ = load_pretrained(AutoModelForCausalLM, target, source_name="the exported model")
    stored = StoredWeights(target)
    for name, tensor in as_published(model, model.state_dict().items()):
        if name in stored.names and not tensor.equal(stored.read(name).to(tensor.dtype)):
            raise ModelError(f"transformers loads tensor {name!r} with different values")
    return int(sum(parameter.numel() for parameter in model.parameters()))
