"""Connections to the server: pinned between commands, safe when interrupted, for asyncio, Sentinel and Cluster."""
