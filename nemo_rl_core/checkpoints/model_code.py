"""Python code of a model (transformers' `auto_map`): its files, and the processes that may run it.

A process allows code by its digest, and starts workers with the allowed digests in their
environment. Only workers run the code. Other processes read what config.json says.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.checkpoints.hub import is_commit
from nemo_rl_core.errors import ModelError
from nemo_rl_core.store.files import hash_file
from nemo_rl_core.store.manifest import config_hash

_LOG = logging.getLogger(__name__)
_VARIABLE: Final = "NEMO_RL_MODEL_CODE"
"""Environment variable of workers: the digests of the code that they may run."""
_TOKENIZER: Final = "tokenizer_config.json"
_DESCRIPTIONS: Final = ("config.json", _TOKENIZER, "processor_config.json")
UNCHECKED: Final = (
    "the architecture, shapes of weights, memory, limits that are not in config.json, and layers "
    "for LoRA and tensor parallelism"
)
"""Properties of a model with code that are unknown until a worker runs it."""

_allowed: set[str] = set()


def code_files(folder: Path) -> dict[str, str]:
    """Returns the sha256 of each Python file of a model by its path; empty without `auto_map`.

    Hidden folders, such as a `.venv`, are left out.
    """
    if not any(_auto_map(folder, name) for name in _DESCRIPTIONS):
        return {}
    return {
        path.relative_to(folder).as_posix(): hash_file(path)
        for path in sorted(folder.rglob("*.py"))
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def has_tokenizer_code(folder: Path) -> bool:
    """Whether the tokenizer's class is in the model's code."""
    return bool(_auto_map(folder, _TOKENIZER)) and bool(code_files(folder))


def allow(files: Mapping[str, str], *, called: str) -> None:
    """Allows workers that start from now on to run the code, and logs its files.

    Args:
        files: Result of `code_files`.
        called: Name of the model in the message.
    """
    digest = config_hash(files)
    if files and digest not in _allowed:
        _LOG.warning(
            "workers run the Python code of %s: %s",
            called,
            ", ".join(f"{name} (sha256 {sha256[:12]})" for name, sha256 in files.items()),
        )
        _allowed.add(digest)


def worker_environment() -> dict[str, str]:
    """Returns the variables of a worker that may run the allowed code."""
    return {_VARIABLE: " ".join(sorted(_allowed))} if _allowed else {}


def code_digest(folder: Path) -> str | None:
    """Returns the digest of a model's code; None if it has none."""
    files = code_files(folder)
    return config_hash(files) if files else None


def is_trusted(folder: Path) -> bool:
    """Whether the model has code, and this process or its workers may run it."""
    return code_digest(folder) in _allowed | _runnable()


def runs_in_this_process(folder: Path) -> bool:
    """Whether this process is a worker that runs the model's code."""
    return code_digest(folder) in _runnable()


def code_options(folder: str | Path) -> dict[str, bool]:
    """Returns the options with which transformers loads a config or model from a folder.

    Raises:
        ModelError: If the model needs its code, and this process is not a worker that may run it.
    """
    path = Path(folder)
    digest = code_digest(path)
    if digest in _runnable():
        _forget_classes()
        return {"trust_remote_code": True}
    if digest in _allowed or _needs_code(path):
        raise not_run_here(path)
    return {"trust_remote_code": False}


def allow_or_refuse(folder: Path, *, trust: bool, name: str, revision: str | None = None) -> None:
    """Allows the code of a model that a user has named, unless `refuse_code` refuses it."""
    refuse_code(folder, trust=trust, name=name, revision=revision)
    if trust:
        allow(code_files(folder), called=f"the model {name!r}")


