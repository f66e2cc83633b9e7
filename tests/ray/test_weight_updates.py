"""Weight transfers from real policies to real engines, including the loss of either end."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig, MegatronGenerationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync import link
from nemo_rl_core.distributed.weight_sync.link import WeightLink
from nemo_rl_core.distributed.weight_sync.routes import Location, current_location
from nemo_rl_core.distributed.worker_group import RayWorkerGroup
from nemo_rl_core.errors import WorkerLostError
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.models.policy import Policy

HF = HuggingFaceGenerationConfig(max_new_tokens=6, generate_timeout_seconds=60)
PROMPTS = BatchedDataDict(
    {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0], [3, 8, 3, 0]]),
        "input_lengths": torch.tensor([4, 2, 3]),
        "seeds": torch.arange(3),
    }
)
Named = dict[str, torch.Tensor]


def in_worker(group: RayWorkerGroup, function: Callable[[Any], Any]) -> list[Any]:
    """Returns the function's result for the backend of every worker, computed in its process."""
    return group.run_all_workers_single_data("__ray_call__", function)


def train_once(policy: Policy) -> None:
    ids = PROMPTS["input_ids"].repeat(2, 1)
    lengths = PROMPTS["input_lengths"].repeat(2)
    batch = {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": torch.arange(1, ids.shape[1]) < lengths[:, None],
        "sample_mask": torch.ones(len(ids)),
    }
    policy.train(BatchedDataDict(batch), NLLLoss())


def sent_by(policy: Policy) -> Named:
    def sent(backend: Any) -> Named:
        return {n: w.to(backend.sent_dtype, copy=True) for n, w in backend.named_weights()}

    return in_worker(policy.workers, sent)[0]


def weights_in_transformers(engine: Generation) -> list[Named]:
    """Returns the engine's weights without the head, which is the embedding."""
    weights = in_worker(engine._workers, lambda backend: dict(backend._model.state_dict()))
    assert all(
        each.pop("lm_head.weight").equal(each["model.embed_tokens.weight"]) for each in weights
    )
    return weights


def weights_in_megatron(engine: Generation) -> list[Named]:
    def full(backend: Any) -> Named:
        from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights

        return {name: weight.clone() for name, weight in iter_hf_weights(backend._models)}

    return in_worker(engine._workers, full)


def assert_equal(one: Named, other: Named) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def transport_of(engine: Generation) -> str:
    (spec,) = WeightLink.by_engine[engine._workers].specs.values()
    return spec.transport


