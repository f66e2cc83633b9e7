"""Mistakes in recipe files are reported in a few lines, at once, and no file is half read."""

import os
import time
from pathlib import Path
from typing import Any

import click
import pytest
from flytekit.clis.sdk_in_container import run as pyflyte_run
from flytekit.interaction.click_types import JsonParamType

from nemo_rl_core.errors import ConfigError
from tasks.local_run.command_help import patch_recipe_options
from tasks.recipes.common import RecipeError
from tasks.recipes.recipe_file import read_recipe, with_base

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
WRONG: dict[str, tuple[str | bytes, str]] = {
    "a tab": ("grpo:\n\tnum_iterations: 1\n", "line 2: this is not YAML"),
    "two documents": ("seed: 1\n---\nseed: 2\n", "line 2: this is not YAML"),
    "an open bracket": ("seed: [1\n", "this is not YAML"),
    "a tag of Python": ("a: !!python/object/apply:os.system [ls]\n", "line 1: this is not YAML"),
    "an unknown alias": ("a: *b\n", "line 1: this is not YAML"),
    "latin-1": ("name: gr\xfcn\n".encode("latin-1"), "line 1: the file is not in UTF-8"),
    "utf-16": ("seed: 1\n".encode("utf-16"), "the file is not in UTF-8"),
    "binary": (b"\x00\x01\x02", "is not YAML"),
    "an alias to itself": ("a: &a [1, *a]\n", "line 1: the document has no end"),
    "a bomb of aliases": (BOMB, "the document has no end"),
    "5,000 levels": ("[" * 5000 + "]" * 5000, "nested too deeply"),
    "100 levels": ("[" * 100 + "]" * 100, "nested too deeply"),
    "a list": ("- 1\n", "is not a recipe"),
    "a word": ("hello\n", "is not a recipe"),
    "a key twice": ("seed: 1\ngrpo: {}\nseed: 2\n", "line 3: the key 'seed' appears twice"),
    "2^64": ("grpo:\n  num_steps_per_iteration: 18446744073709551616\n", "is too large"),
    "10^400": ("seed: 1" + "0" * 400 + "\n", "is too large"),
    "2 MiB": ("# " + "x" * 2**21, "is not a recipe"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_file_is_refused_in_a_few_lines(tmp_path: Path, name: str) -> None:
    content, expected_text = WRONG[name]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.process_time()
    with pytest.raises(ConfigError) as error:
        read_recipe(path)
    message = str(error.value)
    assert expected_text in message
    assert "mine.yaml" in message
    assert 2 <= len(message.splitlines()) <= 8
    assert len(message) < 1500
    assert time.process_time() - started < 5  # of a bomb of 10^10 values


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, got in {
        tmp_path: "a folder",
        tmp_path / "pipe": "a device, pipe or socket",
        Path("/dev/zero"): "a device, pipe or socket",
        tmp_path / "absent.yaml": "No such file",
        Path("x" * 5000): "File name too long",
    }.items():
        with pytest.raises(ConfigError, match=got):
            read_recipe(path)


@pytest.mark.parametrize("names", [["one"], ["one", "two"], ["one", "two", "three"]])
def test_recipes_that_begin_with_each_other_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        (tmp_path / f"{name}.yaml").write_text(f"recipe: {tmp_path / following}.yaml\n")
    with pytest.raises(ConfigError, match="form a circle") as error:
        with_base({"recipe": str(tmp_path / "one.yaml")})
    assert "one.yaml -> " in str(error.value)


def test_good_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    for text, values in {
        "": {},
        "# nothing\n": {},
        "seed: 1\n": {"seed": 1},
        '\ufeff{"seed": 1}': {"seed": 1},
        "a: &x {b: 1}\nc: *x\nd: *x\n": {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1}},
        "a: {b: 1}\nc: {b: 2}\n": {"a": {"b": 1}, "c": {"b": 2}},
        "base: &x {b: 1}\nd: {<<: *x, c: 2}\n": {"base": {"b": 1}, "d": {"b": 1, "c": 2}},
        f"seed: {2**63 - 1}\n": {"seed": 2**63 - 1},
    }.items():
        path.write_text(text)
        assert read_recipe(path) == values


def test_pyflyte_reads_files_this_way(tmp_path: Path) -> None:
    assert pyflyte_run is not None  # what a command of pyflyte has imported
    patch_recipe_options()
    parameter: Any = JsonParamType(dict)
    path = tmp_path / "mine.yaml"
    path.write_text(WRONG["a tab"][0].__str__())
    with pytest.raises(RecipeError, match="indent with spaces"):
        parameter._parse(str(path), None)
    with pytest.raises(RecipeError, match="a folder"):
        parameter._parse(str(tmp_path), None)
    with pytest.raises(RecipeError, match="No such file"):
        parameter._parse(str(tmp_path / "absent.yaml"), None)
    path.write_text("seed: 3\n")
    assert parameter._parse(str(path), None) == {"seed": 3}
    assert parameter._parse('{"seed": 3}', None) == {"seed": 3}
    with pytest.raises(click.BadParameter):
        parameter._parse("{seed: 3", None)
