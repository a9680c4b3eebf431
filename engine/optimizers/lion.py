"""Lion from the package lion-pytorch, which importing this module requires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the package is optional and has no types
    from torch.optim import Optimizer as _Lion
else:
    from lion_pytorch import Lion as _Lion

__all__ = ["Lion"]


class Lion(_Lion):
    """Lion (Chen et al. 2023) that works after copying and pickling; the package's own loses its update function."""

    def __getstate__(self) -> dict[str, Any]:
        saved = {key: self.__dict__[key] for key in ("_init_lr", "decoupled_wd", "update_fn")}
        return {**super().__getstate__(), **saved}
