"""The classifier of handwritten digits with a loop written by hand."""

from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from examples.ported.data import digits
from examples.ported.models import Classifier


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss, correct, total = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
        total += len(labels)
    return loss / total, correct / total


def train(model, loaders, folder, epochs=10):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = loaders
    last, best = Path(folder, "last.pt"), Path(folder, "best.pt")
    last.parent.mkdir(parents=True, exist_ok=True)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    first_epoch, best_loss = 0, float("inf")
    torch.manual_seed(0)
    if last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch, best_loss = saved["epoch"], saved["best_loss"]
    for epoch in range(first_epoch, epochs):
        model.train()
        for images, labels in tqdm(train_loader, desc=f"epoch {epoch + 1}"):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        val_loss, accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, val loss {val_loss:.4f}, accuracy {accuracy:.4f}")
        if val_loss < best_loss:
            best_loss = val_loss
            torch.save(model.state_dict(), best)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1, "best_loss": best_loss}, last)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Classifier(), digits(), "runs/digits")
