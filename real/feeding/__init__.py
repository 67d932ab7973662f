"""Feeds a rank of a run with the samples of a real data set, as the plan says.

matching    the data set at a URL is the one of the plan
folders     where the node keeps files, and for how long
nodes       how the ranks of a node share memory, and wait for each other
inputs      one rank's reader: opened together with the other ranks, it fills batch after batch
batches     puts these into the buffers of a plan
tallies     what came from where, kept even if the run fails
"""
