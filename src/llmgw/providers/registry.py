"""Providers by name, all through the same door: entry points of group `llmgw.providers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata

from attrs import frozen

from llmgw.errors import ProviderError
from llmgw.providers.base import ATTRIBUTES, Provider

GROUP = "llmgw.providers"


@frozen
class ProviderProblem:
    """A provider that could not be used: which, from which distribution, and why."""

    name: str
    distribution: str
    reason: str

    def words(self) -> str:
        """One sentence."""
        source = f" of the distribution `{self.distribution}`" if self.distribution else ""
        return f"the provider `{self.name}`{source} is not available: {self.reason}"


@frozen
class Registry:
    """The providers that loaded, and a problem for each that did not."""

    providers: Mapping[str, Provider]
    problems: tuple[ProviderProblem, ...] = ()

    def get(self, name: str) -> Provider:
        """The provider of that name.

        Raises:
            ProviderError: there is none; says why when one failed to load.
        """
        found = self.providers.get(name)
        if found is not None:
            return found
        for problem in self.problems:
            if problem.name in (name, ""):
                raise ProviderError(problem.words(), hint="repair or remove that distribution")
        known = ", ".join(f"`{each}`" for each in sorted(self.providers)) or "none"
        raise ProviderError(
            f"there is no provider `{name}`", hint=f"known providers: {known}; others come as plugins ({GROUP})"
        )


def load(entry_points: Iterable[metadata.EntryPoint] | None = None) -> Registry:
    """Load every registered provider; one that fails is reported and the others go on.

    Args:
        entry_points: None means those of the installed distributions.
    """
    points = tuple(metadata.entry_points(group=GROUP) if entry_points is None else entry_points)
    if not points:
        reason = f"no distribution metadata with entry points `{GROUP}` is found beside the program"
        return Registry({}, (ProviderProblem("", "", f"{reason}; build the executable with its metadata"),))
    providers: dict[str, Provider] = {}
    problems = []
    for point in points:
        distribution = point.dist.name if point.dist is not None else ""
        try:
            made = _make(point)
        except Exception as error:  # a plugin may raise anything at all
            reason = error.words() if isinstance(error, ProviderError) else f"{type(error).__name__}: {error}"
            problems.append(ProviderProblem(point.name, distribution, reason))
            continue
        if made.name in providers:
            problems.append(ProviderProblem(point.name, distribution, "another distribution has the same name"))
        else:
            providers[made.name] = made
    return Registry(providers, tuple(problems))


def _make(point: metadata.EntryPoint) -> Provider:
    made = point.load()()
    missing = [name for name in ATTRIBUTES if not hasattr(made, name)]
    if missing:
        raise ProviderError(f"it lacks {', '.join(f'`{name}`' for name in missing)}")
    if made.name != point.name:
        raise ProviderError(f"it is registered as `{point.name}` and calls itself {made.name!a}")
    provider: Provider = made
    return provider
