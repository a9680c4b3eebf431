"""Makes the environments of a rollout, and those of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pulsetrain.engine.argument_checks import check_choice, check_type
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.rollouts.episodes import Episodes, SeparateEpisodes
from pulsetrain.engine.rollouts.spaces import ObservationSpace, distribution_of
from pulsetrain.engine.rollouts.vector_episodes import VectorEpisodes, is_vector

__all__ = ["EnvironmentMaker"]

_PLACE = "EnvironmentRollouts"
_USUAL = 8  # environments


class EnvironmentMaker:
    """Makes environments by a function or by the name that gymnasium knows.

    >>> class Still:
    ...     action_space = type("Discrete", (), {"n": 2})()
    ...     observation_space = type("Box", (), {"shape": (1,), "dtype": "float32"})()
    ...     def reset(self, seed=None):
    ...         return [0.0], {}
    ...     def step(self, action):
    ...         return [0.0], 1.0, True, False, {}
    >>> EnvironmentMaker(Still).episodes(3).count
    3

    Args:
        environment: a name, or a function.
        options: keywords for gymnasium.make.
        vectorization: "sync" or "async"; None steps separate environments.

    Raises:
        ConfigurationError: gymnasium is not installed or does not know the name, or options do not apply.
    """

    action_space: Any

    def __init__(
        self,
        environment: str | Callable[[], Any],
        options: dict[str, Any] | None = None,
        vectorization: str | None = None,
    ) -> None:
        self._environment, self._options, self._vectorization = environment, options or {}, vectorization
        self._make = environment if callable(environment) else self._by_name
        if vectorization is not None:
            check_choice(_PLACE, "vectorization", vectorization, ("sync", "async"))
        if isinstance(environment, str):
            self._check_name(environment)
            return
        needs = "a name, or a function that creates a new environment at each call"
        check_type(_PLACE, "environment", environment, Callable, needs)
        function = "in the function that creates the environment"
        if options:
            rule = f"only apply to gymnasium.make; use them {function}"
            raise ConfigurationError(rule, _PLACE, options=options)
        if vectorization is not None:
            rule = f"only applies to a name; use gymnasium.make_vec {function}"
            raise ConfigurationError(rule, _PLACE, vectorization=vectorization)

    def episodes(self, count: int | None) -> Episodes:
        """The episodes of a rollout; `action_space` is then known.

        Args:
            count: the environments; None: 8, or as many as a vector has.

        Raises:
            ConfigurationError: spaces are not supported, environments are not separate objects, or a vector has another
                number.
        """
        first = self._vector(count or _USUAL) if self._vectorization else self._make()
        if is_vector(first):
            self.action_space = first.single_action_space
            distribution_of(self.action_space)
            if count is not None and count != first.num_envs:
                rule = f"the vector has {first.num_envs}; leave it out, or pass the same number"
                raise ConfigurationError(rule, _PLACE, environments=count)
            return VectorEpisodes(first, ObservationSpace(first.single_observation_space))
        made = [first, *(self._make() for _ in range((count or _USUAL) - 1))]
        spaces = [_spaces_of(each) for each in made]
        if len({id(each) for each in made}) < len(made):
            raise ConfigurationError(
                "the function returns the same environment again; let it create a new one each time",
                _PLACE,
                environment=self._environment,
            )
        if any(each != spaces[0] for each in spaces):
            rule = "the function creates environments with different spaces; use the same for all"
            raise ConfigurationError(rule, _PLACE, environment=self._environment)
        self.action_space = first.action_space
        return SeparateEpisodes(made, ObservationSpace(first.observation_space))

    def episodes_to_evaluate(self, first: int) -> Episodes:
        """The episodes of new environments: one, or a vector.

        Args:
            first: the number of the first one, for its seeds.
        """
        made = self._make()
        if is_vector(made):
            return VectorEpisodes(made, ObservationSpace(made.single_observation_space), first)
        return SeparateEpisodes([made], ObservationSpace(made.observation_space), first)

    def _by_name(self) -> Any:
        import gymnasium

        return gymnasium.make(self._environment, **self._options)

    def _vector(self, count: int) -> Any:
        import gymnasium

        kind = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        return gymnasium.make_vec(
            self._environment, count, vectorization_mode=self._vectorization, vector_kwargs=kind, **self._options
        )

    def _check_name(self, name: str) -> None:
        try:
            import gymnasium
        except ImportError:
            raise ConfigurationError(
                "gymnasium is not installed; "
                "pip install 'pulsetrain[gymnasium]', or pass a function that creates an environment",
                _PLACE,
                environment=name,
            ) from None
        try:
            gymnasium.spec(name)
        except gymnasium.error.Error as error:
            raise ConfigurationError(f"{error}", _PLACE, environment=name) from None


def _spaces_of(environment: Any) -> tuple[object, object]:
    """What is equal for two environments with the same spaces.

    Raises:
        TypeError: it does not have gymnasium's interface.
        ConfigurationError: its spaces are not supported.
    """
    lacking = [
        name for name in ("action_space", "observation_space", "reset", "step") if not hasattr(environment, name)
    ]
    if lacking:
        raise TypeError(
            f"EnvironmentRollouts: {type(environment).__name__} has no {', '.join(lacking)}; needs an environment with "
            "gymnasium's interface"
        )
    observed = ObservationSpace(environment.observation_space)
    return distribution_of(environment.action_space).distribution, observed.shapes
