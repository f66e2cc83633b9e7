"""`nemo-rl plan`, recipes that it plans, and refusals before a run."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from huggingface_hub import constants

from nemo_rl_core.config.model import ModelFromConfig, ModelFromWheel, TextModelFromConfig
from nemo_rl_core.errors import ConfigError, ModelError, ResourceError
from nemo_rl_core.planning.accelerators import ACCELERATORS, OWN
from tasks.cli.recipe.recipe_pipeline import pipeline_of
from tasks.local_run.preflight import preflight
from tasks.planning import gpu_plan
from tasks.planning.gpu_plan import config_of, plan_recipe, refuse_what_does_not_fit
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.ppo import PPORecipe
from tests.unit.planning.layouts import CONFIGS
from workflows import cli

GPU_RECIPES = {
    "grpo_1.5b_1gpu": "qwen2.5-1.5b",
    "grpo_7b_8gpu": "qwen2.5-7b",
    "dpo_8b_lora_1gpu": "llama-3.1-8b",
    "grpo_moe_30b_a3b_2nodes": "qwen3-30b-a3b",
    "grpo_70b_8nodes": "llama-3.1-70b",
}
PODS = {
    # 30.53e9 parameters of 4 bytes; 90 % of 130 GiB are more.
    "grpo_moe_30b_a3b_2nodes": "on Flyte: export takes 114 GiB of memory, its pod has 64; "
    "set weights: {memory: 130Gi} in deployment/pods.yaml",
    # 70.55e9 parameters of 4 and 2 bytes.
    "grpo_70b_8nodes": "on Flyte: prepare_model takes 394 GiB of disk, its pod has 200; "
    "set weights: {ephemeral-storage: 440Gi} in deployment/pods.yaml",
}
H100 = ACCELERATORS["nvidia-h100"]


def invoked(*arguments: object) -> Result:
    return CliRunner().invoke(cli.group, ["plan", *map(str, arguments)])


@pytest.mark.parametrize(("recipe", "model"), GPU_RECIPES.items())
def test_recipes_for_gpus_fit(recipe: str, model: str) -> None:
    result = invoked(recipe, "--model-config", CONFIGS[model])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[-2:] == ["fits the GPUs", PODS[recipe]] if recipe in PODS else lines[-1] == "fits"
    assert "trained tokens/s" in result.output


@pytest.mark.parametrize(("recipe", "message"), PODS.items())
def test_pods_too_small_for_a_model_are_named(recipe: str, message: str) -> None:
    model = CONFIGS[GPU_RECIPES[recipe]]
    assert invoked(recipe, "--model-config", model).output.splitlines()[-1] == message
    result_json = json.loads(invoked(recipe, "--model-config", model, "--json").output)
    assert (result_json["pod_problems"], result_json["fits"]) == ([message], True)


def test_a_run_on_a_cluster_with_such_pods_is_refused(tmp_path: Path) -> None:
    shutil.copy(CONFIGS["llama-3.1-70b"], tmp_path / "config.json")
    arguments = ["grpo", "grpo_70b_8nodes", f"model.name={tmp_path}", "--remote"]
    refused = CliRunner().invoke(cli.group, ["run", *arguments])
    assert refused.exit_code == 2
    assert "the pods of this cluster are too small for the model" in refused.output
    assert PODS["grpo_70b_8nodes"] in refused.output


def test_the_suggested_change_makes_a_recipe_fit(tmp_path: Path) -> None:
    """Adds the suggested settings to the same command, and expects a recipe that fits."""
    recipe = tmp_path / "grpo_mine.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "recipe": "grpo_7b_8gpu",
                "training": {"activation_checkpointing": False},
                "grpo": {"max_tokens_per_microbatch": 16384},
                "generation": {"gpu_memory_utilization": 0.9},
            }
        )
    )
    model = ["--model-config", CONFIGS["qwen2.5-7b"]]
    refused = invoked(recipe, *model)
    assert refused.exit_code == 1
    *_, training, sampling, fix = refused.output.splitlines()
    assert training.startswith("grpo_iteration: training needs 1")
    assert "of its 79.0 GiB, 93% can be used" in training
    assert sampling.startswith("grpo_iteration: sampling needs ")
    changes = fix.removeprefix("the smallest change that fits: ").split(" ")
    assert changes == [
        "training.activation_checkpointing=true",
        "generation.gpu_memory_utilization=0.7",
    ]
    assert invoked(recipe, *changes, *model).output.splitlines()[-1] == "fits"
    # Neither is enough by itself.
    assert all(invoked(recipe, each, *model).exit_code == 1 for each in changes)


def test_json_has_every_figure() -> None:
    model = CONFIGS["qwen2.5-7b"]
    result = invoked("grpo_7b_8gpu", "--model-config", model, "--json")
    result_json = json.loads(result.output)
    assert [stage["name"] for stage in result_json["stages"]] == ["grpo_iteration", "evaluate"]
    stage = result_json["stages"][0]
    assert stage["gib"]["weights"] == pytest.approx(3.55, abs=0.01)
    assert stage["speed"]["transfer"]["goal_seconds"] == pytest.approx(2.0, rel=0.01)
    assert (result_json["fits"], result_json["change"], result_json["accelerator"]["name"]) == (
        True,
        None,
        "nvidia-h100",
    )
    assert result_json["never_run"] == ["several ranks over NCCL"]


def test_shorter_completions_reduce_the_time_of_a_step() -> None:
    arguments = ["grpo_7b_8gpu", "--model-config", CONFIGS["qwen2.5-7b"]]
    longest, mean = (
        json.loads(invoked(*arguments, *more, "--json").output)["stages"][0]["speed"]
        for more in ([], ["--mean-tokens", 600])
    )
    # Prompts have 1,024 tokens, completions 600 instead of 5,120.
    trained = mean["training_seconds"] / longest["training_seconds"]
    assert trained == pytest.approx(1624 / 6144, rel=0.01)
    # The last completions are decoded one at a time.
    assert 600 / 5120 < mean["rollout_seconds"] / longest["rollout_seconds"] < 0.3
    shown = invoked(*arguments, "--mean-tokens", 600).output
    assert "seconds/step  " in shown
    assert "at most" not in shown.split("expected")[1]
    assert invoked(*arguments, "--mean-tokens", 0).exit_code == 2


def test_another_accelerator_can_be_planned_for() -> None:
    arguments = ["grpo_7b_8gpu", "--model-config", CONFIGS["qwen2.5-7b"], "--accelerator"]
    small = invoked(*arguments, "nvidia-rtx-4090")
    assert small.exit_code == 1
    assert "8 x nvidia-rtx-4090 of 23.5 GiB" in small.output
    unknown = invoked(*arguments, "nvidia-h1000")
    assert unknown.exit_code == 2
    assert "there is no accelerator 'nvidia-h1000'" in unknown.output


def test_the_local_gpu_is_read_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA L40S, 46068'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    model = CONFIGS["qwen2.5-1.5b"]
    result = invoked("grpo_1.5b_1gpu", "--model-config", model, "--accelerator", OWN)
    assert "1 x nvidia-l40s of 44.5 GiB" in result.output


def test_a_recipe_without_a_gpu_cannot_be_planned() -> None:
    result = invoked("grpo_arithmetic")
    assert result.exit_code == 2
    assert "nemo-rl plan grpo_arithmetic cluster.shape=one_gpu" in result.output
    assert invoked("grpo_arithmetic", "cluster.shape=one_gpu").exit_code == 0


def test_the_pipeline_follows_from_name_base_or_section(tmp_path: Path) -> None:
    based, bare, unclear = (tmp_path / name for name in ("mine.yaml", "own.yaml", "no.yaml"))
    based.write_text("recipe: post_train_arithmetic\n")
    bare.write_text("dpo: {num_pairs_per_step: 4}\n")
    unclear.write_text("seed: 1\n")
    assert pipeline_of("reward_model_arithmetic", cli.PIPELINES) == "reward_model"
    assert pipeline_of(str(based), cli.PIPELINES) == "post_train"
    assert pipeline_of(str(bare), cli.PIPELINES) == "dpo"
    bare.write_text("sft: {num_steps: 5}\ndistillation: {num_iterations: 1}\n")
    assert pipeline_of(str(bare), cli.PIPELINES) == "distill"
    bare.write_text("sft: {num_steps: 5}\n")
    assert pipeline_of(str(bare), cli.PIPELINES) == "sft"
    with pytest.raises(ConfigError, match="not clear which pipeline"):
        pipeline_of(str(unclear), cli.PIPELINES)
    assert invoked(unclear, "cluster.shape=one_gpu", "--pipeline", "sft").exit_code == 0


def recipe(kind: Any, **sections: Any) -> Any:
    gpus = {"shape": "one_gpu", "accelerator": "nvidia-h100"}
    values = {"model": {"name": "org/model"}, "cluster": gpus, **sections}
    return kind.model_validate(values)


def named(kind: Any, **sections: Any) -> dict[str, Any]:
    config = json.loads(CONFIGS["qwen2.5-1.5b"].read_text())
    plan = plan_recipe(recipe(kind, **sections), H100, model_config=config)
    return {stage.load.name: stage for stage in plan.stages}


def test_every_stage_of_a_pipeline_is_planned() -> None:
    assert list(named(PostTrainRecipe)) == [
        "train_reward_model",
        "dpo_iteration",
        "grpo_iteration",
        "sample_pairs",
        "evaluate",
    ]
    assert list(named(GRPORecipe, sft={})) == ["train_sft", "grpo_iteration", "evaluate"]


def test_references_and_critics_are_planned_by_algorithm() -> None:
    parts = {
        "kl": named(GRPORecipe)["grpo_iteration"].memory.parts,
        "no kl": named(GRPORecipe, grpo={"loss": {"kl": None}})["grpo_iteration"].memory.parts,
        "ppo": named(PPORecipe)["ppo_iteration"].memory.parts,
        "dpo": named(DPORecipe)["dpo_iteration"].memory.parts,  # cached by a stage before
        "kto": named(DPORecipe, dpo={"loss": {"kind": "kto"}})["dpo_iteration"].memory.parts,
        "sft": named(GRPORecipe, sft={})["train_sft"].memory.parts,
    }
    assert {name for name, each in parts.items() if "reference" in each} == {"kl", "ppo", "kto"}
    assert {name for name, each in parts.items() if "critic" in each} == {"ppo"}
    assert "KV cache" in parts["ppo"]
    assert "KV cache" not in parts["dpo"]


def test_the_scalar_head_has_no_logits() -> None:
    stages = named(PostTrainRecipe)
    assert "logits" not in stages["train_reward_model"].memory.parts
    assert "logits" in stages["dpo_iteration"].memory.parts


def test_sections_without_a_folder_have_a_generated_config(tmp_path: Path) -> None:
    from nemo_rl_core.converters.materialize import materialize

    for model in (ModelFromConfig(), TextModelFromConfig(hidden_size=64, num_heads=4)):
        made = tmp_path / model.kind
        number = materialize(model, made, seed=0)
        config = config_of(model)
        written = json.loads((made / "config.json").read_text())
        assert {name: written[name] for name in config} == config
        assert gpu_plan.sizes_of(config).num_parameters == number
    wheel = ModelFromWheel(kind="wheel", name="m", package="m==1")
    with pytest.raises(ModelError, match="before it is installed"):
        config_of(wheel)


def test_a_hub_name_is_read_from_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--org--model"
    snapshot = folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text(CONFIGS["qwen2.5-7b"].read_text())
    from huggingface_hub import hf_hub_download

    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda name, file, revision: hf_hub_download(
            name, file, revision=revision, cache_dir=tmp_path
        ),
    )
    assert config_of(recipe(GRPORecipe).model)["hidden_size"] == 3584
    with pytest.raises(ModelError, match="'org/other' cannot be fetched") as refused:
        config_of(recipe(GRPORecipe, model={"name": "org/other"}).model)
    assert "--model-config FILE" in str(refused.value)


def on_gpus(folder: Path, **sections: Any) -> GRPORecipe:
    """A recipe of a 7 B model whose folder only has its config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(CONFIGS["qwen2.5-7b"].read_text())
    base = {"recipe": "grpo_7b_8gpu", "model": {"name": str(folder), "dtype": "bfloat16"}}
    return GRPORecipe.model_validate({**base, **sections})


