"""Scripts for maintainers, run from the top of the checkout: python -m tools.NAME."""
