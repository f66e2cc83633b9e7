"""One module a kind of page: what was asked, what the history knows of it, which template."""
