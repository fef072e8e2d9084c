"""The command line: a thin skin over the Python API.

Enters: what somebody types. Leaves: tables, JSON documents and files.
Nothing imports it.
"""
