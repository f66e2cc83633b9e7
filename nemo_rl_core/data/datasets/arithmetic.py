"""Generated sums of two numbers."""

import random

from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.types import Row


def load(config: ArithmeticData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Returns distinct problems, in an order that depends only on the seed."""
    size = config.max_operand + 1
    total = config.num_train + config.num_validation
    problems = random.Random(seed).sample(range(size * size), total)
    rows = [_row(*divmod(problem, size)) for problem in problems]
    return rows[: config.num_train], rows[config.num_train :]


def _row(left: int, right: int) -> Row:
    answer = str(left + right)
    return {
        "id": f"{left}+{right}",
        "prompt": f"{left}+{right}=",
        "answer": answer,
        "completion": answer,
        "task": "arithmetic",
        "metadata": "{}",
    }
