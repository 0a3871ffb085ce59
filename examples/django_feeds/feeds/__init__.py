"""An app of the project: feeds, and their import."""
