"""The generator and the discriminator with a loop written by hand."""

from pathlib import Path

import torch
from tqdm import tqdm

from examples.ported.data import real_images
from examples.ported.models import NOISE, discriminator, discriminator_loss, generator, generator_loss, save_samples


def train(models, loader, folder, epochs=80):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    last = Path(folder, "last.pt")
    last.parent.mkdir(parents=True, exist_ok=True)
    generator, discriminator = (models[name].to(device) for name in ("generator", "discriminator"))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999), fused=True)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999), fused=True)
    first_epoch = 0
    torch.manual_seed(0)
    if last.exists():
        saved = torch.load(last)
        generator.load_state_dict(saved["generator"])
        discriminator.load_state_dict(saved["discriminator"])
        generator_optimizer.load_state_dict(saved["generator_optimizer"])
        discriminator_optimizer.load_state_dict(saved["discriminator_optimizer"])
        first_epoch = saved["epoch"]
    for epoch in range(first_epoch, epochs):
        for (real,) in tqdm(loader, desc=f"epoch {epoch + 1}"):
            real = real.to(device)
            fake = generator(torch.randn(len(real), NOISE, device=device))

            discriminator_optimizer.zero_grad()
            loss_d = discriminator_loss(discriminator(fake.detach()), discriminator(real))
            loss_d.backward()
            discriminator_optimizer.step()

            generator_optimizer.zero_grad()
            loss_g = generator_loss(discriminator(fake))
            loss_g.backward()
            generator_optimizer.step()
        print(f"epoch {epoch + 1}: D {loss_d.item():.4f}, G {loss_g.item():.4f}")
        state = {
            "generator": generator.state_dict(),
            "discriminator": discriminator.state_dict(),
            "generator_optimizer": generator_optimizer.state_dict(),
            "discriminator_optimizer": discriminator_optimizer.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, last)
    save_samples(generator, folder)


if __name__ == "__main__":
    torch.manual_seed(0)
    train({"generator": generator(), "discriminator": discriminator()}, real_images(), "runs/gan")
