# tests/unit/algorithms/test_myalgo.py
import pytest
from nemo_rl.algorithms.myalgo import MyAlgoTrainer

class TestMyAlgoTrainer:
    def test_train_step_returns_loss(self):
        trainer = MyAlgoTrainer(config)
        result = trainer._train_step(batch)
        assert "loss" in result
