"""The kind of any file of envplan, and the proof that it holds.

Enters: a file. Leaves: its kind and a sentence for everything that was proved of it.
Only the API and the command line import it.
"""
