"""Runs TRL's DPO to its end, as a script: `trl_dpo.py MODEL PAIRS STEPS BATCH RATE`."""

import json
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.benchmarks.comparison.trl_sides import dpo_trainer

    model, file, steps, batch, rate = sys.argv[1:6]
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as work:
        trainer = dpo_trainer(
            Path(model), rows, Path(work), num_steps=int(steps), batch=int(batch), rate=float(rate)
        )
        trainer.train()
        trainer.save_model(work)
