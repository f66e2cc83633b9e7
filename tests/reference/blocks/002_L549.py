from nemo_rl.trainers.callbacks import Callback

class LoggingCallback(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step % 100 == 0:
            print(f"Step {step}: loss={metrics['loss']:.4f}")

trainer.fit(data, callbacks=[LoggingCallback()])
