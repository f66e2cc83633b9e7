try:
    from nemo_rl.algorithms.myalgo import MyAlgoTrainer
    _ALGORITHM_REGISTRY["myalgo"] = MyAlgoTrainer
except ImportError:
    pass
