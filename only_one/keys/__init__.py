"""A call to its key: key templates and callables, their fields, and the MD5 of arguments. Nothing of Redis."""
