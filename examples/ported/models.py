"""The models and losses of the ported programs."""

from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.image import imsave
from torch import Tensor, nn


class Classifier(nn.Sequential):
    """Images (batch, 64) to logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


class Autoencoder(nn.Sequential):
    """Images (batch, 64) to the same, through 8 numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))


class VariationalAutoencoder(nn.Module):
    """Images (batch, 64) to logits of their pixels, through a normal distribution over 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * 4))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (batch, 64), means (batch, 4) and logarithms of variances (batch, 4); it draws while it is trained."""
        mean, log_variance = self.encoder(images).chunk(2, dim=-1)
        drawn = mean + (log_variance / 2).exp() * torch.randn_like(mean) if self.training else mean
        return self.decoder(drawn), mean, log_variance


def evidence_bound(outputs: tuple[Tensor, Tensor, Tensor], images: Tensor) -> Tensor:
    """The negative evidence lower bound (Kingma and Welling 2014, eq. 10), in nats an image."""
    logits, mean, log_variance = outputs
    reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return (reconstruction + divergence) / len(images)


class WordModel(nn.Module):
    """An LSTM over words (batch, length), to logits of the next word (batch, length, words)."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(words, width), nn.Dropout(0.2)
        self.lstm, self.head = (
            nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True),
            nn.Linear(width, words),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.head(self.dropout(outputs))
        return logits


NOISE = 16


def generator() -> nn.Sequential:
    """Noise (batch, NOISE) to images (batch, 64) from -1 to 1."""
    return _dense(NOISE, 64, nn.Tanh())


def discriminator() -> nn.Sequential:
    """Images (batch, 64) to a logit each, (batch, 1), that is high for real ones."""
    return _dense(64, 1, nn.Identity())


def discriminator_loss(on_fake: Tensor, on_real: Tensor) -> Tensor:
    """Goodfellow et al. 2014, algorithm 1, from logits (batch, 1)."""
    return F.softplus(on_fake).mean() + F.softplus(-on_real).mean()


def generator_loss(on_fake: Tensor) -> Tensor:
    """The non-saturating form, from logits (batch, 1)."""
    return F.softplus(-on_fake).mean()


@torch.no_grad()
def save_samples(generator: nn.Module, folder: str) -> None:
    """Write 40 images that it makes to FOLDER/samples.png."""
    drawn: Tensor = generator(torch.randn(40, NOISE)).view(4, 10, 8, 8)
    picture = nn.functional.pad(drawn, (1, 1, 1, 1), value=1.0).permute(0, 2, 1, 3).reshape(40, 100)
    imsave(Path(folder, "samples.png"), picture.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy(), cmap="gray")


def _dense(inputs: int, outputs: int, end: nn.Module) -> nn.Sequential:
    hidden = [nn.Linear(inputs, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, outputs), end)


class ActorCritic(nn.Module):
    """A policy over 2 actions and its critic, on one network over observations (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 128), nn.Tanh())
        self.actor, self.critic = nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, 2) and values (batch,)."""
        features = self.body(observations)
        return self.actor(features), self.critic(features).squeeze(-1)


def llama() -> nn.Module:
    """A model of transformers over bytes, made from a configuration: nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    return model
