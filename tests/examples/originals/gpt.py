"""The small GPT with a loop written by hand."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import trange

from examples.byte_lm.model import ByteGPT
from examples.ported.data import text

ACCUMULATE, WARMUP, PEAK, LOWEST = 2, 20, 3e-3, 3e-4


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
    model.train()
    return loss / total


def learning_rate(update, updates):
    if update < WARMUP:
        return PEAK * update / WARMUP
    done = (update - WARMUP) / (updates - WARMUP)
    return LOWEST + 0.5 * (PEAK - LOWEST) * (1 + math.cos(math.pi * done))


def make_optimizer(model):
    decayed = [each for name, each in model.named_parameters() if each.dim() >= 2 and "embedding" not in name]
    others = [each for name, each in model.named_parameters() if each.dim() < 2 or "embedding" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=True)


def endless(loader):
    while True:
        yield from loader


def train(model, loaders, folder, updates=200, evaluate_every=20):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = loaders
    last, best = Path(folder, "last.pt"), Path(folder, "best.pt")
    last.parent.mkdir(parents=True, exist_ok=True)
    model.to(device)
    optimizer = make_optimizer(model)
    first_update, best_loss = 0, float("inf")
    torch.manual_seed(0)
    if last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_update, best_loss = saved["update"], saved["best_loss"]
    batches = endless(train_loader)
    model.train()
    for update in trange(first_update, updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update, updates)
        for _ in range(ACCUMULATE):
            loss = loss_of(model, next(batches).to(device)) / ACCUMULATE
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (update + 1) % evaluate_every == 0 or update + 1 == updates:
            val_loss = evaluate(model, val_loader, device)
            print(f"update {update + 1}: loss {loss.item() * ACCUMULATE:.4f}, val loss {val_loss:.4f}")
            if val_loss < best_loss:
                best_loss = val_loss
                torch.save(model.state_dict(), best)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "update": update + 1, "best_loss": best_loss}, last)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(ByteGPT(layers=2, width=64, context=64), text(), "runs/gpt")
