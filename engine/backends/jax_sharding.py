"""Which parameters of a model are split over which axes of a mesh of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NoReturn

from pulsetrain.engine.errors import ConfigurationError, did_you_mean, nearest

__all__ = ["ShardingRules", "Spec"]

AXES = ("data", "model")
SMALL = 1024  # elements: splitting fewer costs more time than it saves memory
_PLACE = "JaxBackend"
_WORDS = ("fsdp", "replicated")

Spec = tuple[tuple[str, ...], ...]  # the axes over which each dimension is split
Shape = tuple[int, ...]


class ShardingRules:
    """Checks a mesh and the rules for its parameters, and applies them.

    Args:
        mesh: the sizes of the axes "data" and "model", or of one of them.
        sharding: "replicated", "fsdp" (the largest dimension that divides is split over "data"; parameters of fewer
            than 1,024 elements, and those without such a dimension, are replicated), or a mapping of patterns of
            paths, in which * matches any text. A value is one of these two words, or a list with an axis, several, or
            None for each dimension. The first pattern that matches counts.

    Raises:
        ConfigurationError: an axis does not exist, or a value is none of these.

    >>> rules = ShardingRules({"data": 2, "model": 4}, {"*/kernel": [None, "model"], "*": "fsdp"})
    >>> rules.specs({"out/kernel": (6, 8), "table": (50, 64), "bias": (8,)}, {})
    {'out/kernel': ((), ('model',)), 'table': ((), ('data',)), 'bias': ()}
    """

    axes: dict[str, int]
    sharding: str | Mapping[str, object]

    def __init__(self, mesh: Mapping[str, int], sharding: str | Mapping[str, object] = "replicated") -> None:
        self.axes, self.sharding = _checked_axes(mesh), sharding
        self.default: str = "replicated"
        self._patterns: dict[
            str, tuple[str | Spec, Mapping[str, object]]
        ] = {}  # what each asks for, and as it was given
        if isinstance(sharding, Mapping):
            for pattern, value in sharding.items():
                self._patterns[str(pattern)] = self._parsed(value, {pattern: value}), {pattern: value}
        else:
            self.default = self._word(sharding, sharding, "'fsdp', 'replicated' or a mapping of patterns")

    def specs(self, shapes: Mapping[str, Shape], annotated: Mapping[str, Sequence[object]]) -> dict[str, Spec]:
        """How each parameter is split; () replicates it.

        Args:
            shapes: of the parameters, by their paths.
            annotated: what the model's own metadata says of some of them: the axis or axes of each dimension. A
                pattern that matches comes first.

        Raises:
            ConfigurationError: a pattern matches no parameter, a dimension does not divide by its axes, or "fsdp"
                splits no parameter.
        """
        for pattern, (_, given) in self._patterns.items():
            if not any(fnmatchcase(path, pattern) for path in shapes):
                near = nearest(pattern, shapes) or list(shapes)[:3]
                self._refuse(
                    f"matches none of the model's {len(shapes)} parameters, such as {', '.join(map(repr, near))}",
                    given,
                )
        found = {path: self._spec(path, shape, annotated.get(path, ())) for path, shape in shapes.items()}
        if self.default == "fsdp" and not any(found.values()):
            self._refuse(
                f"splits none of the model's parameters: none has {SMALL} elements and a dimension that divides by "
                f"data={self.axes['data']}; leave it out, or choose sizes that divide",
                self.default,
            )
        return found

    def _spec(self, path: str, shape: Shape, annotated: Sequence[object]) -> Spec:
        for pattern, (value, given) in self._patterns.items():
            if fnmatchcase(path, pattern):
                if isinstance(value, str):
                    return self._by_word(value, shape)
                return self._fitting(value, path, shape, "leave it out of the pattern", given)
        if annotated:
            return self._fitting(self._known(annotated, path), path, shape, "give its path a pattern in `sharding`")
        return self._by_word(self.default, shape)

    def _by_word(self, word: str, shape: Shape) -> Spec:
        sizes = [size if size % self.axes.get("data", 1) == 0 else 0 for size in shape]
        if word != "fsdp" or math.prod(shape) < SMALL or not any(sizes):
            return ()
        return (*((),) * sizes.index(max(sizes)), ("data",))

    def _known(self, annotated: Sequence[object], path: str) -> Spec:
        """The metadata's axes that this mesh has; the other of "data" and "model" counts as one of size 1."""
        spec = _names(annotated)
        unknown = [axis for names in spec for axis in names if axis not in AXES]
        if unknown:
            raise ConfigurationError(
                f"flax's metadata of the parameter {path!r} names the axis {unknown[0]!r}; name "
                f"{' or '.join(map(repr, AXES))} there, or give the path a pattern in `sharding`",
                _PLACE,
                mesh=self.axes,
            )
        return tuple(tuple(axis for axis in names if axis in self.axes) for names in spec)

    def _fitting(self, spec: Spec, path: str, shape: Shape, remedy: str, given: object = None) -> Spec:
        """The same spec, if the parameter can be split so."""
        if len(spec) > len(shape):
            self._refuse(f"the parameter {path!r} has {len(shape)} dimensions, not {len(spec)}; {remedy}", given)
        for dimension, (size, names) in enumerate(zip(shape, spec, strict=False)):
            if size % math.prod(self.axes[axis] for axis in names):
                axes = " x ".join(f"{axis}={self.axes[axis]}" for axis in names)
                self._refuse(
                    f"dimension {dimension} of the parameter {path!r} of shape {shape} does not divide by {axes}; "
                    f"choose a size that does, split another dimension, or {remedy}",
                    given,
                )
        return spec

    def _parsed(self, value: object, given: Mapping[str, object]) -> str | Spec:
        needs = "'fsdp', 'replicated' or a list with an axis, several axes or None for each dimension"
        if isinstance(value, str) or not isinstance(value, Sequence):
            return self._word(value, given, needs)
        if not all(each is None or isinstance(each, (str, Sequence)) for each in value):
            self._refuse(f"needs {needs}", given)
        spec = _names(value)
        used = [axis for names in spec for axis in names]
        for axis in used:
            if axis not in self.axes:
                known = ", ".join(f"{name}={size}" for name, size in self.axes.items())
                self._refuse(f"the mesh has no axis {axis!r}, only {known}{did_you_mean(axis, self.axes)}", given)
            if used.count(axis) > 1:
                self._refuse(f"splits two dimensions over {axis!r}; an axis can split one", given)
        return spec

    def _word(self, value: object, given: object, needs: str) -> str:
        if not isinstance(value, str) or value not in _WORDS:
            self._refuse(f"needs {needs}", given)
        if value == "fsdp" and "data" not in self.axes:
            self._refuse("splits over the axis 'data', which the mesh does not have; add it", given)
        return value

    def _refuse(self, rule: str, sharding: object) -> NoReturn:
        about = {"mesh": self.axes} if sharding is None else {"sharding": sharding}
        raise ConfigurationError(rule, _PLACE, **about)


def _checked_axes(mesh: object) -> dict[str, int]:
    if not isinstance(mesh, Mapping) or not mesh:
        raise ConfigurationError("needs axes with their sizes, such as {'data': 4}", _PLACE, mesh=mesh)
    for axis, size in mesh.items():
        if axis not in AXES:
            known = " and ".join(map(repr, AXES))
            raise ConfigurationError(f"the axes are {known}{did_you_mean(axis, AXES)}", _PLACE, mesh=dict(mesh))
        if type(size) is not int or size < 1:
            raise ConfigurationError("a size is a whole number of at least 1", _PLACE, mesh=dict(mesh))
    return dict(mesh)


def _names(spec: Sequence[object]) -> Spec:
    return tuple(
        () if each is None else (each,) if isinstance(each, str) else tuple(each)  # type: ignore[arg-type]
        for each in spec
    )
