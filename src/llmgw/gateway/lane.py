"""What all requests with the same head for the same model have in common: found once per snapshot, not per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmgw.gateway.dialects import serve_class
from llmgw.gateway.errors import RequestRefused
from llmgw.gateway.surface import model_problem

if TYPE_CHECKING:
    from llmgw.gateway.head import Known
    from llmgw.gateway.plane import Plane

_REMEMBERED = 256


class Lane:
    """Kept with a head that is remembered, so it is forgotten with it.

    Attributes:
        model, key: where to, and for whom. key_name: "" for an anonymous one. budget: what bounds the key's requests.
        many: there are several replicas to choose from. serve: the class of its requests, by the API they speak.
    """

    __slots__ = ("budget", "caps", "key", "key_name", "many", "serve")

    def __init__(self, plane: Plane, known: Known, name: str) -> None:
        self.key = known.key
        self.key_name: str = known.key.name if known.key is not None else ""
        self.budget = plane.keys.budget(known.key)
        model = plane.balance.models[name]
        self.caps = model.caps
        self.many = len(model.replicas) > 1
        self.serve = serve_class(known.head.path)


def find_lane(plane: Plane, known: Known, name: str) -> Lane:
    """The way of a request that names the model `name`.

    Raises:
        RequestRefused: there is no such model, not for this key or not on this path.
    """
    problem = model_problem(plane, known.head.path, name, known.key)
    if problem is not None:
        raise RequestRefused(problem)
    lane = Lane(plane, known, name)
    if known.epoch is plane.heads.epoch:
        if len(known.lanes) >= _REMEMBERED:
            known.lanes.clear()
        known.lanes[name] = lane
    return lane
