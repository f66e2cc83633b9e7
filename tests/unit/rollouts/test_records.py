"""Rollouts are read back equal to what was written, for any content."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.batched_data_dict import InProcess, RemoteRows
from nemo_rl_core.errors import DataError
from nemo_rl_core.rollouts.records import RolloutRecords, load_rollouts, save_rollouts
from nemo_rl_core.types import Completion, Prompt, Rollout

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
IDS = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
CALL = st.fixed_dictionaries({"name": TEXT, "arguments": st.dictionaries(TEXT, FINITE)})
TURN = st.fixed_dictionaries(
    {"role": TEXT, "content": TEXT},
    optional={"reasoning_content": TEXT, "tool_calls": st.lists(CALL, max_size=2)},
)
NUMBERS = st.lists(FINITE, max_size=4).map(tuple)


@st.composite
def rollouts(draw):
    ids = draw(IDS)
    several = draw(st.booleans())
    size = len(ids)
    generated = draw(st.lists(st.booleans(), min_size=size, max_size=size)) if several else ()
    versions = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)) if several else ()
    logprobs = draw(st.lists(st.floats(-30, 0, width=32), min_size=size, max_size=size))
    failed = draw(st.booleans())
    return Rollout(
        Prompt(draw(TEXT), draw(TEXT), draw(IDS), draw(TEXT), draw(TEXT), draw(TEXT)),
        Completion(
            ids,
            tuple(logprobs),
            draw(st.booleans()),
            tuple(generated),
            tuple(versions),
            draw(st.integers(0, 9)),
        ),
        draw(TEXT),
        reward=None if failed else draw(st.floats(allow_nan=False, allow_infinity=False)),
        advantage=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        components=draw(NUMBERS),
        group=draw(st.integers(0, 2**40)),
        sample=draw(st.integers(0, 99)),
        turn_rewards=draw(NUMBERS),
        messages=tuple(draw(st.lists(TURN, max_size=3))),
        error=draw(TEXT) if failed else None,
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts(), max_size=4))
def test_rollouts_are_read_back_equal(tmp_path_factory, written):
    folder = tmp_path_factory.mktemp("records")
    save_rollouts(written, folder / "a.parquet")
    assert load_rollouts(folder / "a.parquet") == written
    save_rollouts(load_rollouts(folder / "a.parquet"), folder / "b.parquet")
    assert (folder / "a.parquet").read_bytes() == (folder / "b.parquet").read_bytes()


PROMPT = Prompt("p", "1+2=", (1, 2), "3", "t")
GOOD = Rollout(PROMPT, Completion((4, 5), (-0.5, -0.1), truncated=False), "3").scored(1.0)
BAD = GOOD.failed("out of paper")


def test_environment_metrics_are_stored_with_the_rollouts(tmp_path):
    records = RolloutRecords(tmp_path)
    records.save(1, [GOOD], environment_metrics={"won_fraction": 0.1})
    records.save(2, [GOOD])
    assert records.environment_metrics(1) == {"won_fraction": 0.1}
    assert records.environment_metrics(2) == {}
    assert records.load(1) == records.load(2) == [GOOD]


def test_advantages_belong_to_valid_rollouts(tmp_path):
    records = RolloutRecords(tmp_path / "rollouts")
    records.save(12, [GOOD, BAD, GOOD], advantages=torch.tensor([0.25, -2.0]))
    assert records.load(12) == [replace(GOOD, advantage=0.25), BAD, replace(GOOD, advantage=-2.0)]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        records.save(12, [GOOD, BAD], advantages=torch.tensor([0.25, -2.0]))


def test_logprobs_of_the_trainer_are_those_of_the_completion(tmp_path):
    """Value t of a row predicts token t + 1; rows are padded to the longest."""
    longer = replace(GOOD, prompt=replace(PROMPT, token_ids=(1, 2, 3)))
    logprobs = torch.tensor([[-9.0, -0.5, -0.125, -9.0], [-9.0, -9.0, -0.25, -0.75]])
    block = InProcess({"prev_logprobs": logprobs.numpy()[::-1]})
    remote = (
        RemoteRows.of_blocks([block], [2]).of_column("prev_logprobs").reordered(np.array([1, 0]))
    )
    records = RolloutRecords(tmp_path)
    for step, values in ((1, logprobs), (2, remote)):
        records.save(step, [GOOD, BAD, longer], trainer_logprobs=values)
        table = pq.read_table(tmp_path / f"step_{step:06d}.parquet")
        column = table["trainer_logprobs"]
        assert column.to_pylist() == [[-0.5, -0.125], [], [-0.25, -0.75]]
        assert column.type == pa.list_(pa.float32())
        assert records.load(step) == [GOOD, BAD, longer]


def test_messages_of_earlier_versions_are_read(tmp_path):
    RolloutRecords(tmp_path).save(1, [GOOD])
    table = pq.read_table(tmp_path / "step_000001.parquet")
    turns = [{"role": "user", "content": "1+2="}, {"role": "environment", "content": "no"}]
    index = table.column_names.index("messages")
    pq.write_table(
        table.set_column(index, "messages", pa.array([turns])), tmp_path / "step_000001.parquet"
    )
    assert RolloutRecords(tmp_path).load(1) == [replace(GOOD, messages=tuple(turns))]


def test_steps_are_listed_and_a_missing_one_is_named(tmp_path):
    records = RolloutRecords(tmp_path / "rollouts")
    assert records.steps() == []
    for step in (10, 2):
        records.save(step, [GOOD])
    assert records.steps() == [2, 10]
    with pytest.raises(DataError, match=r"no rollouts of step 3(.|\n)*from 2 to 10"):
        records.load(3)


def test_other_files_are_refused(tmp_path):
    import pandas as pd

    (tmp_path / "step_000001.parquet").write_text("no parquet")
    pd.DataFrame({"prompt": ["1+2="]}).to_parquet(tmp_path / "step_000002.parquet")
    records = RolloutRecords(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        records.load(1)
    with pytest.raises(DataError, match=r"not have all columns(.|\n)*completion_ids"):
        records.load(2)
