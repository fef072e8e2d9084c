"""Readers and writers of files, CSV tables and JSON documents; sizes of input are limited here.

Enters: paths and bytes. Leaves: text, tables, checked models, files written whole or not at all.
Knows nothing of what files mean; everything may import it.
"""
