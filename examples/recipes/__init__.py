"""The programs of the pages in docs/recipes that are run by workers, cron and servers."""
