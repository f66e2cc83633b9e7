from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.data.loader import PromptLoader, load_frame, load_prompts, save_frame
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError

sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(0, 10**12), st.integers(1, 4))
def test_every_epoch_holds_every_row_once(size: tuple[int, int], seed: int, epochs: int) -> None:
    num_rows, batch_size = size
    loader = PromptLoader(range(num_rows), batch_size=batch_size, seed=seed)
    num_steps = -(-epochs * num_rows // batch_size)
    stream = [row for step in range(num_steps) for row in loader.batch(step)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(sizes, st.integers(0, 99), st.lists(st.integers(0, 500), min_size=1, max_size=5))
def test_batches_do_not_depend_on_earlier_steps(
    size: tuple[int, int], seed: int, steps: list[int]
) -> None:
    num_rows, batch_size = size
    used = PromptLoader(range(num_rows), batch_size=batch_size, seed=seed)
    for step in steps:
        fresh = PromptLoader(range(num_rows), batch_size=batch_size, seed=seed)
        batch = used.batch(step)
        assert batch == fresh.batch(step)
        assert len(batch) == batch_size


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    orders = {
        tuple(PromptLoader(range(20), batch_size=20, seed=seed).batch(epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25  # seed 0, epoch 1 is not seed 1, epoch 0


@pytest.mark.parametrize(("num_rows", "batch_size"), [(3, 4), (0, 1), (3, 0)])
def test_a_batch_the_data_cannot_fill_is_refused(num_rows: int, batch_size: int) -> None:
    with pytest.raises(DataError, match="more rows than"):
        PromptLoader(range(num_rows), batch_size=batch_size, seed=0)


FRAME = pd.DataFrame(
    {
        "id": ["a", "b"],
        "prompt": ["1+2=", "3+4="],
        "answer": ["3", "7"],
        "completion": ["3", "7"],
        "task": ["arithmetic"] * 2,
        "metadata": ["{}", '{"k": "\u00e9"}'],
    }
)


def test_frames_round_trip_and_equal_frames_are_equal_bytes(tmp_path: Path) -> None:
    first = save_frame(FRAME, tmp_path / "a").read_bytes()
    # The index is not part of a data set.
    second = save_frame(FRAME.set_axis([7, 9]), tmp_path / "b").read_bytes()
    assert first == second
    assert b"pandas" not in first
    pd.testing.assert_frame_equal(load_frame(tmp_path / "a"), FRAME)


def test_prompts_keep_the_order_and_every_field(tmp_path: Path) -> None:
    save_frame(FRAME, tmp_path)
    first, second = load_prompts(tmp_path, build_arithmetic_tokenizer())
    assert (first.id, first.text, first.answer, first.task) == ("a", "1+2=", "3", "arithmetic")
    assert first.token_ids == (1, 5, 14, 6, 17)  # bos 1 + 2 =
    assert second.metadata == '{"k": "\u00e9"}'


@pytest.mark.parametrize("content", [None, b"", b"PAR1 no parquet"])
def test_a_folder_without_readable_rows_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        load_frame(tmp_path)
