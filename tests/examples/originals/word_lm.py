"""The LSTM over words with a loop written by hand."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm import tqdm

from examples.ported.data import WORDS, words
from examples.ported.models import WordModel


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss, total = 0.0, 0
    for tokens in loader:
        loss += loss_of(model, tokens.to(device)).item() * len(tokens)
        total += len(tokens)
    return loss / total


def train(model, loaders, folder, epochs=10):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = loaders
    last, best = Path(folder, "last.pt"), Path(folder, "best.pt")
    last.parent.mkdir(parents=True, exist_ok=True)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9, fused=True)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    first_epoch, best_loss = 0, float("inf")
    torch.manual_seed(0)
    if last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first_epoch, best_loss = saved["epoch"], saved["best_loss"]
    for epoch in range(first_epoch, epochs):
        model.train()
        for tokens in tqdm(train_loader, desc=f"epoch {epoch + 1}"):
            optimizer.zero_grad()
            loss = loss_of(model, tokens.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        val_loss = evaluate(model, val_loader, device)
        scheduler.step(val_loss)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, val loss {val_loss:.4f}, ppl {math.exp(val_loss):.2f}")
        if val_loss < best_loss:
            best_loss = val_loss
            torch.save(model.state_dict(), best)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "epoch": epoch + 1, "best_loss": best_loss}, last)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(WordModel(WORDS), words(), "runs/word_lm")
