"""An autoencoder, as Lightning's documentation has it: "Lightning in 15 minutes"."""

import lightning as L
import local
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

local.imported()
SIDE = 28


class Clock(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= local.tick()


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width=2048):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(SIDE * SIDE * 3, width), nn.ReLU(), *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)), nn.Linear(width, 3)
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)), nn.Linear(width, SIDE * SIDE * 3)
        )  # fmt: skip
        self.losses, self.evaluations = [], []

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        x_hat = self.decoder(self.encoder(x))
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("val_loss", loss)

    def on_validation_epoch_end(self):
        self.evaluations.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


train_loader = torch.utils.data.DataLoader(local.Images(512, SIDE), batch_size=32)
val_loader = torch.utils.data.DataLoader(local.Images(64, SIDE), batch_size=32)
autoencoder = LitAutoEncoder()
checkpoints = ModelCheckpoint(local.OUT, every_n_train_steps=local.SAVE, filename="saved")
trainer = L.Trainer(
    max_steps=local.STEPS,
    max_epochs=2,
    accelerator="cpu",
    devices=1,
    gradient_clip_val=1.0,
    val_check_interval=local.SAVE,
    num_sanity_val_steps=0,
    callbacks=[checkpoints, Clock()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    autoencoder,
    train_loader,
    val_loader,
    ckpt_path=str(local.OUT / "saved.ckpt") if local.RESUME else None,
    weights_only=False,
)
trainer.save_checkpoint(local.OUT / "last.ckpt")
final = trainer.validate(autoencoder, val_loader, verbose=False)[0]["val_loss"]
local.told(losses=autoencoder.losses, evaluations=autoencoder.evaluations, final=final)
