"""The recipes, runnable; the tests run every one of them."""
