"""The lock of one key: redis-py's lock, its commands, its renewal, and the cleanup of keys that may be left behind."""
