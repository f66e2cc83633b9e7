nemo_rl.train(model="...", dataset="...", reward_fn=fn)
    │
    ├─► _validate_inputs()          # Check required args
    │
    ├─► _create_trainer_for_algorithm()
    │       │
    │       ├─► _build_grpo_config()  # Build config dict
    │       │
    │       └─► GRPOTrainer(config)   # Create trainer
    │
    └─► trainer.fit(dataset, ...)
            │
            ├─► setup()              # Initialize components
            │       ├─► _setup_logger()
            │       ├─► _setup_checkpointing()
            │       └─► _setup_cluster()
            │
            ├─► _training_loop()     # Main training
            │       ├─► _on_epoch_begin()
            │       ├─► _train_step()
            │       └─► _on_epoch_end()
            │
            └─► TrainResult          # Return results
