from nemo_rl.trainers.callbacks import Callback

class MyCallback(Callback):
    def on_epoch_end(self, trainer, epoch, metrics):
        print(f"Epoch {epoch}: {metrics['loss']}")

trainer.fit(data, callbacks=[MyCallback()])
