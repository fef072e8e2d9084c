"""Scripts for maintainers; not part of the package."""