def test_a_run_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    refuse_what_does_not_fit(on_gpus(tmp_path / "a"))
    one_gpu = on_gpus(tmp_path / "a", cluster={"num_workers": 1}, generation={"num_engines": 1})
    with pytest.raises(ResourceError, match="does not fit 1 x nvidia-h100") as refused:
        refuse_what_does_not_fit(one_gpu)
    assert "training needs 1" in str(refused.value.got)
    assert "cluster.num_workers=" in str(refused.value.fix)


def test_float8_is_refused_on_gpus_that_lack_it(tmp_path: Path) -> None:
    training = {"float8": "rowwise"}
    refuse_what_does_not_fit(on_gpus(tmp_path / "a", training=training))
    cluster = {"accelerator": "nvidia-a100-80gb"}
    recipe = on_gpus(tmp_path / "a", training=training, cluster=cluster)
    with pytest.raises(ConfigError, match="nvidia-a100-80gb cannot compute the recipe") as refused:
        refuse_what_does_not_fit(recipe)
    assert "leave training.float8 out" in str(refused.value.fix)
    plan = plan_recipe(recipe, ACCELERATORS["nvidia-a100-80gb"])
    assert plan.problems == plan.refused and len(plan.refused) == 1
    assert list(map(str, plan.change or ())) == ["training.float8=none"]


