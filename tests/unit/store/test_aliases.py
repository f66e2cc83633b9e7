"""Movable names of models: in a store, in a shared folder, and on moto's S3 server."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nemo_rl_core.config.model import ModelFromConfig, PretrainedModel
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.environments.contents import located_model, model_content
from nemo_rl_core.errors import DataError, StoreError
from nemo_rl_core.maintenance.collect import make_plan, remove
from nemo_rl_core.maintenance.retention import RetentionPolicy
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.aliases import Aliases, located
from nemo_rl_core.store.store import Store
from tasks.local_run.preflight import preflight
from tasks.recipes.sft import SFTRecipe
from tests.workflows.flyte_backend.buckets import S3Bucket
from workflows import cli


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    monkeypatch.delenv("NEMO_RL_ALIASES", raising=False)
    return Store.default()


def exported(text: str) -> Path:
    """Creates an artifact with a placeholder for a model."""

    def work(folder: Path) -> StageResult:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"text": text}))
        return StageResult("model", "hf", text)

    return produce(StageInputs("export", {"text": text}), work)


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli.group, ["promote", *arguments])


def test_an_alias_moves_and_records_its_moves(store: Store) -> None:
    first, second = exported("first"), exported("second")
    aliases = Aliases(store)
    aliases.move("production", first.name)
    alias = aliases.move("production", str(second / "model"))
    assert (alias.current.model, alias.former and alias.former.model) == (second.name, first.name)
    assert located("alias:production") == str(second / "model")
    assert located("org/model") == "org/model"
    # A second time changes nothing; moving to the former model goes back.
    assert aliases.move("production", second.name).moves == alias.moves
    back = aliases.move("production", first.name)
    assert [move.model for move in back.moves] == [first.name, second.name, first.name]
    assert back.moves[0].since <= back.moves[1].since <= back.moves[2].since
    assert located("alias:production") == str(first / "model")


def test_a_moved_store_keeps_its_aliases(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Aliases(store).move("staging", exported("first").name)
    store.root.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "elsewhere"))
    assert located("alias:staging").startswith(str(tmp_path / "elsewhere"))


def test_an_alias_has_the_cache_key_of_its_model(store: Store) -> None:
    first, second = exported("first"), exported("second")
    named = PretrainedModel(name="alias:production")
    Aliases(store).move("production", first.name)
    by_alias = located_model(named)
    assert by_alias == located_model(PretrainedModel(name=str(first / "model")))
    before = model_content(by_alias)
    Aliases(store).move("production", second.name)
    assert model_content(located_model(named)) != before
    assert located_model(ModelFromConfig()) == ModelFromConfig()


def test_the_command(store: Store) -> None:
    first, second = exported("first"), exported("second")
    assert invoked().output == "no names: nemo-rl promote MODEL NAME\n"
    assert invoked(first.name, "staging", "production").exit_code == 0
    assert invoked(second.name, "staging").exit_code == 0
    assert invoked("staging", "production").exit_code == 0
    moves = {each["name"]: each["moves"] for each in json.loads(invoked("--json").output)}
    assert {name: moves[-1]["model"] for name, moves in moves.items()} == {
        "staging": second.name,
        "production": second.name,
    }
    shown = invoked("production").output.splitlines()
    assert shown[0].startswith(f"production      {second.name}  since 20")
    assert shown[1].strip().startswith(f"{first.name}  before, since 20")


def test_current_and_former_models_of_aliases_are_not_removed(store: Store) -> None:
    made = {text: exported(text) for text in ("oldest", "former", "current", "other")}
    for text in ("oldest", "former", "current"):
        Aliases(store).move("production", made[text].name)
    store.release()  # like at the end of a run
    policy, later = RetentionPolicy(keep_runs=0), time.time() + 60
    remove(store, policy, make_plan(store, policy, now=later), now=later)
    assert {text for text, folder in made.items() if folder.is_dir()} == {"former", "current"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "production"], "nothing is not an artifact with a model"),
        (["{first}", "Production!"], "'Production!' is not a valid name for an alias"),
        (["production"], "there is no alias 'production'"),
    ],
)
def test_invalid_promotions_are_refused(store: Store, arguments: list[str], message: str) -> None:
    first = exported("first")
    result = invoked(*(each.format(first=first.name) for each in arguments))
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert Aliases(store).names() == []


def test_a_missing_or_changed_model_is_named(store: Store, tmp_path: Path) -> None:
    first = exported("first")
    Aliases(store).move("a", first.name)
    first.rename(tmp_path / "aside")
    with pytest.raises(StoreError, match="the model of the alias 'a' is gone"):
        located("alias:a")
    with pytest.raises(StoreError, match="there is no alias 'b'") as refused:
        located("alias:b")
    assert refused.value.expected == "one of a"
    (store.root / "aliases" / "a.json").write_text("{")
    with pytest.raises(StoreError, match="the record of the alias 'a' cannot be read"):
        located("alias:a")


def test_concurrent_moves_are_all_recorded(store: Store) -> None:
    folders = [exported(str(number)) for number in range(8)]
    threads = [
        threading.Thread(target=Aliases(store).move, args=("production", each.name))
        for each in folders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moves = Aliases(store).get("production").moves
    assert {move.model for move in moves} == {folder.name for folder in folders}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Bucket]:
    with S3Bucket("127.0.0.1") as started:
        monkeypatch.setenv("AWS_ENDPOINT_URL", started.environment["FLYTE_AWS_ENDPOINT"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "its-secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield started


def uploaded(bucket: S3Bucket, folder: Path) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.write(f"made/{folder.name}/{path.relative_to(folder)}", path.read_bytes())
    return bucket.url(f"made/{folder.name}")


@pytest.mark.slow
def test_aliases_are_shared_through_an_object_store(
    store: Store, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = (uploaded(bucket, exported(text)) for text in ("first", "second"))
    monkeypatch.setenv("NEMO_RL_ALIASES", bucket.url("names"))
    assert invoked(first, "production").exit_code == 0
    assert invoked(f"{second}/model", "production").exit_code == 0
    # Another machine, whose store has neither artifact.
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "another"))
    assert located("alias:production") == f"{second}/model"
    former = Aliases(Store.default()).get("production").former
    assert former is not None
    assert former.model == first
    with pytest.raises(StoreError, match="cannot refer to a folder of this machine"):
        Aliases(Store.default()).move("staging", str(exported("third")))
    # Also before a run whose promotion would move the alias at its end.
    with pytest.raises(StoreError, match=r"take promotion\.name out"):
        preflight({"config": SFTRecipe.model_validate({"promotion": {"name": "staging"}})})
    with pytest.raises(DataError, match="there is nothing under"):
        Aliases(Store.default()).move("staging", bucket.url("made/none"))


@pytest.mark.slow
def test_a_model_of_an_object_store_is_the_same_model(
    store: Store, bucket: S3Bucket, tmp_path: Path
) -> None:
    """Weights downloaded from S3 are bitwise identical to the uploaded ones."""

    def work(folder: Path) -> StageResult:
        materialize(ModelFromConfig(), folder / "model", seed=3)
        return StageResult("model", "hf")

    folder = produce(StageInputs("export", {}), work)
    address = uploaded(bucket, folder)
    model = PretrainedModel(name=f"{address}/model")
    assert model_content(model).split()[1] == "objects"
    materialize(model, tmp_path / "again", seed=None)
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (folder / "model" / name).read_bytes()
