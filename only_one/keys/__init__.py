"""Keys: from a call to its key by templates and callables, their fields, and the MD5 of arguments. Nothing of Redis."""
