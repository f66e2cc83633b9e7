"""User-defined environments that a recipe names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.multi_turn import PythonEnvironment
from nemo_rl_core.environments import register_environment
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.targets import ENVIRONMENTS, find_environment, module_of
from nemo_rl_core.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
LOOKUP = '''
"""Two turns: the policy asks for a price, and answers."""
import torch
from nemo_rl_core.environments.interfaces import EnvironmentReturn


class Prices:
    def __init__(self, prices, wrong=0.0):
        self.prices, self.wrong = prices, wrong

    def step(self, message_log_batch, metadata):
        texts = [log[-1]["content"].strip() for log in message_log_batch]
        looked_up = [about.get("looked_up", False) for about in metadata]
        right = [text == about["answer"] for text, about in zip(texts, metadata)]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": str(self.prices.get(text))} for text in texts
            ],
            metadata=[{**about, "looked_up": True} for about in metadata],
            next_stop_strings=[None] * len(texts),
            rewards=torch.tensor(
                [(1.0 if good else self.wrong) * done for good, done in zip(right, looked_up)]
            ),
            terminateds=torch.tensor(looked_up),
        )


def make(prices):
    return Prices(prices)


def broken(prices):
    raise LookupError("no prices today")


def reward(prompt, completion):
    return 1.0


def nothing():
    return 3


ready = Prices({"tea": 3})
number = 3


class Shop:
    def sell(self):
        pass
'''


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_shop", raising=False)
    (tmp_path / "my_shop.py").write_text(LOOKUP)
    return tmp_path


def episode(config: PythonEnvironment) -> tuple[str, float]:
    """Plays `tea`, then `3`; returns the first observation and the final reward."""
    scorer = make_scorer(config)
    assert isinstance(scorer, EnvironmentScorer)
    log = [{"role": "user", "content": "price of tea?"}, {"role": "assistant", "content": "tea"}]
    first = scorer.environment.step([log], [{"answer": "3", "task": "t"}])
    assert not first.terminateds[0]
    log += [first.observations[0], {"role": "assistant", "content": "3"}]
    last = scorer.environment.step([log], first.metadata)
    assert last.terminateds[0]
    return first.observations[0]["content"], float(last.rewards[0])


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("my_shop:Prices", {"prices": {"tea": 3}, "wrong": -1.0}),
        ("my_shop:make", {"prices": {"tea": 3}}),
        ("my_shop:ready", {}),
    ],
)
def test_a_class_a_function_and_an_object_play_two_turns(
    shop: Path, target: str, arguments: dict[str, Any]
) -> None:
    assert episode(PythonEnvironment(target=target, arguments=arguments)) == ("3", 1.0)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("my_shop:Price", {}, "did you mean 'Prices'"),
        ("no_shop:Prices", {}, "ModuleNotFoundError"),
        ("my_shop:Shop", {}, "the class Shop with sell"),
        ("my_shop:number", {}, "int with"),
        ("my_shop:Prices", {}, "missing a required argument: 'prices'"),
        ("my_shop:Prices", {"prices": {}, "price": 1}, "unexpected keyword argument 'price'"),
        ("my_shop:ready", {"prices": {}}, "is already an object"),
        ("my_shop:reward", {}, "use kind: function for a reward function"),
        ("unheard-of", {}, "an entry point of the group 'nemo_rl_core.environments'"),
    ],
)
def test_a_wrong_target_is_refused_without_making_anything(
    shop: Path, target: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_environment(PythonEnvironment(target=target, arguments=arguments))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("my_shop:broken", {"prices": {}}, "LookupError: no prices today (my_shop.py:"),
        ("my_shop:nothing", {}, "int with"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_the_reason(
    shop: Path, target: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_scorer(PythonEnvironment(target=target, arguments=arguments))
    assert message in str(caught.value)


def test_arguments_that_cannot_be_recorded_are_refused() -> None:
    for value in (object(), (1, 2), float("nan"), {1: "a"}):
        with pytest.raises(ValueError, match="JSON cannot record"):
            PythonEnvironment(target="my_shop:Prices", arguments={"prices": value})


def test_the_source_of_an_environment_is_part_of_the_key(shop: Path) -> None:
    config = PythonEnvironment(target="my_shop:Prices", arguments={"prices": {}})
    before = reward_content(config)
    assert before
    (shop / "my_shop.py").write_text(LOOKUP.replace('"""Two turns', '"""Another comment'))
    assert reward_content(config) == before
    (shop / "my_shop.py").write_text(LOOKUP.replace("1.0 if good", "2.0 if good"))
    assert reward_content(config) != before


def test_a_registered_environment_has_a_name(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_registered", {})
    monkeypatch.syspath_prepend(shop)
    from my_shop import Prices

    register_environment("prices")(Prices)
    config = PythonEnvironment(target="prices", arguments={"prices": {"tea": 3}})
    assert episode(config) == ("3", 1.0)
    assert module_of("prices") == "my_shop"
    with pytest.raises(ConfigError, match="expected: prices"):
        find_environment(PythonEnvironment(target="price"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Package in the layout of pip: modules, and metadata with an entry point."""
    site = tmp_path / "site"
    info = site / "shop_environments-1.2.dist-info"
    info.mkdir(parents=True)
    (site / "shop_environments").mkdir()
    (site / "shop_environments" / "__init__.py").write_text(LOOKUP)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-environments\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[nemo_rl_core.environments]\nshop = shop_environments:Prices\ngone = shop_gone:Prices\n"
    )
    (info / "RECORD").write_text("shop_environments/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    monkeypatch.delitem(sys.modules, "shop_environments", raising=False)
    return site


def test_an_installed_package_adds_an_environment(installed: Path) -> None:
    config = PythonEnvironment(target="shop", arguments={"prices": {"tea": 3}})
    assert module_of("shop") == "shop_environments"
    assert "shop_environments" not in sys.modules  # a plan imports no package
    content = reward_content(config)
    assert content
    assert episode(config) == ("3", 1.0)
    module = installed / "shop_environments" / "__init__.py"
    module.write_text(LOOKUP.replace("1.0 if good", "2.0 if good"))
    assert reward_content(config) != content


PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "shop-environments"
version = "1.2"
[project.entry-points."nemo_rl_core.environments"]
shop = "shop_environments:Prices"
"""


@pytest.mark.slow
def test_a_pip_package_can_be_used_in_a_recipe(tmp_path: Path) -> None:
    package, site = tmp_path / "package", tmp_path / "site"
    (package / "shop_environments").mkdir(parents=True)
    (package / "pyproject.toml").write_text(PROJECT)
    (package / "shop_environments" / "__init__.py").write_text(LOOKUP)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
    pip = [sys.executable, "-m", "pip", "install", "-q", *offline, str(package)]
    subprocess.run(pip, check=True, capture_output=True)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "price of tea?", "answer": "3"}\n')
    rows = {"kind": "file", "train": "rows.jsonl", "validation": "rows.jsonl"}
    custom = {"kind": "python", "target": "shop", "arguments": {"prices": {"3": "three"}}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"data": rows, "environment": custom}))
    done = subprocess.run(
        [Path(sys.executable).with_name("nemo-rl"), "try-reward", "recipe.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "environment python, shop" in done.stdout
    assert "0, then 'three'" in done.stdout


def test_a_broken_entry_point_is_refused(installed: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_environment(PythonEnvironment(target="gone"))
    assert "shop_gone:Prices, as its package declares" in str(caught.value)
    with pytest.raises(ConfigError, match="expected: gone, shop"):
        find_environment(PythonEnvironment(target="shopp"))
