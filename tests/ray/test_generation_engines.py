"""Engines in Ray: documented names, several engines, bounds of rows, lost workers."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync.link import WeightLink
from nemo_rl_core.distributed.weight_sync.transport import LinkSpec
from nemo_rl_core.errors import ConfigError, WorkerLostError
from nemo_rl_core.models.generation import (
    HuggingFaceGeneration,
    MegatronGeneration,
    VllmConfig,
    VllmGeneration,
    VllmGenerationWorker,
)
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.types import Prompt
from tests.ray.ahead import worker_pid


@pytest.fixture
def batch(prompts: list[Prompt]) -> BatchedDataDict:
    lengths = [len(prompt.token_ids) for prompt in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = torch.tensor(prompt.token_ids)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor(lengths),
            "seeds": torch.arange(len(prompts)) + 900,
        }
    )


def sequences(output: BatchedDataDict) -> list[list[int]]:
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [ids[:end].tolist() for ids, end in zip(output["output_ids"], lengths, strict=True)]


def assert_equal(one: BatchedDataDict, other: BatchedDataDict) -> None:
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


def agree(one: BatchedDataDict, other: BatchedDataDict) -> bool:
    """Whether the tokens are equal, and the logprobs up to rounding."""
    return (
        sequences(one) == sequences(other)
        and torch.equal(one["truncated"], other["truncated"])
        and float((one["logprobs"] - other["logprobs"]).abs().max()) < 1e-4
    )


def test_rows_are_independent(engine: VllmGeneration, batch: BatchedDataDict) -> None:
    full = sequences(engine.generate(batch, greedy=False))
    for rows in (list(range(11, -1, -1)), [7], [3, 0, 5]):
        some = engine.generate(batch.select_indices(rows), greedy=False)
        assert sequences(some) == [full[row] for row in rows]


def test_stop_strings_and_bounds_of_rows(
    engine: VllmGeneration, batch: BatchedDataDict, tiny_model: Path
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    plain = engine.generate(batch, greedy=False)
    lengths, starts = plain["generation_lengths"].tolist(), batch["input_lengths"].tolist()
    long = [row for row, length in enumerate(lengths) if length > 3]
    stopped, cut = long[0], long[1]
    completion = sequences(plain)[stopped][starts[stopped] :]
    text = tokenizer.decode(completion, skip_special_tokens=True)
    stop_strings: list[list[str] | None] = [None] * len(starts)
    stop_strings[stopped] = [text[1]]
    most = torch.full((len(starts),), 99)
    most[cut] = 2
    limited = {**batch, "stop_strings": stop_strings, "max_new_tokens": most}
    output = engine.generate(BatchedDataDict(limited), greedy=False)
    expected = list(lengths)
    # Each token of this vocabulary is one character.
    expected[stopped], expected[cut] = text.index(text[1]) + 1, 2
    assert output["generation_lengths"].tolist() == expected
    truncated = plain["truncated"].clone()
    truncated[stopped], truncated[cut] = False, True
    assert torch.equal(output["truncated"], truncated)
    for ids, unlimited in zip(sequences(output), sequences(plain), strict=True):
        assert ids == unlimited[: len(ids)]


def test_special_tokens_are_stop_strings(engine: VllmGeneration, batch: BatchedDataDict) -> None:
    starts = batch["input_lengths"].tolist()
    plain = sequences(engine.generate(batch, greedy=False))
    completions = [ids[start:] for ids, start in zip(plain, starts, strict=True)]
    bos = 1
    ends = [ids.index(bos) + 1 if bos in ids else len(ids) for ids in completions]
    assert ends != list(map(len, completions))
    stopping = BatchedDataDict({**batch, "stop_strings": [["<bos>"]] * len(starts)})
    output = engine.generate(stopping, greedy=False)
    assert output["generation_lengths"].tolist() == ends


@pytest.mark.thorough
def test_all_kinds_of_engines_agree_for_any_weights(
    engine: VllmGeneration,
    session: ClusterSession,
    tiny_model: Path,
    batch: BatchedDataDict,
    make_policy: Callable,
) -> None:
    policy = make_policy()
    before = engine.generate(batch, greedy=True)
    train_once(policy, engine.generate(batch, greedy=False))
    engine.update_weights(policy)
    after = engine.generate(batch, greedy=True)
    assert not agree(before, after)
    for kind in (HuggingFaceGeneration, MegatronGeneration):
        other = kind(tiny_model, session, max_new_tokens=6, max_model_len=22)
        assert agree(other.generate(batch, greedy=True), before)
        other.update_weights(policy)
        assert agree(other.generate(batch, greedy=True), after)
        # Tokens of one kind are the same under equal seeds.
        drawn = other.generate(batch, greedy=False)
        assert_equal(other.generate(batch, greedy=False), drawn)
        other.shutdown()


def train_once(policy, output: BatchedDataDict) -> None:
    from nemo_rl_core.algorithms.sft.loss import NLLLoss

    ids, lengths = output["output_ids"], output["unpadded_sequence_lengths"]
    policy.train(
        BatchedDataDict(
            {
                "input_ids": ids,
                "input_lengths": lengths,
                "token_mask": torch.arange(1, ids.shape[1]) < lengths[:, None],
                "sample_mask": torch.ones(len(lengths)),
            }
        ),
        NLLLoss(),
    )


@pytest.mark.thorough
def test_a_killed_workers_batch_is_the_same(
    engine: VllmGeneration, batch: BatchedDataDict, make_policy: Callable
) -> None:
    policy = make_policy()
    train_once(policy, engine.generate(batch, greedy=False))
    engine.update_weights(policy)
    many = batch.select_indices([row for row in range(batch.size) for _ in range(40)])
    many["seeds"] = torch.arange(many.size)
    expected = engine.generate(many, greedy=False)
    pid = worker_pid(engine)
    # In the middle of the call: 480 rows are more than run at once.
    killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
    killer.start()
    output = engine.generate(many, greedy=False)
    killer.join()
    assert engine.num_restarts == 1
    assert worker_pid(engine) != pid
    assert_equal(output, expected)


@pytest.mark.thorough
def test_a_worker_that_is_lost_twice_ends_the_call(
    session: ClusterSession, generation_setup: GenerationSetup, batch: BatchedDataDict
) -> None:
    from nemo_rl_core.config.generation import HuggingFaceGenerationConfig

    # No engine answers that quickly.
    config = HuggingFaceGenerationConfig(max_new_tokens=6, generate_timeout_seconds=1e-4)
    engine = Generation(session, replace(generation_setup, config=config), name="stuck")
    with pytest.raises(WorkerLostError, match="did not answer in time"):
        engine.generate(batch, greedy=False)
    assert engine.num_restarts == 1
    engine.shutdown()


@pytest.mark.thorough
def test_a_stuck_worker_is_replaced(
    session: ClusterSession, generation_setup: GenerationSetup, batch: BatchedDataDict
) -> None:
    from nemo_rl_core.config.generation import HuggingFaceGenerationConfig

    config = HuggingFaceGenerationConfig(max_new_tokens=6, generate_timeout_seconds=30)
    engine = Generation(session, replace(generation_setup, config=config), name="stopped")
    expected = engine.generate(batch, greedy=False)
    os.kill(worker_pid(engine), signal.SIGSTOP)
    assert_equal(engine.generate(batch, greedy=False), expected)
    assert engine.num_restarts == 1
    engine.shutdown()


@pytest.fixture
def two_bundles(session: ClusterSession) -> Iterator[RayVirtualCluster]:
    session.cluster.bundles()  # Ray runs
    with RayVirtualCluster([2], use_gpus=False, num_cpus_per_bundle=0.1) as cluster:
        yield cluster


@pytest.mark.thorough
def test_documented_options_start_one_engine_per_bundle(
    two_bundles: RayVirtualCluster, tiny_model: Path, batch: BatchedDataDict
) -> None:
    config = VllmConfig(
        backend="vllm",
        model_name=str(tiny_model),
        max_new_tokens=6,
        temperature=0.7,
        top_p=1.0,
        top_k=1,
        pad_token_id=1,
        stop_token_ids=[],
        vllm_cfg={
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "gpu_memory_utilization": 0.2,
            "max_model_len": 22,
            "skip_tokenizer_init": True,
            "async_engine": False,
            "precision": "float32",
            "load_format": "auto",
        },
    )
    with pytest.raises(ConfigError, match="top_l"):
        VllmGeneration(two_bundles, {**config, "top_l": 3})
    generator = VllmGeneration(two_bundles, config)
    generator.prepare_for_generation()
    output = generator.generate(batch, greedy=False)
    generator.finish_generation()
    # Rows keep their order, whichever engine completed them.
    starts, width = batch["input_lengths"].tolist(), output["output_ids"].shape[1]
    for row, ids in enumerate(sequences(output)):
        assert ids[: starts[row]] == batch["input_ids"][row, : starts[row]].tolist()
        assert output["output_ids"][row, len(ids) :].tolist() == [1] * (width - len(ids))
    assert sequences(generator.generate(batch.slice(0, 1), greedy=False)) == [sequences(output)[0]]
    # The greedy token is the only most likely one.
    assert sequences(generator.generate(batch, greedy=True)) == sequences(output)
    # The way users of the documents call it: no seeds, no lengths.
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert generator.generate(plain, greedy=True)["output_ids"][0, :4].tolist() == [1, 2, 3, 4]
    generator.shutdown()


@pytest.mark.thorough
def test_an_actor_of_the_documented_worker_samples_like_the_engine(
    engine: VllmGeneration, tiny_model: Path, batch: BatchedDataDict, make_policy: Callable
) -> None:
    import ray

    worker = ray.remote(VllmGenerationWorker).options(num_cpus=0)
    actor = worker.remote(
        str(tiny_model), max_new_tokens=6, max_model_len=22, kv_cache_gib=1, max_num_seqs=64
    )
    columns = {name: batch[name] for name in ("input_lengths", "seeds")}

    def complete(*, greedy: bool) -> BatchedDataDict:
        return ray.get(actor.generate.remote(batch["input_ids"], greedy=greedy, **columns))

    drawn = complete(greedy=False)
    assert agree(drawn, engine.generate(batch, greedy=False))
    policy = make_policy()
    train_once(policy, drawn)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = LinkSpec(
        "127.0.0.1", store.port, 1, "shared_memory", timeout_seconds=600.0, token="secret"
    )
    received = actor.update_weights.remote(link)
    links = WeightLink.by_engine.values()
    others = [spec for each in links for spec in each.specs.values()]  # left out, they are closed
    assert policy.workers.run_single_worker("send_weights", link, others) == ray.get(received)
    engine.update_weights(policy)
    trained = complete(greedy=False)
    assert not agree(trained, drawn)
    assert agree(trained, engine.generate(batch, greedy=False))
    # Rows without lengths are full, and sample the same in every call.
    ids = batch["input_ids"][:2, :3]
    once, again = (ray.get(actor.generate.remote(ids)) for _ in range(2))
    assert once["output_ids"][:, :3].tolist() == ids.tolist()
    assert_equal(once, again)
    ray.get(actor.shutdown.remote())
    ray.kill(actor)


@pytest.mark.thorough
def test_an_engine_over_two_workers_samples_like_one(
    two_bundles: RayVirtualCluster,
    engine: VllmGeneration,
    tiny_model: Path,
    batch: BatchedDataDict,
    make_policy: Callable,
) -> None:
    expected = engine.generate(batch, greedy=False)
    names = {path.name for path in Path("/dev/shm").iterdir()}
    config = {
        "model_name": str(tiny_model),
        "max_new_tokens": 6,
        "gpu_memory_utilization": 0.2,
        "max_model_len": 22,
        "tensor_parallel_size": 2,
    }
    split = VllmGeneration(two_bundles, config)
    assert agree(split.generate(batch, greedy=False), expected)
    policy = make_policy()
    train_once(policy, expected)
    for either in (engine, split):
        either.update_weights(policy)
    trained = engine.generate(batch, greedy=False)
    assert not agree(trained, expected)
    assert agree(split.generate(batch, greedy=False), trained)
    # Both are called "generation"; each has a separate route from the one trainer.
    for either in (engine, split, engine):
        either.update_weights(policy)
    assert agree(engine.generate(batch, greedy=False), trained)
    # Nothing has a name under which it could remain, even while the engine runs.
    left = {path.name for path in Path("/dev/shm").iterdir()} - names
    assert [name for name in left if "cpushm" in name or "psm" in name] == []
    split.shutdown()
