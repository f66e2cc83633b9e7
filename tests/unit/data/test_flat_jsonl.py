"""Large files of flat text objects: arrow reads them like Python does, or is not used."""

import json
from pathlib import Path

import pandas as pd
import pytest

from nemo_rl_core.data.datasets import files
from nemo_rl_core.data.datasets.files import read_flat_jsonl, read_records
from nemo_rl_core.data.datasets.records import LazyRecords
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import DataError

ODD = ["", " a ", "ü€😀", '\u0000\u2028\n\t"\\/', "2020-01-01", "1e5", "null", "{}"]


def written(path: Path, lines: list[str], end: str = "\n") -> Path:
    path.write_bytes(end.join(lines).encode("utf-8", "surrogatepass"))
    return path


def test_texts_come_as_python_reads_them(tmp_path: Path) -> None:
    rows = [{"prompt": f"x{text}{n}", "answer": text} for n, text in enumerate(ODD * 3)]
    for ascii_only in (True, False):
        lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
        for end in ("\n", "\r\n", "\n\n  \n"):
            records = read_flat_jsonl(written(tmp_path / "rows.jsonl", lines, end))
            assert records is not None
            assert len(records) == len(rows)
            for _ in range(2):  # every pass reads the file again
                assert list(records) == rows


@pytest.mark.parametrize(
    "lines",
    [
        ['{"a": "x"}', '{"a": 1}'],
        ['{"a": 1}', '{"a": 2}'],
        ['{"a": "x"}', '{"b": "y"}'],
        ['{"a": "x"}', '{"a": null}'],
        ['{"a": "x"}', '{"a": "y", "b": "z"}'],
        ['{"a": "2020-01-01"}', '{"a": "2021-01-01"}'],  # a date to arrow
        ['{"a": ["x"]}'],
        ['{"a": {"b": "x"}}'],
        ['{"a": true}'],
        ['{"a": "x", "a": "y"}'],
        ['{"a": "x"}{"a": "y"}'],
        ['{"a": "x"}{"a": "y"}', ""],
        ['{"a":', '"x"}{"a": "y"}'],
        ['{"a": "x"}', "no JSON"],
        ['{"a": "x"}', '{"a": "y"'],
        ['{"a": "\\ud800"}'],
        ['{"a": "\ud800"}'],
        ['\ufeff{"a": "x"}'],
        ["[1]"],
        [""],
    ],
    ids=str,
)
def test_all_else_is_left_to_python(tmp_path: Path, lines: list[str]) -> None:
    assert read_flat_jsonl(written(tmp_path / "rows.jsonl", lines)) is None


@pytest.mark.slow
def test_a_late_line_of_another_kind_leaves_the_file_to_python(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{n} and more of it", "answer": "1"}) for n in range(200_000)]
    path = written(tmp_path / "rows.jsonl", [*lines, '{"prompt": "x", "answer": 1}'])
    assert path.stat().st_size > 2 * 2**22  # several of arrow's blocks
    assert read_flat_jsonl(path) is None
    with pytest.raises(DataError, match="line 200001"):
        list(read_records(written(path, [*lines, "no JSON"])))


def test_a_data_set_is_the_same_by_both_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"prompt": f"{n} + 1", "answer": str(n + 1)}) for n in range(3000)]
    path = written(tmp_path / "rows.jsonl", lines)

    by_python = DataModule.of(str(path))
    monkeypatch.setattr(files, "_LARGE", 0)
    assert isinstance(read_records(path), LazyRecords)
    by_arrow = DataModule.of(str(path))
    pd.testing.assert_frame_equal(by_arrow.train, by_python.train)
    pd.testing.assert_frame_equal(by_arrow.validation, by_python.validation)
    assert len(by_arrow.train) == 2850
