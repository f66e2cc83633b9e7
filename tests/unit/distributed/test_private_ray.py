"""Ray's environment while it starts, without Ray's processes; `tests/ray/` has real ones."""

import os
from pathlib import Path

import pytest
import ray

from nemo_rl_core.distributed.private_ray import private_start, ray_folder
from nemo_rl_core.errors import ResourceError

TOKEN, MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ray.shutdown()  # a Ray of earlier tests would end this process once its token is forgotten
    for name in (TOKEN, MODE, "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def test_each_start_has_a_new_token_that_no_other_program_gets() -> None:
    from ray._private import ray_constants

    tokens = set()
    for _ in range(2):
        with private_start() as folder:
            tokens.add(os.environ[TOKEN])
            assert not ray_constants.ENABLE_RAY_CLUSTER
            os.environ[MODE] = "token"  # as `ray.init` does
        assert folder == ray_folder()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert TOKEN not in os.environ
        assert MODE not in os.environ
        assert ray_constants.ENABLE_RAY_CLUSTER
    assert sorted(map(len, tokens)) == [64, 64]


@pytest.mark.parametrize(("name", "value"), [(TOKEN, "mine"), (MODE, "disabled")])
def test_variables_of_the_user_are_kept(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with private_start():
        assert os.environ[name] == value
        assert os.environ.get(TOKEN) in (None, "mine")
    assert os.environ[name] == value


def test_open_folder_is_made_private_and_foreign_folder_refused(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = temporary / f"ray-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with private_start():
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(ResourceError, match="cannot be kept in") as caught, private_start():
        pass
    assert "set RAY_TMPDIR" in caught.value.fix
    assert TOKEN not in os.environ
