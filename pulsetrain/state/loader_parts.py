"""The states of samplers and datasets that keep their own, as they were before the pass and as they are now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from pulsetrain.state.handler_registry import state_of
from pulsetrain.state.part import StateDict, Stateful, keeps_state

__all__ = ["LoaderParts", "parts_in", "parts_of_loader", "stateful_parts"]

_WRAPPED = ("sampler", "batch_sampler", "dataset", "data_source")  # what samplers and datasets wrap


def parts_of_loader(loader: object) -> Iterator[tuple[str, object]]:
    """The samplers, datasets and the `collate_fn` of a DataLoader, and those that they wrap, each once, by their paths.

    >>> from torch.utils.data import Subset
    >>> [path for path, part in parts_of_loader(DataLoader(Subset(range(9), [1, 2])))]
    ['dataset', 'sampler', 'batch_sampler', 'collate_fn', 'dataset.dataset']
    """
    names = ("dataset", "sampler", "batch_sampler", "collate_fn") if isinstance(loader, DataLoader) else ()
    return parts_in([(name, getattr(loader, name, None)) for name in names])


def parts_in(parts: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """These parts of a loader and those that they wrap, each once, by their paths."""
    waiting, seen = deque(parts), set[int]()
    while waiting:
        path, part = waiting.popleft()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        held = getattr(part, "__dict__", {})
        waiting += [(f"{path}.{name}", held[name]) for name in _WRAPPED if name in held]
        several = held.get("datasets")  # of a ConcatDataset
        if isinstance(several, (list, tuple)):
            waiting += [(f"{path}.datasets[{number}]", each) for number, each in enumerate(several)]


def stateful_parts(loader: object) -> dict[str, Stateful]:
    """Those of a DataLoader's parts that keep state, unless the loader keeps its own.

    Streams are left out: by convention, their state is a position in the pass, and a resumed run reads the pass again.
    """
    if keeps_state(loader):
        return {}
    found = {path: part for path, part in parts_of_loader(loader) if keeps_state(part)}
    return {path: part for path, part in found.items() if not isinstance(part, IterableDataset)}


class LoaderParts:
    """Saves and restores the samplers and the dataset of a loader that keep state.

    A pass is drawn again up to its position when a run resumes. So what is drawn from starts from its state before the
    pass, and gets the state of the save once the position is reached. With workers, which are given batches ahead of
    the training, the latter is known only before the first batch and after the last.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def begin(self, loader: object) -> None:
        """A pass begins."""
        self._before = {path: deepcopy(state_of(path, part)) for path, part in stateful_parts(loader).items()}

    def state_dict(self, loader: object, ahead: bool) -> dict[str, StateDict]:
        """Their states.

        Args:
            loader: of the current pass.
            ahead: whether batches may have been drawn that were not trained yet.
        """
        states: dict[str, StateDict] = {}
        for path, part in stateful_parts(loader).items():
            state: dict[str, Any] = {}
            if path in self._before and _is_drawn_from(path):
                state["before"] = self._before[path]
            if not (state and ahead):
                state["now"] = deepcopy(state_of(path, part))
            states[path] = state
        return states

    def resume(self, loader: object, saved: Mapping[str, StateDict]) -> Callable[[], None]:
        """Restore the states before the pass; the function that is returned, called at the position, the others."""
        parts = stateful_parts(loader)
        for path in parts.keys() & saved.keys():
            state = saved[path].get("before", saved[path].get("now"))
            parts[path].load_state_dict(deepcopy(state))
            self._before[path] = state

        def at_position() -> None:
            for path in parts.keys() & saved.keys():
                if "now" in saved[path]:
                    parts[path].load_state_dict(deepcopy(saved[path]["now"]))

        return at_position


def _is_drawn_from(path: str) -> bool:
    """Whether a pass is drawn from it again up to the position; the rows of a dataset are not read again."""
    return not path.startswith("dataset")
