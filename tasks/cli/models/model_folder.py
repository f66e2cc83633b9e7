"""The model that an argument of a command names: a folder, or an artifact of the store."""

from pathlib import Path


def model_folder(name: str) -> Path:
    """Returns the transformers folder of a model.

    Args:
        name: A folder, the folder of an artifact around it, an artifact's id, the beginning of its
            id or content hash, or `alias:` and the name of an alias.

    Returns:
        A folder with config.json; `name` itself if it does not name an artifact with a model.
    """
    from nemo_rl_core.errors import StoreError
    from nemo_rl_core.history.database import path_of
    from nemo_rl_core.history.queries import History
    from nemo_rl_core.store.aliases import located
    from nemo_rl_core.store.store import Store

    name = located(name)
    folder, store = Path(name).expanduser(), Store.default()
    for found in (folder, folder / "model", store.artifacts / name / "model"):
        if (found / "config.json").is_file():
            return found
    if folder.exists() or not path_of(store).is_file():
        return folder
    with History(store) as history:
        try:
            artifact = history.find_artifact(name)
        except StoreError as error:
            if "several" in error.problem:
                raise
            return folder
    return Path(artifact.path) / "model"
