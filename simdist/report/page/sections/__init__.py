"""The sections of a page of runs, a module each: what is shown, and what follows from it in a sentence."""
