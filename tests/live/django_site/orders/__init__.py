"""An app of the project."""
