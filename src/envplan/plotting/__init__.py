"""Figures. matplotlib is imported here and nowhere else, and only when something is drawn."""
