from nemo_rl.algorithms.myalgo import MyAlgoTrainer, MyAlgoConfig

__all__ += ["MyAlgoTrainer", "MyAlgoConfig"]
