"""One call: the options in force, acquiring and releasing the key around the run, sync and async."""
