"""The models of a fleet as clients see them: which one a request asks for, and the pages that list them."""

from __future__ import annotations

import msgspec
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from rubato.fleet.served_models import ServedModels
from rubato.frontdoor.admission import AdmittedRequest, FrontDoor
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.errors import ApiError
from rubato.serving.app_state import AppState, json_response

MAX_NAMES_IN_ERROR = 20  # listed in an error


def asked_model(body: BodyFields, models: ServedModels, door: FrontDoor, admitted: AdmittedRequest) -> str:
    """Returns the model that a body names; "" where it names none, which the server will judge.

    Raises ApiError 404 for a model that no server lists, and settles what was admitted. This check comes last, as it
    would at a server.
    """
    name = named_model(b'{"model":%b}' % (body.json("model") or b"null"))  # of any length: it is charged already
    if name and not models.is_listed(name):
        door.settle(admitted, admitted.choices, 0, 0)
        raise unknown_model(name, models)
    return name


class _ModelField(msgspec.Struct):
    model: str = ""


_decoder = msgspec.json.Decoder(_ModelField)


def named_model(raw: bytes) -> str:
    """Returns the model that a body of any kind names; "" where it names none. No other field is kept: the body is not
    checked, and could take far more memory than its bytes."""
    try:
        return _decoder.decode(raw).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def unknown_model(name: str, models: ServedModels) -> ApiError:
    """Returns the error of a model that no server lists."""
    known = list(models.entries())
    more = f" and {len(known) - MAX_NAMES_IN_ERROR} more" if len(known) > MAX_NAMES_IN_ERROR else ""
    message = (
        f"The model {name[:256]!r} does not exist; this fleet serves {', '.join(known[:MAX_NAMES_IN_ERROR])}{more}."
    )
    return ApiError(404, message, param="model", code="model_not_found")


class ModelPages:
    """Answers `/v1/models` with the models of all servers together."""

    def __init__(self, models: ServedModels, state: AppState) -> None:
        self._models, self._state = models, state

    async def all(self, http: HttpRequest) -> Response:
        self._state.enter(http)
        return json_response({"object": "list", "data": list(self._models.entries().values())})

    async def one(self, http: HttpRequest, name: str) -> Response:
        self._state.enter(http)
        if (entry := self._models.entries().get(name)) is None:
            raise unknown_model(name, self._models)
        return json_response(entry)
