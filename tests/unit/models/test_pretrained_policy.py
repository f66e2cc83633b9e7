"""Policies by model name: the settings that their options map to; no worker starts."""

import logging

import pytest
import torch

from nemo_rl_core.algorithms import DPOTrainer, GRPOTrainer
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.distributed import RayVirtualCluster
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.models import HuggingFacePolicy, MegatronPolicy


def test_documented_options_map_to_settings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        policy = HuggingFacePolicy(
            "org/model",
            torch_dtype=torch.bfloat16,
            device_map="auto",
            trust_remote_code=True,
            load_in_8bit=False,
            load_in_4bit=True,
            learning_rate=1e-5,
        )
    options = policy.options()
    assert options["dtype"] == "bfloat16"
    assert options["learning_rate"] == 1e-5
    assert options["training"].weights == "4bit"
    assert options["training"].lora.rank == 16
    assert options["cluster"].num_workers == 1
    assert policy.model == PretrainedModel(name="org/model", trust_remote_code=True)
    assert not caplog.records


def test_megatron_options_map_to_settings() -> None:
    policy = MegatronPolicy(
        model_name="llama3.1-8b",
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        sequence_parallel=True,
        use_flash_attention=True,
    )
    training = policy.options()["training"]
    assert training.backend == "megatron"
    assert training.tensor_parallel_size == 2
    assert training.pipeline_parallel_size == 4
    assert training.sequence_parallel
    assert policy.options()["cluster"].num_workers == 8
    assert policy.options(RayVirtualCluster([8, 8]))["cluster"].num_workers == 16


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"lerning_rate": 1.0}, "no option 'lerning_rate'", "learning_rate"),
        ({"backend": "megatron"}, "no option 'backend'", "leave it out"),
        ({"torch_dtype": "float8"}, "is not valid", "change the named value"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "one type", "leave one of them out"),
    ],
)
def test_invalid_options_are_refused(options: dict, message: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HuggingFacePolicy("org/model", **options)
    assert fix in caught.value.fix


def test_a_missing_model_is_refused_at_the_first_call() -> None:
    policy = HuggingFacePolicy("no/such/model/anywhere")
    with pytest.raises(ModelError, match="'no/such/model/anywhere' cannot be loaded"):
        _ = policy.policy
    policy.shutdown()


def test_a_trainer_reads_a_policys_options() -> None:
    policy = HuggingFacePolicy("org/model", dtype="bfloat16", learning_rate=1e-5, seed=3)
    trainer = DPOTrainer(policy, RayVirtualCluster([4], use_gpus=False))
    assert trainer.model == "org/model"
    assert trainer.settings.dtype == "bfloat16"
    assert trainer.settings.seed == 3
    assert trainer.config.learning_rate == 1e-5
    assert trainer.settings.cluster.num_workers == trainer.session.cluster.world_size == 4
    cluster = RayVirtualCluster([2], use_gpus=False)
    assert DPOTrainer(HuggingFacePolicy("org/model", cluster)).session.cluster is cluster
    assert DPOTrainer(policy, num_pairs_per_step=7).config.num_pairs_per_step == 7
    with pytest.raises(ConfigError, match="no setting 'num_pairs'"):
        DPOTrainer(policy, num_pairs=7)
    DPOTrainer(HuggingFacePolicy("org/model", max_new_tokens=6))  # which `generate` reads
    with pytest.raises(ConfigError, match="no setting 'temperature'"):
        DPOTrainer(HuggingFacePolicy("org/model", temperature=0.5))


def test_generate_maps_its_sampling_options() -> None:
    sampling = {"do_sample": False, "top_p": 0.9, "eos_token_id": [2, 3], "pad_token_id": 0}
    policy = HuggingFacePolicy("org/model", max_new_tokens=6, **sampling)
    assert policy._options.sampling["temperature"] == 0
    assert policy._options.stop_token_ids == (2, 3)
    DPOTrainer(policy)  # samples nothing
    with pytest.raises(ConfigError, match="must be sampled, not greedy"):
        GRPOTrainer(HuggingFacePolicy("org/model", do_sample=False))
    with pytest.raises(ConfigError, match="no setting 'eos_token_id'"):
        GRPOTrainer(HuggingFacePolicy("org/model", eos_token_id=3))
