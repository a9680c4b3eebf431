"""Lion from the package lion-pytorch, which importing this module requires."""

from __future__ import annotations

from typing import Any

import lion_pytorch

__all__ = ["Lion"]


class Lion(lion_pytorch.Lion):  # type: ignore[misc]  # the package is optional, hence Any
    """Lion (Chen et al. 2023) that works after copying and pickling; the package's own loses its update function."""

    def __getstate__(self) -> dict[str, Any]:
        saved = {key: self.__dict__[key] for key in ("_init_lr", "decoupled_wd", "update_fn")}
        return {**super().__getstate__(), **saved}