def shared_page_bytes(policy: Policy) -> int:
    """Returns the bytes of the anonymous files that the trainer's processes map for receivers."""

    def count(_: Any) -> int:
        sizes = {}
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.is_symlink() and "memfd:weights" in str(descriptor.readlink()):
                status = descriptor.stat()
                sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    return sum(in_worker(policy.workers, count))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Checks that no new name remains in /dev/shm."""
    folder = Path("/dev/shm")
    before = {path.name for path in folder.iterdir()}
    yield
    new = {path.name for path in folder.iterdir()} - before
    assert [name for name in new if "weights" in name or name.startswith("torch_")] == []


def setup_with(setup: GenerationSetup, config: Any) -> GenerationSetup:
    return replace(setup, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("hf", marks=pytest.mark.thorough),
        "vllm",
        pytest.param("streaming", marks=pytest.mark.thorough),
    ],
)
def test_engine_weights_are_bitwise_identical_to_the_policys(
    kind: str,
    session: ClusterSession,
    generation_setup: GenerationSetup,
    make_policy: Callable[..., Policy],
    tmp_path: Path,
    nothing_left: None,
) -> None:
    policy = make_policy()
    for used_before in list(WeightLink.by_engine.values()):  # of other tests, with this trainer
        used_before.close()
    # Pages of engines that are gone, if any, are freed by the first transfer: see `mapped` below.
    if kind == "streaming":
        engine: Generation = StreamingGeneration(session, generation_setup)
    elif kind == "vllm":
        engine = Generation(session, generation_setup)
    else:
        engine = Generation(session, setup_with(generation_setup, HF), name="transformers")
    outputs = [engine.generate(PROMPTS, greedy=False)]
    for update in (1, 2):
        train_once(policy)
        engine.update_weights(policy)
        assert transport_of(engine) == "cuda_ipc" if torch.cuda.is_available() else "shared_memory"
        outputs.append(engine.generate(PROMPTS, greedy=False))
        if kind == "hf":
            assert_equal(weights_in_transformers(engine)[0], sent_by(policy))
        # The link and its pages serve every update.
        mapped = shared_page_bytes(policy)
        assert mapped == sum(-(-w.nbytes // 16) * 16 for w in sent_by(policy).values()), update
    assert not torch.equal(outputs[0]["logprobs"], outputs[1]["logprobs"])
    assert not torch.equal(outputs[1]["logprobs"], outputs[2]["logprobs"])
    # The same weights through a folder.
    policy.save_checkpoint(tmp_path)
    engine.load_weights(tmp_path / "model")
    again = engine.generate(PROMPTS, greedy=False)
    assert all(torch.equal(values, again[name]) for name, values in outputs[2].items())
    engine.shutdown()
    assert shared_page_bytes(policy) == 0


@pytest.fixture
def two_ranks(session: ClusterSession) -> Iterator[ClusterSession]:
    session.cluster.bundles()  # Ray runs
    with RayVirtualCluster(
        [2], use_gpus=False, num_cpus_per_bundle=0.1, max_colocated_worker_groups=2
    ) as cluster:
        spread = ClusterSession(cluster, num_threads=1)
        yield spread
        spread.shutdown()


def spread_policy(session: ClusterSession, folder: Path, training: Any) -> Policy:
    setup = TrainingSetup(
        model_folder=folder,
        optimizer=OptimizerConfig(learning_rate=0.03),
        max_tokens_per_microbatch=512,
        training=training,
    )
    return Policy(session, setup)


@pytest.mark.thorough
def test_two_ranks_fill_two_engines(
    two_ranks: ClusterSession, tiny_model: Path, generation_setup: GenerationSetup
) -> None:
    policy = spread_policy(two_ranks, tiny_model, DTensorTraining())
    config = HF.model_copy(update={"num_engines": 2})
    engine = Generation(two_ranks, setup_with(generation_setup, config))
    before = sent_by(policy)
    for _ in range(2):
        train_once(policy)
        engine.update_weights(policy)
        sent = sent_by(policy)
        assert not any(torch.equal(sent[name], before[name]) for name in sent)
        for weights in weights_in_transformers(engine):
            assert_equal(weights, sent)


@pytest.mark.thorough
def test_two_tensor_parallel_ranks_of_megatron_fill_two_others(
    two_ranks: ClusterSession, tiny_model: Path, generation_setup: GenerationSetup
) -> None:
    policy = spread_policy(two_ranks, tiny_model, MegatronTraining(tensor_parallel_size=2))
    config = MegatronGenerationConfig(max_new_tokens=6, tensor_parallel_size=2)
    engine = Generation(two_ranks, setup_with(generation_setup, config))
    before = sent_by(policy)
    train_once(policy)
    engine.update_weights(policy)
    sent = sent_by(policy)
    assert not any(torch.equal(sent[name], before[name]) for name in sent)
    for weights in weights_in_megatron(engine):
        assert_equal(weights, sent)


def die_while_receiving(backend: Any) -> None:
    """Kills the worker at the first tensor of the next transfer."""

    def take(tensors: Iterator[Any]) -> None:
        next(tensors)
        os.kill(os.getpid(), signal.SIGKILL)

    backend.take_weights = take


def die_while_sending(backend: Any) -> None:
    weights_to_send = backend.weights_to_send

    def some() -> Iterator[Any]:
        yield next(weights_to_send())
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    backend.weights_to_send = some


def stop_while_receiving(backend: Any) -> None:
    def take(tensors: Iterator[Any]) -> None:
        next(tensors)
        os.kill(os.getpid(), signal.SIGSTOP)

    backend.take_weights = take


@pytest.fixture
def engine(session: ClusterSession, generation_setup: GenerationSetup) -> Iterator[Generation]:
    config = HF.model_copy(update={"generate_timeout_seconds": 10})
    engine = Generation(session, setup_with(generation_setup, config), name="transformers")
    yield engine
    engine.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault",
    [
        die_while_receiving,
        pytest.param(stop_while_receiving, marks=pytest.mark.thorough),
    ],
)
def test_an_engine_that_is_lost_in_a_transfer_is_started_again(
    fault: Callable[[Any], None],
    engine: Generation,
    make_policy: Callable[..., Policy],
    nothing_left: None,
) -> None:
    policy = make_policy()
    engine.update_weights(policy)
    mapped = shared_page_bytes(policy)
    train_once(policy)
    in_worker(engine._workers, fault)
    engine.update_weights(policy)
    assert engine.num_restarts == 1
    assert_equal(weights_in_transformers(engine)[0], sent_by(policy))
    assert shared_page_bytes(policy) == mapped  # what the lost one had mapped is gone
    engine.update_weights(policy)
    assert engine.num_restarts == 1


@pytest.mark.thorough
def test_an_engine_that_died_between_two_transfers_is_started_again(
    engine: Generation, make_policy: Callable[..., Policy]
) -> None:
    policy = make_policy()
    engine.update_weights(policy)
    (pid,) = in_worker(engine._workers, lambda _: os.getpid())
    os.kill(pid, signal.SIGKILL)
    engine.update_weights(policy)
    assert engine.num_restarts == 1
    assert_equal(weights_in_transformers(engine)[0], sent_by(policy))


@pytest.mark.thorough
def test_a_trainer_that_is_lost_in_a_transfer_is_named_and_ends_it(
    session: ClusterSession,
    engine: Generation,
    make_policy: Callable[..., Policy],
    nothing_left: None,
) -> None:
    policy = make_policy()
    engine.update_weights(policy)
    in_worker(policy.workers, die_while_sending)
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match="worker 0 of 'training' died"):
        engine.update_weights(policy)
    assert time.monotonic() - start < 100
    assert engine.num_restarts == 0
    # The next stage begins with a new trainer and a new engine.
    session.discard("training")
    policy = make_policy()
    again = Generation(session, engine._setup, name="transformers")
    again.update_weights(policy)
    assert_equal(weights_in_transformers(again)[0], sent_by(policy))


def be_elsewhere(_: Any) -> None:
    """Patches the function that a worker's methods call, since Ray has bound the methods."""
    link.current_location = lambda: Location("another machine", None)


def be_here(_: Any) -> None:
    link.current_location = current_location


@pytest.mark.thorough
def test_an_engine_on_another_machine_is_reached_over_the_network(
    engine: Generation, make_policy: Callable[..., Policy]
) -> None:
    policy = make_policy()
    train_once(policy)
    in_worker(engine._workers, be_elsewhere)
    try:
        engine.update_weights(policy)
    finally:
        in_worker(engine._workers, be_here)
    assert engine.num_restarts == 0  # a new worker would be here again
    assert transport_of(engine) == "gloo"
    assert shared_page_bytes(policy) == 0
    assert_equal(weights_in_transformers(engine)[0], sent_by(policy))


@pytest.mark.thorough
def test_later_engines_and_policies_reuse_the_workers(
    session: ClusterSession, engine: Generation, make_policy: Callable[..., Policy]
) -> None:
    engine.update_weights(make_policy())
    policy = make_policy()
    train_once(policy)
    later = Generation(session, engine._setup, name="transformers")
    later.update_weights(policy)
    engine.update_weights(policy)
    assert_equal(weights_in_transformers(later)[0], sent_by(policy))
