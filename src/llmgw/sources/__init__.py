"""Where engines and weights come from: GitHub, mirrors, directories, the package index, model hubs."""

from llmgw.sources.base import Source, make_source
from llmgw.sources.get import fetch_asset
from llmgw.sources.models import fetch_model, resolve_model

__all__ = ["Source", "fetch_asset", "fetch_model", "make_source", "resolve_model"]
