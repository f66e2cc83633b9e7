"""Publication of a model folder on the Hugging Face hub, or on a server with its API."""

from pathlib import Path
from typing import Any, Final

from nemo_rl_core.checkpoints.model_code import code_files
from nemo_rl_core.converters.folders import require_folder
from nemo_rl_core.errors import ModelError

_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "README.md", "*.gguf"]
_MESSAGE: Final = "Model of nemo-rl-flow"


def push_to_hub(model_folder: Path, repo: str, *, is_public: bool = False) -> str:
    """Uploads a model, its tokenizer and its card in one commit; returns the commit's URL.

    Args:
        model_folder: A transformers folder.
        repo: `OWNER/NAME`; created if it does not exist.
        is_public: Visibility for everyone, which an existing repository must already have.
    """
    import httpx2  # huggingface_hub's client
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    require_folder(model_folder, "config.json")
    if get_token() is None:
        raise ModelError(
            f"no token to write {repo!r} on {constants.ENDPOINT}",
            expected="a token with write access, in HF_TOKEN or from `hf auth login`",
            got="none",
            fix="create a token in your account settings there",
        )
    try:
        return _push(HfApi(), model_folder, repo, is_public=is_public)
    except HFValidationError as error:
        raise ModelError(
            f"{repo!r} is not a valid repository name", expected="OWNER/NAME", got=str(error)[:200]
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"{constants.ENDPOINT} refused to write {repo!r}",
            got=_first_line(error),
            fix="check the token's permissions and the owner's name; nothing was published unless "
            "a commit is named",
        ) from error
    except (httpx2.HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ModelError(
            f"{constants.ENDPOINT} cannot be reached",
            expected="a network, or HF_ENDPOINT with the address of a hub",
            got=_first_line(error),
            fix=f"push {model_folder} from a machine with a network: the folder is complete",
        ) from error


def _push(api: Any, folder: Path, repo: str, *, is_public: bool) -> str:
    from huggingface_hub import CommitOperationAdd

    api.create_repo(repo, private=not is_public, exist_ok=True)
    # The call above does not change an existing repository.
    if not is_public and not api.repo_info(repo).private:
        raise ModelError(
            f"the repository {repo!r} is public",
            expected="a private repository",
            got="one that everyone can see",
            fix="pass --public, or name another repository",
        )
    files = {path for pattern in _FILES for path in folder.glob(pattern)}
    names = {path.name for path in files} | code_files(folder).keys()
    operations = [CommitOperationAdd(name, folder / name) for name in sorted(names)]
    commit = api.create_commit(repo, operations, commit_message=_MESSAGE)
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