@pytest.mark.usefixtures("on_this_machine")
def test_preflight_refuses_a_plan_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl_core.distributed import resources
    from tasks.local_run import preflight as module

    monkeypatch.setattr(resources, "_count_here", lambda _: 64)  # of GPUs, too
    monkeypatch.setattr(
        module, "check_pretrained", lambda _, **_options: None
    )  # without a tokenizer
    one_gpu = on_gpus(tmp_path / "a", cluster={"num_workers": 1}, generation={"num_engines": 1})
    with pytest.raises(ResourceError, match="does not fit"):
        preflight({"config": one_gpu})


def test_uncertain_misfits_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu = on_gpus(tmp_path / "a", cluster={"num_workers": 1}, generation={"num_engines": 1})
    with caplog.at_level(logging.WARNING):
        (tmp_path / "a" / "config.json").unlink()
        gpu_plan._sizes_of_section.cache_clear()
        refuse_what_does_not_fit(one_gpu)
    assert "memory was not planned: the config.json of the model cannot be read" in caplog.text
    monkeypatch.setattr(gpu_plan, "own_accelerator", lambda: None)
    unknown = one_gpu.replace(cluster={"shape": "one_gpu"})
    caplog.clear()
    refuse_what_does_not_fit(unknown)
    assert caplog.text == ""


