"""The metrics of a stage: one JSON line per step, robust against kills while writing."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import storage_errors, write_atomic
from nemo_rl_core.types import StepReport


class MetricsFile:
    """Appends step reports to a JSONL file with a single writer.

    A line counts once its newline is written; an incomplete last line of a killed process is
    ignored and overwritten by the next append.

    Example:
        >>> metrics = MetricsFile(folder / "metrics.jsonl")                    # doctest: +SKIP
        >>> metrics.truncate_after(40)            # resuming from the checkpoint of step 40
        >>> metrics.append(StepReport("train_sft", 41, 250, {"loss": 0.9}))
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, report: StepReport) -> None:
        """Appends a report and syncs the file.

        Raises:
            StoreError: If writing fails; the file is then unchanged.
        """
        values = {each.name: getattr(report, each.name) for each in fields(report)}
        line = json.dumps(values).encode() + b"\n"
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            with self.path.open("r+b") as file:
                end = _drop_incomplete_line(file)
                try:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)
                    raise

    def read(self) -> list[StepReport]:
        """Reads every complete report, in order; empty without a file."""
        return [
            self._parse(number, line) for number, line in enumerate(self._complete_lines(), start=1)
        ]

    def truncate_after(self, step: int) -> None:
        """Drops the reports of later steps, which a resumed run reports again; atomic."""
        if self.path.exists():
            lines = self._complete_lines()
            kept = [
                line
                for number, line in enumerate(lines, start=1)
                if self._parse(number, line).step <= step
            ]
            write_atomic(self.path, b"".join(line + b"\n" for line in kept))

    def _complete_lines(self) -> list[bytes]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return data[: _end_of_last_line(data)].split(b"\n")[:-1]

    def _parse(self, number: int, line: bytes) -> StepReport:
        try:
            return StepReport(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise StoreError(
                f"line {number} of {self.path} is damaged",
                expected="a JSON object with stage, step, num_steps, metrics and timings",
                got=repr(line[:80]),
                fix="remove that line",
            ) from error


def _drop_incomplete_line(file: BinaryIO) -> int:
    """Truncates after the last newline and seeks to the end; returns the length."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            end = _end_of_last_line(file.read())
            file.truncate(end)
    return file.seek(end)


def _end_of_last_line(data: bytes) -> int:
    return data.rfind(b"\n") + 1
