"""The lock of one key: redis-py's lock, its commands, tokens, renewal and pending releases."""
