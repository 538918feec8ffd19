"""The doors to releases and their files: `/assets/…` for agents, `/api/v1/releases` and `…/uploads` for `ctl`."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

from attrs import frozen
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from llmgw.domain.engines import Asset
from llmgw.errors import LlmgwError, UsageError
from llmgw.server.assets import Assets
from llmgw.server.auth import error_body
from llmgw.server.releases import ReleaseBook
from llmgw.sources.ask import NAME
from llmgw.sources.server import FETCHING
from llmgw.wire.shapes import to_full_json

_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,63}")
_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WAIT_S, _LOOK_S = 5.0, 0.1
_MOST_FILES = 2000


@frozen
class AssetDoors:
    """The handlers."""

    book: ReleaseBook
    assets: Assets

    def routes(self) -> list[Route]:
        """Their paths. `/assets/` needs no token: release files are public, and only exact known digests are served."""
        return [
            Route("/assets/{sha256}/{name}", self._file, methods=["GET"]),
            Route("/api/v1/releases", self._releases, methods=["GET"]),
            Route("/api/v1/releases", self._take_in, methods=["POST"]),
            Route("/api/v1/uploads/{sha256}/{name}", self._upload, methods=["PUT"]),
        ]

    async def _file(self, request: Request) -> Response:
        sha256, name = request.path_params["sha256"], request.path_params["name"]
        asset = self.book.find(sha256, name)
        if asset is None:
            error = LlmgwError("no release this server knows has a file of this digest and name", code="not-found")
            return JSONResponse(error_body(error), 404)
        for _ in range(math.ceil(_WAIT_S / _LOOK_S)):
            found = self.assets.want(asset)
            if found.path is not None:
                headers = {"etag": f'"{sha256}"', "cache-control": "public, max-age=31536000, immutable"}
                return FileResponse(found.path, media_type="application/octet-stream", headers=headers)
            if found.error is not None:
                return _cannot(found.error)
            await asyncio.sleep(_LOOK_S)
        told = error_body(LlmgwError(found.words, code=FETCHING))
        return JSONResponse({**told, "progress": to_full_json(found.progress)}, 503, {"retry-after": "1"})

    async def _releases(self, _: Request) -> Response:
        return JSONResponse({"releases": await run_in_threadpool(self._listed)})

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {
                "engine": known.release.engine,
                "version": known.release.version,
                "words": known.release.words,
                "asking": known.release.asking,
                "asked": known.asked,
                "assets": [
                    {
                        "name": asset.name,
                        "size_bytes": asset.size_bytes,
                        "sha256": asset.sha256,
                        "source": asset.source,
                        "kept": self.assets.keeps(asset),
                    }
                    for asset in known.assets
                ],
            }
            for known in self.book.listing()
        ]

    async def _upload(self, request: Request) -> Response:
        sha256, name = request.path_params["sha256"], request.path_params["name"]
        if not _SHA256.fullmatch(sha256) or not NAME.fullmatch(name):
            raise UsageError("an upload is named by 64 lower-case hex digits and a plain file name")
        size, offset = _number(request, "size"), _number(request, "offset")
        piece = await request.body()  # the gate lets no body over its limit pass
        asset = Asset(name, "", size, sha256)
        have = await run_in_threadpool(self.assets.put_piece, asset, offset, piece)
        return JSONResponse({"have": have, "complete": have == size})

    async def _take_in(self, request: Request) -> Response:
        try:
            body = await request.json()
            engine, version, listed = body["engine"], body["version"], body["assets"]
            assets = [Asset(each["name"], "", each["size_bytes"], each["sha256"]) for each in listed[:_MOST_FILES]]
            good = all(
                isinstance(asset.name, str)
                and NAME.fullmatch(asset.name)
                and type(asset.size_bytes) is int
                and isinstance(asset.sha256, str)
                and _SHA256.fullmatch(asset.sha256)
                for asset in assets
            )
            good = good and bool(_ENGINE.fullmatch(engine)) and bool(_VERSION.fullmatch(version)) and bool(assets)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError("the body is not an import", cause=str(error)[:200]) from error
        if not good:
            raise UsageError("the body is not an import", hint="an engine, a version, and files with size and sha256")
        missing = [asset.name for asset in assets if not self.assets.keeps(asset)]
        if missing:
            raise UsageError(f"`{missing[0]}` was not uploaded", hint="upload every file before the import")
        changed = await run_in_threadpool(self.book.take_in, engine, version, assets)
        return JSONResponse({"changed": changed, "engine": engine, "version": version})


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 15):
        raise UsageError(f"`{name}` must be a number of bytes")
    return int(text)


def _cannot(error: LlmgwError) -> Response:
    after = getattr(error, "retry_after_s", None)
    headers = {"retry-after": str(math.ceil(min(after, 3600)))} if after else {}
    return JSONResponse(error_body(error), 502, headers)
