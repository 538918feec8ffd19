"""The cluster page: rendered here, kept current by server-sent events, readable without script."""
