"""New scenarios: from options, a job's surroundings, files of other programs, PyTorch models and measured links."""
