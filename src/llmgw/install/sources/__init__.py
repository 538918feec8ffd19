"""Where engines and weights come from: GitHub, mirrors, directories, the package index, model hubs."""

from llmgw.install.sources.base import Source, make_source
from llmgw.install.sources.get import fetch_asset
from llmgw.install.sources.models import fetch_model, resolve_model

__all__ = ["Source", "fetch_asset", "fetch_model", "make_source", "resolve_model"]
