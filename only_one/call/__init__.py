"""One call: its effective options, and acquiring and releasing the key around the run, sync and async."""