def test_the_page_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[4] / "docs" / "planning.md").read_text()
    model = ["--model-config", CONFIGS["qwen2.5-7b"]]
    assert invoked("grpo_7b_8gpu", *model).output.strip() in page
    larger = ["training.activation_checkpointing=false", "grpo.max_tokens_per_microbatch=16384"]
    *_, problem, fix = invoked("grpo_7b_8gpu", *larger, *model).output.splitlines()
    assert f"{problem}\n{fix}\n" in page
    seventy = invoked("grpo_70b_8nodes", "--model-config", CONFIGS["llama-3.1-70b"]).output
    assert "4.1 s by cuda_ipc; goal 10.0 s, bound of the links 0.59 s" in seventy
    assert "| 70 B on eight machines | CUDA IPC on each GPU | 4.1 s | 10 s | 0.6 s |" in page


@pytest.mark.slow
def test_estimates_and_uncounted_parts_are_printed(tmp_path: Path) -> None:
    other = {**json.loads(CONFIGS["qwen2.5-1.5b"].read_text()), "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps({**other, "head_dim": 128}))
    rewarded = ["environment={kind: reward_model, model: org/rm}"]
    environment = ["evaluation.environment={kind: exact}", *rewarded]
    arguments = ["grpo_1.5b_1gpu", *environment, "--model-config", tmp_path / "config.json"]
    shown = invoked(*arguments).output
    assert "activations are an estimate for the model type gemma2" in shown
    assert "not counted: the reward model org/rm" in shown
    judge = tmp_path / "judge"
    judge.mkdir()
    shutil.copy(CONFIGS["qwen2.5-1.5b"], judge / "config.json")
    named = f"environment={{kind: llm_judge, judge: {{kind: model, model: {judge}SHARE}}}}"
    others = ["evaluation.environment={kind: exact}", "--model-config", judge / "config.json"]
    counted = invoked("grpo_1.5b_1gpu", named.replace("SHARE", ""), *others).output
    assert "not counted" not in counted
    lines = {line[:25].strip(): line.split()[-1] for line in counted.splitlines() if line}
    assert lines["scorer"] == f"{0.5 * H100.memory_gib:.1f}"
    assert "peak while scoring" in lines
    large = named.replace("SHARE", ", gpu_memory_utilization: 0.9")
    refused = invoked("grpo_1.5b_1gpu", large, *others)
    assert refused.exit_code == 1
    assert "grpo_iteration: scoring needs" in refused.output
    assert "the smallest change that fits: environment.judge.gpu_memory_u" in refused.output
    of_its_own = named.replace("SHARE", ", placement: {own: 2}")
    larger = ["cluster={shape: cluster}", of_its_own, *others]
    lines = invoked("grpo_1.5b_1gpu", *larger).output.splitlines()
    assert " on 3 x nvidia-h100" in lines[0]
    assert f"{0.9 * H100.memory_gib + 2:.1f}" in next(
        line for line in lines if line.startswith("scorer on its own")
    )
    assert any("never run so far: models that score on dedicated GPUs" in line for line in lines)
    assert lines[-1] == "fits"
    refused = invoked("grpo_1.5b_1gpu", of_its_own)
    assert refused.exit_code == 2
    assert "set cluster.shape to cluster" in refused.output
    megatron = invoked("grpo_1.5b_1gpu", "training={backend: megatron}", *arguments[3:]).output
    assert "for the model type gemma2, the backend megatron" in megatron
    assert "training.backend: megatron does not support the model type gemma2" in megatron