def refuse_code(folder: Path, *, trust: bool, name: str, revision: str | None = None) -> None:
    """Refuses a model whose code cannot be allowed; runs nothing.

    Without the option, a type that transformers has is loaded without the model's code, unless
    workers of this process may run it.

    Args:
        trust: The option `trust_remote_code`.
        name: Name of the model in the recipe or call.
        revision: Commit on the hub, if the user has named one.

    Raises:
        ModelError: If the code is needed or was trusted earlier, and the option is missing, or if
            it is not pinned, or in another repository.
    """
    files = code_files(folder)
    if not files and not _needs_code(folder):
        return
    if not trust:
        if is_trusted(folder):
            raise ModelError(
                f"the Python code of the model {name!r} was trusted earlier in this process",
                expected="trust_remote_code: true in each use of the model",
                got="no such option, although workers of this process would run the code",
                fix="pass the option, or use another process",
            )
        if _needs_code(folder):
            commit = f"revision: {folder.name}, " if folder.parent.name == "snapshots" else ""
            raise ModelError(
                f"the model {name!r} needs Python code that comes with it",
                expected="model.trust_remote_code: true, after you have read this code",
                got=", ".join(files or _references_of(folder)),
                fix=f"write model: {{name: {name}, {commit}trust_remote_code: true}} in a recipe; "
                f"in Python, train({{'name': {name!r}, 'trust_remote_code': True}}, ...) or "
                f"HuggingFacePolicy({name!r}, trust_remote_code=True); --trust-remote-code for "
                "nemo-rl serve",
            )
        return
    if elsewhere := [name for name in _references_of(folder) if "--" in name]:
        raise ModelError(
            f"the model {name!r} names code in another repository",
            expected="Python files in the model's folder",
            got=", ".join(elsewhere),
            fix="copy the Python files into a folder with the model, and remove the part before -- "
            "in auto_map",
        )
    if not Path(name).expanduser().is_dir() and "://" not in name and not is_commit(revision):
        raise unpinned(name, newest=folder.name, revision=revision)


def not_run_here(folder: Path) -> ModelError:
    """Returns the error for a process that needs a model's code and may not run it."""
    return ModelError(
        f"the Python code of the model {folder.name!r} is not run in this process",
        expected="a worker of a run with model.trust_remote_code: true",
        got=", ".join(code_files(folder) or _references_of(folder)),
        fix="train or evaluate it by a recipe with this option, or load it in a script with "
        "transformers and trust_remote_code=True",
    )


def refuse_conversion(folder: Path) -> None:
    """Refuses to convert a model with code: other programs compute what their own classes do."""
    if files := code_files(folder):
        raise ModelError(
            f"the model {folder.name!r} has Python code, which a conversion would leave out",
            expected="a model without auto_map in config.json",
            got=", ".join(files),
            fix="load it with transformers; if a class of transformers computes the same, remove "
            "auto_map and the Python files from a copy",
        )


def unpinned(name: str, *, newest: str = "COMMIT", revision: str | None = None) -> ModelError:
    """Returns the error for a hub model whose code has no commit."""
    return ModelError(
        f"the code of the hub model {name!r} has no pinned commit",
        expected="model.revision: the 40 hex digits of a commit whose code you have read",
        got=f"revision {revision!r}" if revision else "no revision",
        fix=f"write model: {{name: {name}, revision: {newest}, trust_remote_code: true}} in a "
        f"recipe, or revision={newest!r} in Python",
    )


def copy_code(source: Path, target: Path) -> None:
    """Copies the Python files of allowed code, so that transformers can load the copy."""
    if is_trusted(source):
        for name in code_files(source):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def described_config(folder: Path) -> Any:
    """Returns a model's config without running its code: for a model with code, its config.json."""
    from transformers import AutoConfig, PreTrainedConfig

    if not is_trusted(folder) and not _needs_code(folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    values = _read(folder / "config.json")
    if rope := values.get("rope_scaling"):
        values.setdefault("rope_parameters", {"rope_type": rope.get("type"), **rope})
    config = PreTrainedConfig.from_dict(values)
    config.model_type = str(values.get("model_type"))
    return config


def tokenizer_needs_code(folder: Path) -> bool:
    """Whether the tokenizer's class is only in the model's code."""
    settings = _read(folder / _TOKENIZER)
    if not settings.get("auto_map"):
        return False
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return tokenizer_class_from_name(str(settings.get("tokenizer_class"))) is None


def _needs_code(folder: Path) -> bool:
    config = _read(folder / "config.json")
    if config.get("auto_map"):
        from transformers import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            return True
    return tokenizer_needs_code(folder)


def _auto_map(folder: Path, name: str) -> Any:
    return _read(folder / name).get("auto_map")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):  # whoever needs the file reports it
        return {}
    return values if isinstance(values, dict) else {}


def _references_of(folder: Path) -> list[str]:
    return [name for each in _DESCRIPTIONS for name in _references(_auto_map(folder, each))]


def _references(auto_map: Any) -> list[str]:
    if isinstance(auto_map, str):
        return [auto_map]
    values = auto_map.values() if isinstance(auto_map, dict) else auto_map or ()
    return [reference for each in values for reference in _references(each)]


def _runnable() -> set[str]:
    return set(os.environ.get(_VARIABLE, "").split())


def _forget_classes() -> None:
    """Removes earlier models' code from transformers' tables.

    Otherwise a config class that is unchanged would select the model class of earlier code.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        classes = kind._model_mapping._extra_content
        for each in [key for key in classes if key.__module__.startswith("transformers_modules.")]:
            del classes[each]
