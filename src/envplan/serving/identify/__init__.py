"""Serving profiles from benchmarks: what a sweep of loads says about a model on a GPU.

A benchmark row states times to the first token and between tokens at some load. Each is modelled
as a sum of terms that follow from the model's and the GPU's data sheets (`terms`): weights and
contexts read, arithmetic, messages between GPUs, work for each step and each request. A factor for
each term, how many times what the data sheet says it takes, is fitted to the rows (`fit`).

Enters: rows of benchmarks. Leaves: the two files of a serving profile. The command line and tools
may import it.
"""
