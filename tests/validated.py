"""Checked rows as frames."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nemo_rl_core.data.schemas import checked_rows
from nemo_rl_core.types import Row


def validate_rows(rows: Sequence[Row], **options: Any) -> pd.DataFrame:
    """Checks rows of any kind, and returns them as a frame."""
    return checked_rows(rows, **options).to_pandas()
