"""Figures and pages. matplotlib is imported here alone, and only when something is drawn.

Enters: frontiers, plans, timelines, reports. Leaves: pictures and pages.
Only the command line imports it; values show themselves in notebooks through _io/notebook.py.
"""
