"""Models that Megatron-Bridge builds, with a fake that has its signatures."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import WorkerError

pytestmark = [
    pytest.mark.experimental,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device"),
]
RANK_IMPORTS = "torch"  # before the fake is installed
RECORDED = json.loads((Path(__file__).parent / "megatron_bridge_0.3.1.json").read_text())
MISTRAL = MistralConfig(
    vocab_size=26,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    initializer_range=0.2,
    pad_token_id=0,
    sliding_window=None,
    # Not the base that Megatron uses if a config has none.
    rope_parameters={"rope_type": "default", "rope_theta": 50.0},
)
IDS = torch.randint(3, 26, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    mistral = saved(MISTRAL, tmp_path_factory.mktemp("mistral") / "model")
    load_tokenizer(tiny_model).save_pretrained(mistral)
    return mistral


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones otherwise
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def with_(config: Any, **changes: Any) -> Any:
    return type(config)(**{**config.to_dict(), **changes})


def set_up(folder: Path, training: dict[str, Any], fault: str | None = None) -> Any:
    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend
    from tests import fake_megatron_bridge

    fake_megatron_bridge.install(fault)
    backend = MegatronBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2),
            max_tokens_per_microbatch=24,
            training=MegatronTraining(**training),
            reference_folder=folder,
        )
    )
    return backend


def batch() -> Any:
    return collate(IDS.tolist(), [[False] + [True] * 11] * 2)


def trained(folder: Path, training: dict[str, Any], kept: Path) -> dict[str, Any]:
    from nemo_rl_core.algorithms.sft.loss import NLLLoss

    backend = set_up(folder, training)
    results = {"logprobs": backend.get_logprobs(batch()), "choices": backend.choices()}
    backend.train_step(batch(), NLLLoss())
    backend.save_checkpoint(kept)
    results["trained"] = backend.get_logprobs(batch())
    results["reference"] = backend.get_reference_logprobs(batch())
    return results


def transformers_logprobs(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        logprobs = model(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, IDS[:, 1:, None])[..., 0]


@pytest.mark.parametrize(
    ("num_ranks", "training"),
    [
        (1, {}),
        pytest.param(2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
        pytest.param(2, {"pipeline_parallel_size": 2}, marks=pytest.mark.thorough),
    ],
)
def test_unknown_type_is_trained_by_the_bridge(
    num_ranks: int, training: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    results = run_ranks(trained, folder, training, tmp_path / "step", world_size=num_ranks)
    for actual in results:
        torch.testing.assert_close(
            actual["logprobs"], transformers_logprobs(folder), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(actual["reference"], actual["logprobs"], rtol=0, atol=0)
        assert actual["choices"]["training.backend"] == "megatron, by megatron-bridge 0.3.1"
        after = transformers_logprobs(tmp_path / "step" / "model")
        torch.testing.assert_close(actual["trained"], after, rtol=0, atol=1e-5)
        assert (after - actual["logprobs"]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("version", r"expected: megatron-bridge 0\.3\.1.*\n.*got: 0\.2\.0"),
        ("import", "megatron-bridge 0.3.1 cannot be imported"),
        ("head", "expected: a head of type ColumnParallelLinear\n.*got: CappedHead"),
        ("rule", r"has weights that the model does not have(.|\n)*embed_tokens"),
        ("values", "changes weights of 'model' in a round trip(.|\n)*1 different weights"),
        ("epsilon", "computes different logprobs than 'model'"),
    ],
)
def test_wrong_bridge_is_refused(folder: Path, fault: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        run_ranks(set_up, folder, {}, fault, world_size=1)


@pytest.mark.parametrize(
    ("config", "training", "words"),
    [
        (with_(MISTRAL, sliding_window=8), {}, "got: sliding_window=8"),
        (
            with_(
                MISTRAL,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0},
            ),
            {},
            "got: rope_type=dynamic",
        ),
        (GPT2Config(vocab_size=26, n_embd=16, n_layer=1, n_head=2), {}, "got: rope_type=None"),
        (
            with_(MISTRAL, vocab_size=27),
            {"tensor_parallel_size": 2},
            "27 rows of the vocabulary cannot be divided",
        ),
        (MISTRAL, {"expert_parallel_size": 2}, "a model without experts"),
    ],
)
def test_model_that_the_bridge_cannot_train_is_refused(
    config: Any, training: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = saved(config, tmp_path / "model")
    with pytest.raises(WorkerError, match=words):
        run_ranks(set_up, model, training, world_size=2 if training else 1)


def generates(folder: Path) -> None:
    from nemo_rl_core.backends.generation.megatron import MegatronInferenceBackend
    from nemo_rl_core.config.generation import MegatronGenerationConfig
    from tests import fake_megatron_bridge

    fake_megatron_bridge.install()
    MegatronInferenceBackend().setup(
        GenerationSetup(
            model_folder=folder,
            config=MegatronGenerationConfig(),
            max_model_len=32,
            stop_token_ids=(2,),
        )
    )


def test_megatron_engine_refuses_bridge_models(folder: Path) -> None:
    with pytest.raises(WorkerError, match="the megatron engine cannot load 'model'"):
        run_ranks(generates, folder, world_size=1)


def differing_reference(folder: Path, other: Path) -> None:
    from nemo_rl_core.backends.training.megatron.reference import ReferenceWeights
    from tests import fake_megatron_bridge

    fake_megatron_bridge.install()
    ReferenceWeights([], folder, other)


def test_reference_with_different_computation_is_refused(folder: Path, tmp_path: Path) -> None:
    other = saved(with_(MISTRAL, rms_norm_eps=1e-3), tmp_path / "other")
    with pytest.raises(WorkerError, match="expected: the same rms_norm_eps"):
        run_ranks(differing_reference, folder, other, world_size=1)


def test_training_folder_is_not_converted_in_advance(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl_core.converters.megatron import hf_to_megatron, megatron_to_hf
    from nemo_rl_core.errors import ModelError

    families = "nemo_rl_core.backends.training.megatron.families"
    monkeypatch.setattr(f"{families}.bridge_version", lambda: "0.3.1")
    with pytest.raises(ModelError, match="got: a folder to train from"):
        hf_to_megatron(folder, tmp_path / "target")
    (tmp_path / "model").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "model")
    converters = "nemo_rl_core.converters.megatron"
    monkeypatch.setattr(f"{converters}.native_dtype", lambda _: "float32")
    with pytest.raises(ModelError, match="got: a folder without weights"):
        megatron_to_hf(tmp_path, tmp_path / "target")


def test_error_names_the_missing_package(folder: Path) -> None:
    from nemo_rl_core.backends.training.megatron.families import family_of
    from nemo_rl_core.errors import ModelError

    with pytest.raises(ModelError, match=r"install megatron-bridge==0\.3\.1"):
        family_of(folder)


def signatures_of_the_fake() -> dict[str, list[str]]:
    from tests import fake_megatron_bridge
    from tests.unit.backends.megatron.test_megatron_transformer_engine import signature_of

    fake_megatron_bridge.install()
    results = {}
    for name in RECORDED:
        module, _, path = name.partition(":")
        owner, method = path.split(".")
        results[name] = signature_of(getattr(getattr(import_module(module), owner), method))
    return results


def test_fake_has_the_recorded_signatures() -> None:
    assert run_ranks(signatures_of_the_fake, world_size=1) == [RECORDED]
