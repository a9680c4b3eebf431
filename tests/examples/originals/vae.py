"""The variational autoencoder with a loop written by hand."""

from pathlib import Path

import torch
from tqdm import tqdm

from examples.ported.data import images
from examples.ported.models import VariationalAutoencoder, evidence_bound


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss, total = 0.0, 0
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss += evidence_bound(model(inputs), targets).item() * len(inputs)
        total += len(inputs)
    return loss / total


def train(model, loaders, folder, epochs=20):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = loaders
    last, best = Path(folder, "last.pt"), Path(folder, "best.pt")
    last.parent.mkdir(parents=True, exist_ok=True)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    first_epoch, best_loss = 0, float("inf")
    torch.manual_seed(0)
    if last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch, best_loss = saved["epoch"], saved["best_loss"]
    for epoch in range(first_epoch, epochs):
        model.train()
        for inputs, targets in tqdm(train_loader, desc=f"epoch {epoch + 1}"):
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = evidence_bound(model(inputs), targets)
            loss.backward()
            optimizer.step()
        val_loss = evaluate(model, val_loader, device)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, val loss {val_loss:.4f}")
        if val_loss < best_loss:
            best_loss = val_loss
            torch.save(model.state_dict(), best)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1, "best_loss": best_loss}, last)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(VariationalAutoencoder(), images(), "runs/vae")
