"""Connections to the server: kept between commands, safe when interrupted, for asyncio, Sentinel and Cluster."""
