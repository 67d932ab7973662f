"""The sections of a page of runs, a module each: a figure or table, and a conclusion in a sentence."""
